//! The server: its state for one name, and what each script does to it.
//!
//! Left out: the limit of waiters that one script removes, the random removal of entries whose time is over (nothing reads them), the
//! message `first`, reservations and forced releases.

use serde::{Deserialize, Serialize};

/// The state of the server for one name. Times are in milliseconds of the server's clock.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Server<O> {
    /// The lock, which may have ended.
    pub lock: Option<Lock<O>>,
    /// The last token drawn.
    pub counter: u64,
    /// The waiters, the oldest first.
    pub queue: Vec<Entry<O>>,
}

/// The lock as the server stores it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Lock<O> {
    /// The claim that holds it.
    pub owner: O,
    /// Its token.
    pub token: u64,
    /// When it ends.
    pub end: u64,
}

/// A waiter as the server stores it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Entry<O> {
    /// The claim that waits.
    pub owner: O,
    /// When the claim must have ended.
    pub stop: u64,
    /// How long a lease lasts.
    pub ttl: u64,
    /// The stamp of the request, which the client gets back with the grant.
    pub sent: u64,
    /// What was left of the claim when the request arrived.
    pub life: u64,
}

/// A request to take the name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Acquire<O> {
    /// The claim.
    pub owner: O,
    /// How long a lease lasts.
    pub ttl: u64,
    /// When the claim must have ended.
    pub stop: u64,
    /// The stamp of the request.
    pub sent: u64,
    /// Whether the claim waits.
    pub waits: bool,
}

/// What a script answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// The claim holds the name.
    Granted {
        /// Its token.
        token: u64,
        /// For how long, from the sending of the request on.
        life: u64,
    },
    /// Another claim holds the name, or is before this one in the queue.
    Busy,
    /// The request arrived too late, and did nothing.
    Late,
}

/// What a renewal is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Renewal {
    /// The lease is a full ttl again.
    Renewed,
    /// The request arrived too late, and did nothing.
    Late,
    /// The claim does not hold the name.
    Lost,
}

/// A grant that is pushed to a waiter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Push<O> {
    /// The claim that was granted the name.
    pub owner: O,
    /// Its token.
    pub token: u64,
    /// The stamp of the request that is answered.
    pub sent: u64,
    /// For how long, from the sending of that request on.
    pub life: u64,
}

/// What is planted in the scripts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// A request is carried out however late it arrives, and for a full ttl.
    LateRequestCounts,
    /// A newcomer takes a free name although others wait.
    NewcomerOvertakes,
    /// A refresh puts a waiter at the end of the queue.
    RefreshLosesThePlace,
    /// A claim that gives up leaves the queue, and keeps what it was granted meanwhile.
    GivingUpOnlyLeavesTheQueue,
    /// The number of clients that received the push is not looked at.
    ReceiversNotCounted,
    /// A lock that is granted to a waiter has no end.
    PushedLockHasNoEnd,
    /// A renewal of a lock that has ended takes the name again.
    RenewalTakesAgain,
}

/// When a script runs, and what it meets.
#[expect(missing_debug_implementations, reason = "it has a closure, and nothing prints it")]
#[derive(Clone, Copy)]
pub struct Run<'a, O> {
    /// The server's clock, in microseconds.
    pub now_us: u64,
    /// Whether a push to that claim has a receiver.
    pub hears: &'a dyn Fn(&O) -> bool,
    /// For how long the server keeps a lock that has ended. Redis does so for up to a millisecond, which is nothing in the model's time.
    pub keeps: u64,
    /// What is planted.
    pub bug: Option<Bug>,
}

impl<O: Clone + PartialEq> Run<'_, O> {
    fn now(&self) -> u64 {
        self.now_us / 1000
    }

    fn has(&self, bug: Bug) -> bool {
        self.bug == Some(bug)
    }

    /// How long a claim may live that asks now. None if it asks too late.
    fn life(&self, ttl: u64, stop: u64) -> Option<u64> {
        if self.has(Bug::LateRequestCounts) {
            return Some(ttl);
        }
        let life = ttl.min(stop.checked_sub(self.now())?);
        (life * 2 >= ttl).then_some(life)
    }
}

impl<O> Entry<O> {
    /// Whether the client has missed at most one refresh.
    pub fn is_live(&self, now: u64) -> bool {
        self.stop.saturating_sub(now) * 3 >= self.ttl
    }
}

impl<O: Clone + PartialEq> Server<O> {
    /// A server that knows nothing of the name.
    #[must_use]
    pub fn new() -> Self {
        Self {
            lock: None,
            counter: 0,
            queue: Vec::new(),
        }
    }

    /// The lock, unless it has ended.
    pub fn held(&self, now: u64) -> Option<&Lock<O>> {
        self.lock.as_ref().filter(|lock| lock.end > now)
    }

    /// Takes the name, or enters the queue.
    pub fn acquire(&mut self, run: &Run<'_, O>, request: &Acquire<O>) -> (Answer, Option<Push<O>>) {
        self.tidy(run);
        let Some(life) = run.life(request.ttl, request.stop) else {
            return (Answer::Late, None);
        };
        let (answer, push) = self.take(run, &request.owner, life);
        if answer == Answer::Busy && request.waits {
            self.enqueue(run, request, life);
        }
        (answer, push)
    }

    /// Lengthens the lease.
    pub fn renew(&mut self, run: &Run<'_, O>, owner: &O, ttl: u64, stop: u64) -> (Renewal, Option<Push<O>>) {
        self.tidy(run);
        if run.has(Bug::RenewalTakesAgain) && self.lock.is_none() {
            self.hold(run, owner, ttl);
        }
        match &mut self.lock {
            Some(lock) if lock.owner == *owner => {
                if run.now() > stop && !run.has(Bug::LateRequestCounts) {
                    return (Renewal::Late, None);
                }
                lock.end = run.now() + ttl;
                (Renewal::Renewed, None)
            }
            Some(_) => (Renewal::Lost, None),
            None => (Renewal::Lost, self.serve(run, None)),
        }
    }

    /// Frees the name, leaves the queue, and serves the next waiter. Says whether the claim held the name.
    pub fn release(&mut self, run: &Run<'_, O>, owner: &O) -> (bool, Option<Push<O>>) {
        self.tidy(run);
        let queued = self.queue.iter().any(|entry| entry.owner == *owner);
        let keeps = run.has(Bug::GivingUpOnlyLeavesTheQueue) && !queued;
        let released = self.is_held_by(owner) && !keeps;
        if released {
            self.lock = None;
        }
        self.leave(owner);
        let push = if self.lock.is_none() {
            self.serve(run, None)
        } else {
            None
        };
        (released, push)
    }

    /// Makes the claim the holder if it is already, or if the name is free and no waiter comes before it.
    fn take(&mut self, run: &Run<'_, O>, owner: &O, life: u64) -> (Answer, Option<Push<O>>) {
        if let Some(lock) = &mut self.lock {
            if lock.owner != *owner {
                return (Answer::Busy, None);
            }
            lock.end = lock.end.max(run.now() + life);
            let token = lock.token;
            return (Answer::Granted { token, life }, None);
        }
        if !run.has(Bug::NewcomerOvertakes)
            && let Some(push) = self.serve(run, Some(owner))
        {
            return (Answer::Busy, Some(push));
        }
        self.leave(owner);
        (self.hold(run, owner, life), None)
    }

    fn hold(&mut self, run: &Run<'_, O>, owner: &O, life: u64) -> Answer {
        let token = self.draw(run);
        self.lock = Some(Lock {
            owner: owner.clone(),
            token,
            end: run.now() + life,
        });
        Answer::Granted { token, life }
    }

    /// **Invariant.** A token is above the last one, and not below the clock.
    fn draw(&mut self, run: &Run<'_, O>) -> u64 {
        self.counter = run.now_us.max(self.counter + 1);
        self.counter
    }

    /// Before: the name is free. Gives it to the waiter that has waited longest and hears of it. Leaves it free if that is `me`.
    fn serve(&mut self, run: &Run<'_, O>, me: Option<&O>) -> Option<Push<O>> {
        // One token is drawn for all waiters that a script tries.
        let mut drawn = None;
        while self.queue.first().is_some_and(|first| Some(&first.owner) != me) {
            let entry = self.queue.remove(0);
            if !entry.is_live(run.now()) {
                continue;
            }
            let token = match drawn {
                Some(token) => token,
                None => *drawn.insert(self.draw(run)),
            };
            if !(run.hears)(&entry.owner) && !run.has(Bug::ReceiversNotCounted) {
                continue;
            }
            let left = (entry.stop - run.now()).min(entry.life);
            let end = if run.has(Bug::PushedLockHasNoEnd) {
                u64::MAX
            } else {
                run.now() + left
            };
            self.lock = Some(Lock {
                owner: entry.owner.clone(),
                token,
                end,
            });
            let Entry { owner, sent, life, .. } = entry;
            return Some(Push {
                owner,
                token,
                sent,
                life,
            });
        }
        None
    }

    /// Puts the claim at the end of the queue, or keeps it where it is for another life.
    fn enqueue(&mut self, run: &Run<'_, O>, request: &Acquire<O>, life: u64) {
        let entry = Entry {
            owner: request.owner.clone(),
            stop: run.now() + life,
            ttl: request.ttl,
            sent: request.sent,
            life,
        };
        if run.has(Bug::RefreshLosesThePlace) {
            self.leave(&request.owner);
        }
        match self.queue.iter_mut().find(|queued| queued.owner == request.owner) {
            Some(queued) => *queued = entry,
            None => self.queue.push(entry),
        }
    }

    fn leave(&mut self, owner: &O) {
        self.queue.retain(|entry| entry.owner != *owner);
    }

    fn is_held_by(&self, owner: &O) -> bool {
        self.lock.as_ref().is_some_and(|lock| lock.owner == *owner)
    }

    fn tidy(&mut self, run: &Run<'_, O>) {
        if self.held(run.now().saturating_sub(run.keeps)).is_none() {
            self.lock = None;
        }
    }
}

impl<O: Clone + PartialEq> Default for Server<O> {
    fn default() -> Self {
        Self::new()
    }
}
