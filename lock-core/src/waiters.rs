//! The requests of this client that wait for a name, in their order.

use std::collections::{BTreeMap, BTreeSet};
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
const BLOCK: NonZeroU32 = NonZeroU32::new(64).unwrap();

/// A request of this client that has no outcome yet.
pub(crate) struct Waiter {
    pub(crate) name: LockName,
    pub(crate) options: Arc<AcquireOptions>,
    pub(crate) started: Stamp,
    pub(crate) reply: oneshot::Sender<Result<LockGuard, LockError>>,
    pub(crate) span: tracing::Span,
    pub(crate) waiting: Gauge,
    pub(crate) deadline: Option<Stamp>,
    pub(crate) expiry: Option<Stamp>,
    /// The lock was held when the request was made.
    pub(crate) came_to_busy: bool,
}

/// Waiters whose outcome is known. They are answered without the mutex, as that runs code of others.
pub(crate) type Answers = Vec<(Box<Waiter>, LockError)>;

/// Those that wait for one name.
#[derive(Default)]
pub(crate) struct Queue {
    /// By serial, which is the order of arrival.
    pub(crate) waiters: BTreeMap<u64, Box<Waiter>>,
    /// Those that take the next response, whatever it is.
    pub(crate) impatient: BTreeSet<u64>,
    pub(crate) expiries: BTreeSet<(Stamp, u64)>,
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
        let deadline = options.wait.map(|limit| started + limit);
        Self {
            name,
            options,
            started,
            reply,
            span,
            waiting,
            deadline,
            expiry: None,
            came_to_busy: false,
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
        self.waiters.values().next().map(|waiter| &**waiter)
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

    pub(crate) fn knows_busy(&self, serial: u64, waiter: &Waiter) -> bool {
        waiter.came_to_busy || serial <= self.busy_up_to
    }

    /// The waiters whose wait is over at `now`, or whose time for a first response.
    pub(crate) fn over(&self, now: Stamp) -> Vec<u64> {
        let due = self.expiries.range(..=(now + SHORTEST_RESPONSE, u64::MAX));
        let over = due.filter(|(at, serial)| {
            self.waiters.get(serial).is_some_and(|waiter| match waiter.deadline {
                Some(deadline) => deadline <= now,
                None => *at <= now + GRACE && !self.knows_busy(*serial, waiter),
            })
        });
        over.map(|(_, serial)| *serial).collect()
    }

    /// Sets when the time of a waiter ends.
    pub(crate) fn expire_at(&mut self, serial: u64, at: Option<Stamp>) {
        let Some(waiter) = self.waiters.get_mut(&serial) else {
            return;
        };
        if let Some(before) = std::mem::replace(&mut waiter.expiry, at) {
            self.expiries.remove(&(before, serial));
        }
        self.expiries.extend(at.map(|at| (at, serial)));
    }

    /// Takes out those waiters, which are answered with that error.
    pub(crate) fn end(
        &mut self,
        serials: impl IntoIterator<Item = u64>,
        error: impl Fn(&Waiter) -> LockError,
    ) -> Answers {
        let ended = serials.into_iter().filter_map(|serial| self.remove(serial));
        let answers = ended.map(|waiter| {
            let error = error(&waiter);
            (waiter, error)
        });
        answers.collect()
    }

    pub(crate) fn remove(&mut self, serial: u64) -> Option<Box<Waiter>> {
        self.expire_at(serial, None);
        self.impatient.remove(&serial);
        self.waiters.remove(&serial)
    }
}
