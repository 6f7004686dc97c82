//! The state of one name, and how it changes.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::Notify;

use super::{Ask, Asking, Granted, KnownHolder, Name, Step, TOO_LATE};
use crate::client::ClientInner;
use crate::held::Held;
use crate::owner::Owners;
use crate::release::{Release, Releasing};
use crate::wait::SharedWait;
use crate::waiters::{Answers, Queue, SHORTEST_RESPONSE, Waiter};
use crate::{Busy, Claim, FencingToken, Grant, Holder, Lease, LockError, Stamp};

impl Name {
    /// The claim that was kept has a guard again.
    pub(crate) fn resumed(
        &mut self,
        claim: &Claim,
        token: FencingToken,
        up_to: u64,
        now: Stamp,
    ) -> (Answers, Option<Arc<Held>>) {
        let kept = self.kept.take();
        (self.serves(0, claim, token, up_to, now), kept)
    }

    /// The release of the claim is confirmed, or given up.
    pub(crate) fn released(&mut self, is_confirmed: bool) -> Option<(Box<Release>, Option<Arc<Held>>)> {
        let release = self.releasing.take()?;
        self.is_contended |= self.front().is_some();
        self.holder.take_if(|holder| matches!(holder, KnownHolder::Here { .. }));
        if is_confirmed && let Some(queue) = &mut self.queue {
            queue.failure = None;
        }
        Some((release, self.kept.take()))
    }

    /// Whether it is the turn of other clients: waiters of this one have kept the name to themselves for `longest`, from one to the next.
    pub(crate) fn yields(&mut self, now: Stamp, longest: Duration) -> bool {
        if self.front().is_none() {
            self.tenure = None;
        } else if now.since(*self.tenure.get_or_insert(now)) >= longest {
            self.tenure = None;
            return true;
        }
        false
    }

    /// The claim that is being released.
    pub(crate) fn releasing(&mut self) -> Option<&mut Release> {
        self.releasing.as_deref_mut()
    }

    /// The server says busy. `ends` the request, or it goes on waiting there.
    pub(crate) fn busy(&mut self, busy: &Busy, ends: bool, up_to: u64, now: Stamp) -> Answers {
        if ends {
            // It leaves nothing behind. The backend may have released the claim, and the network may deliver that once more: the next request is
            // for a claim of its own.
            self.asking = None;
        } else if let Some(asking) = &mut self.asking {
            asking.busy = true;
        }
        self.tenure = None;
        self.settle(KnownHolder::Elsewhere(Box::new(busy.clone())), up_to);
        let mut answers = self.refuse_impatient(now);
        if ends && let Some(queue) = &mut self.queue {
            answers.extend(queue.end(|waiter| waiter.is_over(up_to, now).then(|| waiter.timed_out(now, busy))));
        }
        answers
    }

    /// A request to acquire failed, and left nothing at the server if it was `unsent`. What may pass is waited out by those who have the time. A
    /// failure `for_good` ends every wait.
    ///
    /// If its wait was over (`is_over`), the backend may have begun to release the claim, and the network may deliver that later: the next request
    /// is for a claim of its own.
    pub(crate) fn failed(&mut self, error: &LockError, unsent: bool, is_over: bool, up_to: u64, now: Stamp) -> Answers {
        let for_good = !matches!(error, LockError::Unavailable { .. });
        self.holder = None;
        if let Some(asking) = &mut self.asking {
            // A server that has said busy knows of the claim.
            asking.sent &= !unsent || asking.busy;
            asking.busy = false;
            asking.failed |= for_good || is_over;
        }
        self.fail_waits(error, for_good, u64::MAX, up_to, now)
    }

    /// A release failed. That says nothing to requests that came after it was sent, up to `sent`: what was wrong may have been mended.
    pub(crate) fn release_failed(&mut self, error: &LockError, sent: u64, up_to: u64, now: Stamp) -> Answers {
        self.holder = None;
        self.fail_waits(error, !matches!(error, LockError::Unavailable { .. }), sent, up_to, now)
    }

    fn fail_waits(&mut self, error: &LockError, for_good: bool, sent: u64, up_to: u64, now: Stamp) -> Answers {
        let Some(queue) = &mut self.queue else {
            return Answers::new();
        };
        queue.failure = Some((error.clone(), up_to.min(sent)));
        let (up_to, soon) = (queue.busy_up_to, now + TOO_LATE);
        queue.end(|waiter| {
            let ends = match waiter.serial <= sent {
                true => for_good || waiter.is_impatient || waiter.is_over(up_to, soon),
                // One that does not wait is answered by what it asks itself.
                false => !waiter.is_impatient && waiter.is_over(up_to, soon),
            };
            ends.then(|| error.clone())
        })
    }

    /// The claim is granted: takes out the waiter that gets it. `None` if no waiter wants it, and it is to be released: other locks may keep
    /// its lease alive.
    pub(crate) fn granted(&mut self, grant: &Grant, up_to: u64, now: Stamp) -> Option<(Granted, Option<Box<Asking>>)> {
        let is_wanted = self.asking.as_ref().is_some_and(|asking| !asking.failed);
        let served = is_wanted.then(|| self.serve(&grant.claim, grant.first_token(), up_to, now));
        match served.flatten() {
            Some(served) => {
                self.is_held = true;
                Some((served, self.asking.take()))
            }
            None => {
                self.granted_in_vain(&grant.lease);
                None
            }
        }
    }

    /// The claim is granted to the request that has begun first. Returns the task if others have come that need it.
    pub(crate) fn granted_at_once(
        &mut self,
        grant: &Grant,
        serial: u64,
        up_to: u64,
        now: Stamp,
    ) -> (Answers, Option<Box<Asking>>, Option<Arc<Notify>>) {
        self.is_held = true;
        let asking = self.asking.take();
        let refused = self.serves(serial, &grant.claim, grant.first_token(), up_to, now);
        if self.next_expiry().is_none() {
            self.task = None;
        }
        (refused, asking, self.task.clone())
    }

    /// The claim was granted with that lease, and is to be released.
    pub(crate) fn granted_in_vain(&mut self, lease: &Lease) {
        if let Some(asking) = self.asking.as_mut().filter(|_| lease.claim().is_none()) {
            asking.shared = Some(lease.clone());
        }
    }

    /// Whether the request that is under way waits at the server for no caller that is still there.
    pub(crate) fn is_wait_over(&self) -> bool {
        let (asking, queue) = (self.asking.as_ref(), self.queue.as_deref());
        asking.is_none_or(|asking| asking.busy && !asking.serves(queue))
    }

    /// When the time of a waiter ends first.
    pub(crate) fn next_expiry(&self) -> Option<Stamp> {
        self.queue.as_ref()?.next_expiry()
    }

    /// Ends the requests whose time is over. The response to the request that is under way decides about those that wait until
    /// `asked_until` or longer.
    pub(crate) fn expire(&mut self, now: Stamp, asked_until: Option<Stamp>, core: &ClientInner) -> Answers {
        let Some(queue) = &mut self.queue else {
            return Answers::new();
        };
        let (up_to, failure, holder) = (queue.busy_up_to, queue.failure.clone(), &self.holder);
        let answers = queue.end_due(now, |waiter| {
            let knows_busy = waiter.knows_busy(up_to);
            let deadline = waiter.deadline.filter(|_| !waiter.is_impatient);
            if !waiter.is_impatient && knows_busy {
                let deadline = deadline?;
                if asked_until.is_some_and(|at| deadline >= at) && now < deadline + SHORTEST_RESPONSE {
                    waiter.expiry = Some(now + SHORTEST_RESPONSE);
                    return None;
                }
            }
            let shortest = waiter.started + SHORTEST_RESPONSE.min(core.op_timeout);
            match (holder, &failure) {
                (Some(holder), _) if deadline.is_some() && knows_busy => Some(waiter.timed_out(now, &holder.busy())),
                (_, Some((error, up_to))) if waiter.serial <= *up_to => Some(error.clone()),
                _ if deadline.is_some() && now < shortest => {
                    (waiter.is_impatient, waiter.expiry) = (true, Some(shortest));
                    None
                }
                _ => Some(LockError::no_answer(
                    "acquire",
                    now.since(waiter.started).min(core.op_timeout),
                )),
            }
        });
        if !answers.is_empty() {
            self.count_abandoned(|| core.releasing());
        }
        answers
    }

    /// Whether a waiter is there.
    pub(crate) fn has_waiters(&self) -> bool {
        self.front().is_some()
    }

    /// Whether callers that do not wait are refused without a request.
    pub(super) fn is_busy(&self) -> bool {
        // One that was kept and has ended is about to be released, and so is one whose caller has gone away.
        self.is_held && self.kept.is_none() && !self.is_undelivered
            || self.releasing.is_none() && self.asking.as_ref().is_some_and(|asking| asking.busy)
    }

    /// Takes out the first waiter, if a grant of `claim` is what it asks for.
    pub(super) fn serve(&mut self, claim: &Claim, token: FencingToken, up_to: u64, now: Stamp) -> Option<Granted> {
        let queue = self.queue.as_mut()?;
        let first = queue.front().filter(|front| front.options.is_served_by(claim))?.serial;
        let waiter = queue.remove(first)?;
        Some((waiter, self.serves(first, claim, token, up_to, now)))
    }

    /// The request with that serial gets the guard. The lock is busy for those up to another one.
    pub(super) fn serves(
        &mut self,
        serial: u64,
        claim: &Claim,
        token: FencingToken,
        up_to: u64,
        now: Stamp,
    ) -> Answers {
        self.served = serial;
        self.is_undelivered = false;
        let holder = KnownHolder::Here {
            claim: claim.clone(),
            token,
            since: SystemTime::now(),
        };
        self.settle(holder, up_to);
        self.refuse_impatient(now)
    }

    pub(super) fn front(&self) -> Option<&Waiter> {
        self.queue.as_ref()?.front()
    }

    /// Counts the clean-up of a claim that no waiter wants any more.
    pub(super) fn count_abandoned(&mut self, count: impl FnOnce() -> Releasing) {
        let queue = self.queue.as_deref();
        if let Some(asking) = self
            .asking
            .as_mut()
            .filter(|asking| asking.sent && !asking.serves(queue))
        {
            asking.abandoned.get_or_insert_with(count);
        }
    }

    /// The claim has a waiter again: what counted its clean-up, to be dropped without the mutex.
    pub(super) fn wanted_again(&mut self) -> Option<Releasing> {
        let queue = self.queue.as_deref();
        let asking = self.asking.as_mut().filter(|asking| asking.serves(queue))?;
        asking.abandoned.take()
    }

    /// Wakes the task, or returns the one that is to be started.
    pub(super) fn wake(&mut self) -> Option<Arc<Notify>> {
        if let Some(task) = &self.task {
            task.notify_one();
            return None;
        }
        let task = Arc::new(Notify::new());
        self.task = Some(Arc::clone(&task));
        Some(task)
    }

    /// The next request for the first waiter.
    pub(super) fn ask(&mut self, owners: &Owners, lingers: bool) -> Option<Ask> {
        let queue = self.queue.as_ref()?;
        let is_impatient = queue.front()?.is_impatient;
        if self.asking.is_none() {
            let claim = queue.claim(owners.next(), lingers || self.is_contended)?;
            self.asking = Some(Box::new(Asking::new(claim)));
        }
        let last_deadline = self.last_deadline()?;
        let (asking, task) = (self.asking.as_mut()?, self.task.as_ref()?);
        let wait = (!is_impatient).then(|| SharedWait::new(last_deadline, task));
        asking.busy = false;
        let was_sent = std::mem::replace(&mut asking.sent, true);
        Some(Ask {
            claim: asking.claim.clone(),
            wait,
            was_sent,
        })
    }

    /// Until when the claim is waited for by one of those that it goes to, one after the other: it keeps its place at the server when the first
    /// of them leaves.
    pub(crate) fn last_deadline(&mut self) -> Option<Stamp> {
        let claim = &self.asking.as_ref()?.claim;
        self.queue.as_mut()?.last_deadline(claim)
    }

    pub(super) fn settle(&mut self, holder: KnownHolder, up_to: u64) {
        self.holder = Some(holder);
        if let Some(queue) = &mut self.queue {
            queue.busy_up_to = up_to;
            queue.failure = None;
        }
    }

    pub(super) fn refuse_all(&mut self, error: &LockError) -> Answers {
        let queue = self.queue.take();
        queue
            .map(|mut queue| queue.end(|_| Some(error.clone())))
            .unwrap_or_default()
    }

    pub(super) fn refuse_impatient(&mut self, now: Stamp) -> Answers {
        let Some(queue) = self.queue.as_mut().filter(|queue| queue.has_impatient()) else {
            return Answers::new();
        };
        let busy = self.holder.as_ref().map(KnownHolder::busy).unwrap_or_default();
        queue.end(|waiter| waiter.is_impatient.then(|| waiter.timed_out(now, &busy)))
    }
}

impl KnownHolder {
    pub(super) fn busy(&self) -> Busy {
        match self {
            Self::Elsewhere(busy) => Busy::clone(busy),
            Self::Here { claim, token, since } => {
                let mut holder = Holder::of(claim);
                (holder.token, holder.acquired_at) = (Some(*token), Some(*since));
                Busy::default().with_holder(holder)
            }
        }
    }
}

impl Release {
    pub(super) fn step(&self) -> Step {
        Step::Release(self.claim.clone(), self.reservation)
    }
}

impl Asking {
    pub(super) fn new(claim: Claim) -> Self {
        Self {
            claim,
            sent: false,
            busy: false,
            failed: false,
            shared: None,
            abandoned: None,
        }
    }

    /// Whether the first waiter can have the claim.
    pub(super) fn serves(&self, queue: Option<&Queue>) -> bool {
        let front = queue.and_then(Queue::front);
        !self.failed && front.is_some_and(|front| front.options.is_served_by(&self.claim))
    }
}
