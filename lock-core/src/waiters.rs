//! The requests of this client that wait for a name, in their order.

use std::collections::VecDeque;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;

use crate::acquire_options::AcquireOptions;
use crate::guard::LockGuard;
use crate::stats::Gauge;
use crate::{Busy, Claim, LockError, LockName, OwnerId, Stamp};

/// Shortest time limit of a first response, however short the wait is, so that a server that responds late is told from a lock that is
/// busy.
pub(crate) const SHORTEST_RESPONSE: Duration = Duration::from_secs(1);

/// A backend ends its requests within `op_timeout`, and says why. The client ends what goes on for that much longer.
pub(crate) const GRACE: Duration = Duration::from_millis(100);

/// How many tokens a claim asks for if several wait for it.
pub(crate) const BLOCK: NonZeroU32 = NonZeroU32::new(64).unwrap();

/// A request of this client that has no outcome yet.
pub(crate) struct Waiter {
    /// The order of arrival.
    pub(crate) serial: u64,
    pub(crate) name: LockName,
    pub(crate) options: Arc<AcquireOptions>,
    pub(crate) started: Stamp,
    pub(crate) reply: oneshot::Sender<Result<LockGuard, LockError>>,
    pub(crate) span: tracing::Span,
    pub(crate) waiting: Gauge,
    pub(crate) deadline: Option<Stamp>,
    /// When its time is looked at next.
    pub(crate) expiry: Option<Stamp>,
    /// It takes the next response, whatever it is.
    pub(crate) is_impatient: bool,
    /// The lock was held when the request was made.
    pub(crate) came_to_busy: bool,
}

/// Waiters whose outcome is known. They are answered without the mutex, as that runs code of others.
pub(crate) type Answers = Vec<(Box<Waiter>, LockError)>;

/// Those that wait for one name.
#[derive(Default)]
pub(crate) struct Queue {
    /// By their serials.
    pub(crate) waiters: VecDeque<Box<Waiter>>,
    impatient: usize,
    /// No waiter's time is to be looked at before.
    pub(crate) next_expiry: Option<Stamp>,
    /// Waiters up to this serial know that the lock is held.
    pub(crate) busy_up_to: u64,
    /// The last failure until the server responds again, and the last waiter that was there.
    pub(crate) failure: Option<(LockError, u64)>,
}

impl Waiter {
    pub(crate) fn new(
        name: LockName,
        options: Arc<AcquireOptions>,
        started: Stamp,
        reply: oneshot::Sender<Result<LockGuard, LockError>>,
        span: tracing::Span,
        waiting: Gauge,
    ) -> Self {
        Self {
            serial: 0,
            deadline: options.wait.map(|limit| started + limit),
            is_impatient: !options.waits(),
            name,
            options,
            started,
            reply,
            span,
            waiting,
            expiry: None,
            came_to_busy: false,
        }
    }

    pub(crate) fn knows_busy(&self, up_to: u64) -> bool {
        self.came_to_busy || self.serial <= up_to
    }

    /// Whether the wait is over at `now`, or the time for a first response.
    pub(crate) fn is_over(&self, up_to: u64, now: Stamp) -> bool {
        match self.deadline {
            Some(deadline) => deadline <= now,
            None => !self.knows_busy(up_to) && self.expiry.is_some_and(|at| at <= now + GRACE),
        }
    }

    pub(crate) fn timed_out(&self, now: Stamp, busy: &Busy) -> LockError {
        let waited = if self.options.waits() {
            now.since(self.started)
        } else {
            Duration::ZERO
        };
        LockError::timed_out(&self.name, waited, busy.holder.clone())
    }
}

impl Queue {
    pub(crate) fn front(&self) -> Option<&Waiter> {
        self.waiters.front().map(|waiter| &**waiter)
    }

    pub(crate) fn has_impatient(&self) -> bool {
        self.impatient > 0
    }

    /// The claim for the first waiter. It asks for tokens for others that wait, or that are likely to come.
    pub(crate) fn claim(&self, owner: OwnerId, are_likely: bool) -> Option<Claim> {
        let front = self.front()?;
        let claim = front.options.claim(owner, front.name.clone());
        let may_run = (self.waiters.len() > 1 || are_likely) && front.options.may_run();
        Some(if may_run {
            claim.with_tokens_wanted(BLOCK)
        } else {
            claim
        })
    }

    pub(crate) fn push(&mut self, waiter: Box<Waiter>) {
        self.impatient += usize::from(waiter.is_impatient);
        self.next_expiry = [self.next_expiry, waiter.expiry].into_iter().flatten().min();
        let at = self.waiters.partition_point(|other| other.serial < waiter.serial);
        self.waiters.insert(at, waiter);
    }

    pub(crate) fn remove(&mut self, serial: u64) -> Option<Box<Waiter>> {
        let at = self
            .waiters
            .binary_search_by_key(&serial, |waiter| waiter.serial)
            .ok()?;
        let waiter = self.waiters.remove(at)?;
        self.impatient -= usize::from(waiter.is_impatient);
        Some(waiter)
    }

    /// Takes out the waiters for which `look` finds an error.
    pub(crate) fn end(&mut self, mut look: impl FnMut(&mut Waiter) -> Option<LockError>) -> Answers {
        let (mut left, mut answers) = (VecDeque::new(), Answers::new());
        for mut waiter in std::mem::take(&mut self.waiters) {
            match look(&mut waiter) {
                Some(error) => answers.push((waiter, error)),
                None => left.push_back(waiter),
            }
        }
        self.impatient = left.iter().filter(|waiter| waiter.is_impatient).count();
        self.next_expiry = left.iter().filter_map(|waiter| waiter.expiry).min();
        self.waiters = left;
        answers
    }
}
