//! The requests of this client that wait for a name, in their order.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::sync::oneshot;

use crate::acquire_options::AcquireOptions;
use crate::guard::LockGuard;
use crate::stats::Gauge;
use crate::{Busy, Claim, LockError, LockName, Stamp};

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
    pub(crate) options: AcquireOptions,
    pub(crate) started: Stamp,
    /// When its wait is over; `None` if it waits for ever.
    pub(crate) deadline: Option<Stamp>,
    /// Until when the server has time for a first response.
    pub(crate) first_response: Stamp,
    /// When its time is looked at next.
    pub(crate) expiry: Option<Stamp>,
    /// It takes the next response, whatever that is.
    pub(crate) is_impatient: bool,
    pub(crate) reply: oneshot::Sender<Result<LockGuard, LockError>>,
    pub(crate) span: tracing::Span,
    pub(crate) waiting: Gauge,
}

/// Waiters whose outcome is known. They are answered without the mutex, as that runs code of others.
pub(crate) type Answers = Vec<(Box<Waiter>, LockError)>;

impl Waiter {
    pub(crate) fn timed_out(&self, now: Stamp, busy: &Busy) -> LockError {
        let waited = if self.options.waits() {
            now.since(self.started)
        } else {
            Duration::ZERO
        };
        LockError::timed_out(&self.name, waited, busy.holder.clone())
    }

    /// Its place among the deadlines of those that a claim serves.
    fn in_run(&self) -> (Stamp, u64) {
        (self.deadline.unwrap_or(Stamp::MAX), self.serial)
    }
}

/// Those that wait for one name. What changes with each of them costs the logarithm of their number.
#[derive(Default)]
pub(crate) struct Queue {
    /// By their serials: in the order of their arrival.
    waiters: BTreeMap<u64, Box<Waiter>>,
    /// The deadlines of the waiters up to the serial `run_end`, which a claim of the first one serves one after the other.
    run: BTreeSet<(Stamp, u64)>,
    run_end: u64,
    impatient: usize,
    /// Waiters up to this serial know that the lock is held.
    pub(crate) busy_up_to: u64,
    /// The last failure until the server responds again, and the serial up to which waiters were there.
    pub(crate) failure: Option<(LockError, u64)>,
}

impl Queue {
    pub(crate) fn front(&self) -> Option<&Waiter> {
        self.waiters.first_key_value().map(|(_, waiter)| &**waiter)
    }

    pub(crate) fn get(&self, serial: u64) -> Option<&Waiter> {
        self.waiters.get(&serial).map(|waiter| &**waiter)
    }

    pub(crate) fn len(&self) -> usize {
        self.waiters.len()
    }

    /// The serial up to which all that wait have come by now.
    pub(crate) fn last_serial(&self) -> u64 {
        self.waiters.last_key_value().map_or(0, |(serial, _)| *serial)
    }

    pub(crate) fn has_impatient(&self) -> bool {
        self.impatient > 0
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
        self.waiters.insert(waiter.serial, waiter);
    }

    pub(crate) fn remove(&mut self, serial: u64) -> Option<Box<Waiter>> {
        let waiter = self.waiters.remove(&serial)?;
        self.impatient -= usize::from(waiter.is_impatient);
        self.run.remove(&waiter.in_run());
        Some(waiter)
    }

    /// Looks at the time of a waiter later. If it `hurries`, it takes the next response, whatever that is.
    pub(crate) fn put_off(&mut self, serial: u64, expiry: Stamp, hurries: bool) {
        if let Some(waiter) = self.waiters.get_mut(&serial) {
            waiter.expiry = Some(expiry);
            self.impatient += usize::from(hurries && !waiter.is_impatient);
            waiter.is_impatient |= hurries;
        }
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
}
