//! One node: its state for one name, and what each request does to it.

use std::ops::Add;

use serde::{Deserialize, Serialize};

/// A fencing token, or a clock reading in the same unit.
///
/// The model uses bytes, to keep its states small. Traces use the real numbers.
pub trait Token: Copy + Ord + Add<Output = Self> + From<u8> {}

impl<T: Copy + Ord + Add<Output = T> + From<u8>> Token for T {}

/// The state of a node for one name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Node<O, T> {
    /// Who holds the name on this node.
    pub lock: Option<Lock<O, T>>,
    /// The highest token that this node has drawn or confirmed. None after loss of data.
    pub counter: Option<T>,
    /// The waiters, the first one to be served first.
    pub queue: Vec<Waiter<O, T>>,
    /// Whether the node may grant.
    pub born: Born,
}

/// The lock as a node stores it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lock<O, T> {
    /// The acquisition that holds it.
    pub owner: O,
    /// The token that was drawn for this grant, or confirmed since.
    pub token: T,
}

/// A waiter. Waiters are ordered by stamp, then by owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Waiter<O, T> {
    /// Its [place](Node::place): when the acquisition began, by the clock of its client, or later.
    pub stamp: T,
    /// The acquisition that waits.
    pub owner: O,
}

/// How far a node is after a start, or after a loss of its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Born {
    /// The node was started or has lost its data, and has not been asked since.
    Absent,
    /// The node was asked, and does not grant before the restart delay is over.
    New,
    /// The node grants.
    Open,
}

/// A request to a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request<O, T> {
    /// Take the name, or enter the queue.
    Acquire {
        /// The acquisition.
        owner: O,
        /// A token that the client proposes: its clock.
        proposal: T,
        /// The place in the queue, if the acquisition waits.
        waits: Option<T>,
    },
    /// Raise the counter to the token of the acquisition.
    Confirm {
        /// The acquisition.
        owner: O,
        /// What this node answered to the acquisition.
        presented: T,
        /// The highest answer of all nodes.
        token: T,
    },
    /// Lengthen the lease.
    Renew {
        /// The acquisition.
        owner: O,
    },
    /// Free the name, and leave the queue.
    Release {
        /// The acquisition.
        owner: O,
    },
    /// Give the name to the earliest waiter, which may be this acquisition: what lock-redis does in place of [`Yield`](Self::Yield).
    YieldAndAcquire {
        /// The acquisition.
        owner: O,
        /// A token that the client proposes: its clock.
        proposal: T,
        /// The place in the queue.
        stamp: T,
    },
    /// Free the name if it was granted with this token, and go back into the queue.
    Yield {
        /// The acquisition.
        owner: O,
        /// What this node answered to the acquisition.
        presented: T,
        /// The place in the queue.
        stamp: T,
    },
}

/// What decides about a request besides the state that is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Circumstances<'a, O, T> {
    /// The node's clock.
    pub clock: T,
    /// Whether the restart delay is over.
    pub delay_over: bool,
    /// The waiters that have not been heard of for too long. The node removes them when it would serve them.
    pub gone: &'a [O],
    /// The waiters whose push has no receiver. The node removes them once it has tried to serve them.
    pub unheard: &'a [O],
}

/// What a node answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer<T> {
    /// The acquisition holds the name on this node, with this token.
    Granted(T),
    /// Another acquisition holds the name, or is before this one in the queue.
    Busy,
    /// The restart delay is not over.
    Young,
    /// The request arrived after its stop time, and did nothing.
    Late,
    /// The counter is at the confirmed token or above.
    Confirmed,
    /// The lease was lengthened.
    Renewed,
    /// The name was freed.
    Released,
    /// The acquisition does not hold the name on this node.
    Lost,
}

/// What a request came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome<O, T> {
    /// The answer to the client that sent the request.
    pub answer: Answer<T>,
    /// The waiter that was granted the name in the same step, and its token. Its client gets a push.
    pub pushed: Option<(O, T)>,
}

/// What a node compares before it does what it is asked. [`Rules::default`] is the protocol; all else is a planted bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    /// What CONFIRM compares.
    pub confirm: Compare,
    /// What YIELD compares.
    pub yields: Compare,
    /// Whether a node without data waits for the restart delay before it grants.
    pub restart_delay: bool,
}

/// What a request compares with the stored lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compare {
    /// The owner, and the token that the node granted.
    OwnerAndToken,
    /// The owner alone.
    Owner,
    /// Nothing.
    Nothing,
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            confirm: Compare::OwnerAndToken,
            yields: Compare::OwnerAndToken,
            restart_delay: true,
        }
    }
}

impl<O: Copy + Ord, T: Token> Node<O, T> {
    /// A node with data.
    #[must_use]
    pub fn open(counter: Option<T>) -> Self {
        Self {
            lock: None,
            counter,
            queue: Vec::new(),
            born: Born::Open,
        }
    }

    /// A node without data.
    #[must_use]
    pub fn emptied() -> Self {
        Self {
            lock: None,
            counter: None,
            queue: Vec::new(),
            born: Born::Absent,
        }
    }

    /// Whether the acquisition holds the name on this node.
    pub fn is_held_by(&self, owner: O) -> bool {
        self.lock.is_some_and(|lock| lock.owner == owner)
    }

    /// The lease has ended.
    pub fn expire(&mut self) {
        self.lock = None;
    }

    /// The waiter has left the queue, or has not been heard of for too long.
    pub fn forget(&mut self, owner: O) {
        self.queue.retain(|waiter| waiter.owner != owner);
    }

    /// The place of a newcomer that would have the `proposed` one: behind all who wait already.
    #[must_use]
    pub fn place(&self, proposed: T) -> T {
        let behind = self.queue.last().map(|last| last.stamp + T::from(1));
        behind.map_or(proposed, |behind| behind.max(proposed))
    }

    /// Carries out a request.
    pub fn handle(
        &mut self,
        rules: &Rules,
        request: Request<O, T>,
        circumstances: Circumstances<'_, O, T>,
    ) -> Outcome<O, T> {
        match request {
            Request::Acquire { owner, proposal, waits } => {
                self.acquire(rules, owner, (proposal, waits, false), circumstances)
            }
            Request::YieldAndAcquire { owner, proposal, stamp } => {
                self.acquire(rules, owner, (proposal, Some(stamp), true), circumstances)
            }
            Request::Confirm {
                owner,
                presented,
                token,
            } => {
                let agrees = self.agrees(rules.confirm, owner, &[presented, token]);
                if agrees {
                    self.counter = Some(self.counter.map_or(token, |counter| counter.max(token)));
                    if let Some(lock) = &mut self.lock
                        && lock.owner == owner
                    {
                        lock.token = token;
                    }
                }
                plain(if agrees { Answer::Confirmed } else { Answer::Lost })
            }
            Request::Renew { owner } if self.is_held_by(owner) => plain(Answer::Renewed),
            Request::Renew { .. } => self.serve(rules, Answer::Lost, circumstances),
            Request::Release { owner } => {
                let released = self.is_held_by(owner);
                if released {
                    self.lock = None;
                }
                self.forget(owner);
                let answer = if released { Answer::Released } else { Answer::Lost };
                self.serve(rules, answer, circumstances)
            }
            Request::Yield {
                owner,
                presented,
                stamp,
            } => {
                if !self.agrees(rules.yields, owner, &[presented]) {
                    return plain(Answer::Lost);
                }
                self.enqueue(Waiter { stamp, owner });
                self.lock = None;
                self.serve(rules, Answer::Released, circumstances)
            }
        }
    }

    fn acquire(
        &mut self,
        rules: &Rules,
        owner: O,
        (proposal, waits, yields): (T, Option<T>, bool),
        circumstances: Circumstances<'_, O, T>,
    ) -> Outcome<O, T> {
        if rules.restart_delay && self.is_young(circumstances.delay_over) {
            return plain(Answer::Young);
        }
        let waiter = waits.map(|stamp| Waiter { stamp, owner });
        if yields && self.is_held_by(owner) && !self.queue.is_empty() {
            self.lock = None;
            self.queue_once(waiter);
        }
        if let Some(lock) = self.lock.filter(|lock| lock.owner == owner) {
            return plain(Answer::Granted(lock.token));
        }
        let mut pushed = None;
        if self.lock.is_none() {
            pushed = self.serve_before(Some(owner), circumstances);
            if pushed.is_none() {
                self.forget(owner);
                let token = self.draw(proposal.min(circumstances.clock), circumstances.clock);
                self.lock = Some(Lock { owner, token });
                return plain(Answer::Granted(token));
            }
        }
        self.queue_once(waiter);
        Outcome {
            answer: Answer::Busy,
            pushed,
        }
    }

    /// Whether the node grants nothing, because it has lost its data. From the first question on it waits for the restart delay.
    pub fn is_young(&mut self, delay_over: bool) -> bool {
        self.born = match self.born {
            Born::Absent => Born::New,
            Born::New if delay_over => Born::Open,
            born => born,
        };
        self.born != Born::Open
    }

    /// **Invariant.** A token is above the counter, so above all that this node has drawn or confirmed and still knows of.
    fn draw(&mut self, at_least: T, clock: T) -> T {
        let token = match self.counter {
            Some(counter) => at_least.max(counter + T::from(1)),
            None => clock,
        };
        self.counter = Some(token);
        token
    }

    fn agrees(&self, compare: Compare, owner: O, tokens: &[T]) -> bool {
        match compare {
            Compare::OwnerAndToken => self
                .lock
                .is_some_and(|lock| lock.owner == owner && tokens.contains(&lock.token)),
            Compare::Owner => self.is_held_by(owner),
            Compare::Nothing => true,
        }
    }

    fn enqueue(&mut self, waiter: Waiter<O, T>) {
        self.forget(waiter.owner);
        let place = self.queue.partition_point(|other| *other < waiter);
        self.queue.insert(place, waiter);
    }

    /// A waiter that asks again keeps its place.
    fn queue_once(&mut self, waiter: Option<Waiter<O, T>>) {
        if let Some(waiter) = waiter
            && self.queue.iter().all(|other| other.owner != waiter.owner)
        {
            self.enqueue(waiter);
        }
    }

    /// Grants the name to the first waiter, if it is free and the node may grant.
    fn serve(&mut self, rules: &Rules, answer: Answer<T>, circumstances: Circumstances<'_, O, T>) -> Outcome<O, T> {
        let wanted = self.lock.is_none() && !self.queue.is_empty();
        // A node that was restarted has the waiters of before.
        if !wanted || rules.restart_delay && self.is_young(circumstances.delay_over) {
            return plain(answer);
        }
        Outcome {
            answer,
            pushed: self.serve_before(None, circumstances),
        }
    }

    /// Before: the name is free. Grants it to the first waiter that is there, unless that is `me`.
    fn serve_before(&mut self, me: Option<O>, circumstances: Circumstances<'_, O, T>) -> Option<(O, T)> {
        // One token is drawn for all waiters that a request tries.
        let mut drawn = None;
        while self.queue.first().is_some_and(|first| Some(first.owner) != me) {
            let Waiter { owner, .. } = self.queue.remove(0);
            if circumstances.gone.contains(&owner) {
                continue;
            }
            let token = match drawn {
                Some(token) => token,
                None => *drawn.insert(self.draw(circumstances.clock, circumstances.clock)),
            };
            if circumstances.unheard.contains(&owner) {
                continue;
            }
            self.lock = Some(Lock { owner, token });
            return Some((owner, token));
        }
        None
    }
}

fn plain<O, T>(answer: Answer<T>) -> Outcome<O, T> {
    Outcome { answer, pushed: None }
}
