//! The requests of this client that wait for a name, in their order.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;

use crate::acquire_options::AcquireOptions;
use crate::guard::LockGuard;
use crate::held::Held;
use crate::stats::Gauge;
use crate::{Busy, Holder, LockError, LockName, Stamp};

/// Shortest time limit of a first response, however short the wait is, so that a server that responds late is told from a lock that is
/// busy.
pub(crate) const SHORTEST_RESPONSE: Duration = Duration::from_secs(1);

/// A backend ends its requests within `op_timeout`, and says why. The client ends what goes on for that much longer.
pub(crate) const GRACE: Duration = Duration::from_millis(100);

/// A request whose time ends that soon is not repeated.
const TOO_LATE: Duration = Duration::from_millis(50);

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

/// A waiter whose request has ended. It is answered without the mutex, as that runs code of others.
pub(crate) type Answer = (Box<Waiter>, LockError);

/// The holder of a name by the last response.
pub(crate) enum Known {
    Elsewhere(Box<Busy>),
    Here(Arc<Held>),
}

/// Those that wait for one name. What changes with each of them costs the logarithm of their number.
#[derive(Default)]
pub(crate) struct Queue {
    /// By their serials: in the order of their arrival.
    waiters: BTreeMap<u64, Box<Waiter>>,
    /// The last deadline of those that have come; [`Stamp::MAX`] of one that waits for ever.
    pub(crate) latest: Option<Stamp>,
    impatient: usize,
    /// Waiters up to this serial know that the lock is held.
    busy_up_to: u64,
    /// The last failure until the server responds again, and the serial up to which waiters were there.
    pub(crate) failure: Option<(LockError, u64)>,
}

impl Known {
    pub(crate) fn holder(&self) -> Option<Holder> {
        match self {
            Self::Elsewhere(busy) => busy.holder.clone(),
            Self::Here(held) => {
                let mut holder = Holder::of(&held.grant.claim);
                (holder.token, holder.acquired_at) = (Some(held.token), Some(held.since));
                Some(holder)
            }
        }
    }
}

impl Waiter {
    pub(crate) fn timed_out(&self, now: Stamp, holder: Option<Holder>) -> LockError {
        let waited = if self.options.waits() {
            now.since(self.started)
        } else {
            Duration::ZERO
        };
        LockError::timed_out(&self.name, waited, holder)
    }

    /// Whether the wait is over at `now`, or the time for a first response. Waiters up to the serial `busy_up_to` know that the lock is held.
    fn is_over(&self, busy_up_to: u64, now: Stamp) -> bool {
        match self.deadline {
            Some(deadline) => deadline <= now,
            None => self.serial > busy_up_to && self.first_response <= now,
        }
    }
}

impl Queue {
    pub(crate) fn front(&self) -> Option<&Waiter> {
        self.waiters.first_key_value().map(|(_, waiter)| &**waiter)
    }

    pub(crate) fn len(&self) -> usize {
        self.waiters.len()
    }

    /// The serial up to which all that wait have come by now.
    pub(crate) fn last_serial(&self) -> u64 {
        self.waiters.last_key_value().map_or(0, |(serial, _)| *serial)
    }

    /// Adds a request. One that `is_busy` knows that the lock is held.
    pub(crate) fn push(&mut self, mut waiter: Box<Waiter>, is_busy: bool) {
        self.latest = self.latest.max(waiter.deadline.or(Some(Stamp::MAX)));
        if is_busy {
            self.busy_up_to = waiter.serial;
        }
        let first_response = (!is_busy).then(|| waiter.first_response + GRACE);
        waiter.expiry = waiter.deadline.filter(|_| !waiter.is_impatient).or(first_response);
        self.impatient += usize::from(waiter.is_impatient);
        self.waiters.insert(waiter.serial, waiter);
    }

    pub(crate) fn remove(&mut self, serial: u64) -> Option<Box<Waiter>> {
        let waiter = self.waiters.remove(&serial)?;
        self.impatient -= usize::from(waiter.is_impatient);
        Some(waiter)
    }

    /// Takes out the waiters for which `look` finds an error.
    pub(crate) fn end(&mut self, look: impl Fn(&Waiter) -> Option<LockError>) -> Vec<Answer> {
        let ends = self
            .waiters
            .values()
            .filter_map(|waiter| Some((waiter.serial, look(waiter)?)));
        let ends: Vec<_> = ends.collect();
        let ended = ends.into_iter().map(|(serial, error)| (self.remove(serial), error));
        ended.filter_map(|(waiter, error)| Some((waiter?, error))).collect()
    }

    /// The lock is held: all that wait know that from now on. Ends the requests that take any response, and, `if_over`, those whose wait is over.
    pub(crate) fn settle(&mut self, now: Stamp, known: &Known, if_over: bool) -> Vec<Answer> {
        (self.busy_up_to, self.failure) = (self.last_serial(), None);
        if self.impatient == 0 && !if_over {
            return Vec::new();
        }
        let holder = known.holder();
        self.end(|waiter| {
            let ends = waiter.is_impatient || if_over && waiter.deadline.is_some_and(|deadline| deadline <= now);
            ends.then(|| waiter.timed_out(now, holder.clone()))
        })
    }

    /// A request failed. What may pass is waited out by those who have the time. Any other failure ends every wait. If it was a release, that says
    /// nothing to requests that came after it was sent, up to `sent`: what was wrong may have been mended.
    pub(crate) fn fail(&mut self, error: &LockError, sent: u64, now: Stamp) -> Vec<Answer> {
        self.failure = Some((error.clone(), self.last_serial().min(sent)));
        let (up_to, soon) = (self.busy_up_to, now + TOO_LATE);
        self.end(|waiter| {
            let ends = match waiter.serial <= sent {
                true => !error.may_pass() || waiter.is_impatient || waiter.is_over(up_to, soon),
                // One that does not wait is answered by what it asks itself.
                false => !waiter.is_impatient && waiter.is_over(up_to, soon),
            };
            ends.then(|| error.clone())
        })
    }

    /// Ends a request whose time is over, or returns when it is to be looked at again. The response to the request that is under way, which waits
    /// until `asked_until`, decides about those that wait for as long as that.
    pub(crate) fn expire(
        &mut self,
        serial: u64,
        now: Stamp,
        known: Option<&Known>,
        asked_until: Option<Stamp>,
    ) -> Result<Option<Stamp>, Answer> {
        let Some(waiter) = self.waiters.get_mut(&serial) else {
            return Ok(None);
        };
        if waiter.expiry.is_none_or(|expiry| now < expiry) {
            return Ok(waiter.expiry);
        }
        let knows_busy = serial <= self.busy_up_to;
        let deadline = waiter.deadline.filter(|_| !waiter.is_impatient);
        if knows_busy && !waiter.is_impatient {
            let Some(deadline) = deadline else { return Ok(None) };
            // The task of the name ends a response that does not come by then, and says why.
            let later = deadline + SHORTEST_RESPONSE + GRACE;
            if asked_until.is_some_and(|at| deadline >= at) && now < later {
                waiter.expiry = Some(later);
                return Ok(waiter.expiry);
            }
        }
        let shortest = waiter.first_response.min(waiter.started + SHORTEST_RESPONSE);
        let error = match (known, &self.failure) {
            (Some(known), _) if deadline.is_some() && knows_busy => waiter.timed_out(now, known.holder()),
            (_, Some((error, up_to))) if serial <= *up_to => error.clone(),
            _ if deadline.is_some() && now < shortest => {
                self.impatient += 1;
                (waiter.is_impatient, waiter.expiry) = (true, Some(shortest));
                return Ok(Some(shortest));
            }
            _ => LockError::no_answer("acquire", now.min(waiter.first_response).since(waiter.started)),
        };
        let waiter = self.remove(serial).map(|waiter| (waiter, error));
        waiter.map_or(Ok(None), Err)
    }
}
