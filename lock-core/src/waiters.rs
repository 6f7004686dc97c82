//! The requests of this client that wait for a name, in their order.

use std::collections::{BTreeMap, BTreeSet};
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
}

/// Waiters whose outcome is known. They are answered without the mutex, as that runs code of others.
pub(crate) type Answers = Vec<(Box<Waiter>, LockError)>;

/// Those that wait for one name. What changes with each of them costs the logarithm of their number.
#[derive(Default)]
pub(crate) struct Queue {
    /// By their serials: in the order of their arrival.
    waiters: BTreeMap<u64, Box<Waiter>>,
    /// When the time of a waiter is looked at next.
    expiries: BTreeSet<(Stamp, u64)>,
    /// The deadlines of the waiters up to the serial `run_end`, which a claim of the first one serves one after the other.
    run: BTreeSet<(Stamp, u64)>,
    run_end: u64,
    impatient: usize,
    /// Waiters up to this serial know that the lock is held.
    pub(crate) busy_up_to: u64,
    /// The last failure until the server responds again, and the serial up to which waiters were there.
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
        }
    }

    /// Whether the wait is over at `now`, or the time for a first response. Waiters up to the serial `busy_up_to` know that the lock is held.
    pub(crate) fn is_over(&self, busy_up_to: u64, now: Stamp) -> bool {
        match self.deadline {
            Some(deadline) => deadline <= now,
            None => self.serial > busy_up_to && self.expiry.is_some_and(|at| at <= now + GRACE),
        }
    }

    /// Its place among the deadlines of those that a claim serves.
    fn in_run(&self) -> (Stamp, u64) {
        (self.deadline.unwrap_or(Stamp::MAX), self.serial)
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
        self.waiters.first_key_value().map(|(_, waiter)| &**waiter)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiters.is_empty()
    }

    /// The serial up to which all that wait have come by now.
    pub(crate) fn last_serial(&self) -> u64 {
        self.waiters.last_key_value().map_or(0, |(serial, _)| *serial)
    }

    pub(crate) fn has_impatient(&self) -> bool {
        self.impatient > 0
    }

    /// When the time of a waiter is to be looked at first.
    pub(crate) fn next_expiry(&self) -> Option<Stamp> {
        self.expiries.first().map(|(at, _)| *at)
    }

    /// The claim for the first waiter. It asks for tokens for others that wait, or that are likely to come.
    pub(crate) fn claim(&self, owner: OwnerId, are_likely: bool) -> Option<Claim> {
        let (front, for_others) = (self.front()?, self.waiters.len() > 1 || are_likely);
        Some(front.options.claim(owner, front.name.clone(), for_others))
    }

    /// Until when one of those waits that get the claim one after the other; [`Stamp::MAX`] if one waits for ever. `None` if the first waiter
    /// asks for something else.
    pub(crate) fn last_deadline(&mut self, claim: &Claim) -> Option<Stamp> {
        self.front().filter(|front| front.options.is_served_by(claim))?;
        for waiter in self.waiters.range(self.run_end + 1..).map(|(_, waiter)| waiter) {
            if !waiter.options.is_served_by(claim) {
                break;
            }
            self.run_end = waiter.serial;
            self.run.insert(waiter.in_run());
        }
        self.run.last().map(|(deadline, _)| *deadline)
    }

    pub(crate) fn push(&mut self, waiter: Box<Waiter>) {
        if waiter.serial <= self.run_end {
            self.run.clear();
            self.run_end = 0;
        }
        self.impatient += usize::from(waiter.is_impatient);
        self.expiries.extend(waiter.expiry.map(|at| (at, waiter.serial)));
        self.waiters.insert(waiter.serial, waiter);
    }

    pub(crate) fn remove(&mut self, serial: u64) -> Option<Box<Waiter>> {
        let waiter = self.waiters.remove(&serial)?;
        self.impatient -= usize::from(waiter.is_impatient);
        if let Some(at) = waiter.expiry {
            self.expiries.remove(&(at, serial));
        }
        self.run.remove(&waiter.in_run());
        Some(waiter)
    }

    /// Takes out the waiters for which `look` finds an error.
    pub(crate) fn end(&mut self, look: impl Fn(&Waiter) -> Option<LockError>) -> Answers {
        let ends = self
            .waiters
            .values()
            .filter_map(|waiter| Some((waiter.serial, look(waiter)?)));
        let ends: Vec<_> = ends.collect();
        let ended = ends.into_iter().map(|(serial, error)| (self.remove(serial), error));
        ended.filter_map(|(waiter, error)| Some((waiter?, error))).collect()
    }

    /// The same for those whose time has come by `now`. `look` may set a later time.
    pub(crate) fn end_due(&mut self, now: Stamp, mut look: impl FnMut(&mut Waiter) -> Option<LockError>) -> Answers {
        let mut answers = Answers::new();
        while let Some((_, serial)) = self.expiries.first().copied().filter(|(at, _)| *at <= now) {
            self.expiries.pop_first();
            let Some(waiter) = self.waiters.get_mut(&serial) else {
                continue;
            };
            (waiter.expiry, self.impatient) = (None, self.impatient - usize::from(waiter.is_impatient));
            let error = look(waiter);
            self.impatient += usize::from(waiter.is_impatient);
            self.expiries.extend(waiter.expiry.map(|at| (at, serial)));
            answers.extend(error.and_then(|error| Some((self.remove(serial)?, error))));
        }
        answers
    }
}
