//! What is held, and when its leases are to be renewed.
//!
//! The watchdog schedules *leases*, not locks: ten thousand locks on one lease are one renewal. A lease is renewed at a
//! third of its ttl, or somewhat sooner, so that leases that were taken at once are not renewed at once. The times are rounded to a
//! thousandth of the ttl: what is due at about the same time is renewed together, and costs the client and its server less.

use std::collections::btree_map::Range;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use foldhash::fast::RandomState;
use tokio::sync::Notify;

use crate::held::Held;
use crate::process::Serial;
use crate::{Lease, Stamp};

/// The clock is read that often while anything is held, because timers stand still while the machine sleeps and the clock does not.
const LONGEST_NAP: Duration = Duration::from_secs(1);

/// The part of its beat by which the first renewal of a lease may come sooner. No more, as most locks are released before
/// they need one at all.
const FIRST_SPREAD: f64 = 0.5;

/// The same for every later one: little, as each is a request more. Over time it evens out what is left of a burst.
const SPREAD: f64 = 0.125;

/// The part of its ttl to which a due time is rounded, and the most that this may be.
const STEPS: u32 = 1000;
const LONGEST_STEP: Duration = Duration::from_millis(50);

#[derive(Debug, Default)]
pub(crate) struct Watchdog {
    state: Mutex<State>,
    /// Has the task look at the schedule.
    pub(crate) wake: Arc<Notify>,
    /// Whether the task runs.
    pub(crate) is_running: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    /// By the serials of their grants.
    holds: BTreeMap<Serial, Arc<Held>>,
    /// When the leases are to be renewed that have holds of this client which want that; or their deadlines, while a renewal is under way. A
    /// lease may be that of several clients, each of which renews it.
    renewals: HashMap<u64, Stamp, RandomState>,
    /// When each of the holds ends that have an end of their own, and the renewals, by the serials of the leases.
    schedule: BTreeSet<(Stamp, Serial)>,
    /// When the task looks next. Never, once nothing was held at two looks in a row: what is held again soon after is mostly due later, and need
    /// not wake the task.
    next_look: Option<Stamp>,
}

/// What a look at the schedule found.
#[derive(Default)]
pub(crate) struct Found {
    pub(crate) to_renew: Vec<Lease>,
    pub(crate) ended: Vec<Arc<Held>>,
    pub(crate) next_look: Option<Stamp>,
}

impl State {
    fn insert(&mut self, held: &Arc<Held>) {
        let (lease, serial) = (held.lease(), held.own.serial());
        self.holds.insert(serial, Arc::clone(held));
        self.schedule.extend(held.limit().map(|at| (at, serial)));
        // Only the first to renew changes when a lease is due.
        if held.renews() && !self.renewals.contains_key(&lease.serial()) {
            self.set_renewal(lease.serial(), Some(first_due(lease)));
        }
    }

    /// Whether that hold is watched, and not the next one of the same grant.
    fn is_there(&self, held: &Held) -> bool {
        let there = self.holds.get(&held.own.serial());
        there.is_some_and(|there| std::ptr::eq(&**there, held))
    }

    fn remove(&mut self, held: &Held) {
        let serial = held.own.serial();
        if self.is_there(held) && self.holds.remove(&serial).is_some() && !self.has_holds(serial.0) {
            self.set_renewal(serial.0, None);
        }
    }

    fn unschedule(&mut self, held: &Held) {
        for at in held.limits().into_iter().flatten() {
            self.schedule.remove(&(at, held.own.serial()));
        }
    }

    fn holds_of(&self, lease: u64) -> Range<'_, Serial, Arc<Held>> {
        self.holds.range((lease, 0)..=(lease, u64::MAX))
    }

    fn has_holds(&self, lease: u64) -> bool {
        self.holds_of(lease).next().is_some()
    }

    fn set_renewal(&mut self, lease: u64, at: Option<Stamp>) {
        let before = match at {
            Some(at) => self.renewals.insert(lease, at),
            None => self.renewals.remove(&lease),
        };
        if let Some(before) = before {
            self.schedule.remove(&(before, (lease, 0)));
        }
        self.schedule.extend(at.map(|at| (at, (lease, 0))));
    }

    /// Looks at a hold that has ended, or at a lease whose time has come.
    fn look(&mut self, serial: Serial, now: Stamp, found: &mut Found) {
        if let Some(held) = self.holds.get(&serial) {
            return found.ended.push(Arc::clone(held));
        }
        let mut renewed = None;
        for (_, held) in self.holds_of(serial.0) {
            // Made final without the mutex, as that tells others.
            if held.end() <= now {
                found.ended.push(Arc::clone(held));
            } else if held.renews() {
                renewed.get_or_insert_with(|| held.lease().clone());
            }
        }
        // A renewal ends, and sets the next time, well before the deadline.
        self.set_renewal(serial.0, renewed.as_ref().map(Lease::deadline));
        found.to_renew.extend(renewed.filter(|lease| lease.is_valid(now)));
    }

    /// Has the task look in time for what is due first.
    fn wake_for_first(&self, task: &Notify) {
        let first = self.schedule.first();
        if first.is_some_and(|(at, _)| self.next_look.is_none_or(|look| *at < look)) {
            task.notify_one();
        }
    }
}

impl Watchdog {
    /// Starts to watch a hold, and with it its lease, in the place of another hold. What is due of a lease that both have stays.
    pub(crate) fn watch(&self, held: &Arc<Held>, instead_of: Option<&Held>) {
        let mut state = self.lock();
        if let Some(ended) = instead_of {
            state.unschedule(ended);
        }
        state.insert(held);
        if let Some(ended) = instead_of {
            state.remove(ended);
        }
        state.wake_for_first(&self.wake);
        drop(state);
        if held.own.reason().is_some() {
            held.own.tell();
        }
    }

    /// Watches a hold, which has ended, until its claim is kept no more.
    pub(crate) fn keep(&self, held: &Arc<Held>) {
        let mut state = self.lock();
        // The claim may have gone to another hold by now.
        if state.is_there(held) {
            state.unschedule(held);
            state.insert(held);
            state.wake_for_first(&self.wake);
        }
    }

    /// Stops watching a hold. A lease without holds is not renewed any more.
    pub(crate) fn forget(&self, held: &Held) {
        let mut state = self.lock();
        state.unschedule(held);
        state.remove(held);
    }

    /// The hold of a grant, those of a lease, or all.
    pub(crate) fn holds(&self, serial: Option<Serial>) -> Vec<Arc<Held>> {
        let state = self.lock();
        let holds = match serial {
            None => state.holds.range(..),
            Some((lease, 0)) => state.holds_of(lease),
            Some(grant) => state.holds.range(grant..=grant),
        };
        holds.map(|(_, held)| Arc::clone(held)).collect()
    }

    /// Takes what is due, and says when to look again; never, for `None`.
    pub(crate) fn look(&self, now: Stamp) -> Found {
        let mut found = Found::default();
        let mut state = self.lock();
        while let Some((_, due)) = state.schedule.first().copied().filter(|(at, _)| *at <= now) {
            state.schedule.pop_first();
            state.look(due, now, &mut found);
        }
        let first = state.schedule.first().map(|(at, _)| *at);
        let nap = first.map(|at| at.since(now).min(LONGEST_NAP));
        let nap = nap.or_else(|| state.next_look.is_none_or(|look| now < look).then_some(LONGEST_NAP));
        state.next_look = nap.map(|nap| now + nap);
        found.next_look = state.next_look;
        found
    }

    /// Whether the lease has holds.
    pub(crate) fn watches(&self, lease: &Lease) -> bool {
        self.lock().has_holds(lease.serial())
    }

    /// A renewal that was sent at `sent` succeeded.
    pub(crate) fn renewed(&self, lease: &Lease, sent: Stamp) {
        self.due(lease, rounded(lease, sent + lease.ttl() / 3 - sooner(lease, SPREAD)));
    }

    /// The lease is to be renewed at `due`, or is lost by then.
    pub(crate) fn due(&self, lease: &Lease, due: Stamp) {
        let mut state = self.lock();
        if state.has_holds(lease.serial()) {
            state.set_renewal(lease.serial(), Some(due.min(lease.deadline())));
            state.wake_for_first(&self.wake);
        }
    }

    #[cfg(test)]
    pub(crate) fn is_idle(&self) -> bool {
        let state = self.lock();
        state.holds.is_empty() && state.renewals.is_empty() && state.schedule.is_empty()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing here panics while holding the mutex.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn first_due(lease: &Lease) -> Stamp {
    // A lease taken late by another guard has less than a ttl left; two thirds before its end is never too late.
    rounded(
        lease,
        lease.deadline() - lease.ttl() / 3 * 2 - sooner(lease, FIRST_SPREAD),
    )
}

/// How much sooner than need be. A lease that locks share is one renewal in any case.
fn sooner(lease: &Lease, spread: f64) -> Duration {
    match lease.claim() {
        Some(_) => (lease.ttl() / 3).mul_f64(spread * fastrand::f64()),
        None => Duration::ZERO,
    }
}

fn rounded(lease: &Lease, due: Stamp) -> Stamp {
    due.rounded_down((lease.ttl() / STEPS).min(LONGEST_STEP))
}
