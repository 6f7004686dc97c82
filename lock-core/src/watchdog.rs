//! What is held, and when its leases are to be renewed.
//!
//! The watchdog schedules *leases*, not locks: ten thousand locks on one lease are one renewal. A lease is renewed at a
//! third of its ttl, or somewhat sooner, so that leases that were taken at once are not renewed at once. The times are rounded to a
//! thousandth of the ttl: what is due at about the same time is renewed together, and costs the client and its server less.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use foldhash::fast::RandomState;

use crate::held::Held;
use crate::loss::Alarm;
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
    pub(crate) alarm: Arc<Alarm>,
    /// Whether the task runs.
    pub(crate) is_running: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    /// By their identifiers.
    holds: BTreeMap<u64, Arc<Held>>,
    /// By their serials. A lease may be that of several clients, each of which renews it.
    leases: HashMap<u64, Watched, RandomState>,
    /// Each lease of a hold, by its serial, and each hold that ends at a set time, by its identifier: both are drawn from one series.
    schedule: BTreeSet<(Stamp, u64)>,
    /// When the task looks next. Never, once nothing was held at two looks in a row: what is held again soon after is mostly due later, and need
    /// not wake the task.
    next_look: Option<Stamp>,
}

/// A lease that has holds of this client.
#[derive(Debug)]
struct Watched {
    lease: Lease,
    holds: u32,
    /// The one that came last.
    last: u64,
    /// How many of these want it renewed.
    renew: u32,
    /// When the lease is to be looked at.
    due: Stamp,
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
        let lease = held.lease();
        self.holds.insert(held.id(), Arc::clone(held));
        if let Some(limit) = held.limit() {
            self.schedule.insert((limit, held.id()));
        }
        let due = if held.renews() {
            first_due(lease)
        } else {
            lease.deadline()
        };
        match self.leases.entry(lease.serial()) {
            Entry::Vacant(entry) => {
                entry.insert(Watched {
                    lease: lease.clone(),
                    holds: 1,
                    last: held.id(),
                    renew: u32::from(held.renews()),
                    due,
                });
            }
            Entry::Occupied(mut entry) => {
                let watched = entry.get_mut();
                watched.holds += 1;
                watched.last = held.id();
                watched.renew += u32::from(held.renews());
                // Only the first to renew on a lease that none renewed so far changes when that is due.
                if !held.renews() || watched.renew > 1 {
                    return;
                }
            }
        }
        self.schedule(lease.serial(), due);
    }

    fn remove(&mut self, held: &Held) {
        let lease = held.lease();
        if self.holds.remove(&held.id()).is_none() {
            return;
        }
        if let Some(limit) = held.limit() {
            self.schedule.remove(&(limit, held.id()));
        }
        let Some(watched) = self.leases.get_mut(&lease.serial()) else {
            return;
        };
        watched.holds -= 1;
        watched.renew -= u32::from(held.renews());
        if watched.holds == 0 {
            self.schedule.remove(&(watched.due, lease.serial()));
            self.leases.remove(&lease.serial());
        }
    }

    /// Sets when a lease that has holds is looked at.
    fn schedule(&mut self, lease: u64, due: Stamp) {
        let Some(watched) = self.leases.get_mut(&lease) else {
            return;
        };
        let before = std::mem::replace(&mut watched.due, due);
        self.schedule.remove(&(before, lease));
        self.schedule.insert((due, lease));
    }

    /// Adds the holds of a lease to `ended`.
    fn end(&self, lease: &Lease, ended: &mut Vec<Arc<Held>>) {
        let only = self.leases.get(&lease.serial()).filter(|watched| watched.holds == 1);
        match only.and_then(|only| self.holds.get(&only.last)) {
            Some(held) => ended.push(Arc::clone(held)),
            None => self.end_all(&[lease.serial()], ended),
        }
    }

    fn end_all(&self, leases: &[u64], ended: &mut Vec<Arc<Held>>) {
        let kept = |held: &&Arc<Held>| leases.contains(&held.lease().serial());
        ended.extend(self.holds.values().filter(kept).cloned());
    }

    /// Whether the task is to be woken for what is due first.
    fn is_sooner(&self) -> bool {
        let first = self.schedule.first();
        first.is_some_and(|(at, _)| self.next_look.is_none_or(|look| *at < look))
    }
}

impl Watchdog {
    /// Starts to watch a hold, and with it its lease, in the place of another hold. What is due of a lease that both have stays.
    pub(crate) fn watch(&self, held: &Arc<Held>, instead_of: Option<&Held>) {
        let mut state = self.lock();
        state.insert(held);
        if let Some(ended) = instead_of {
            state.remove(ended);
        }
        let is_sooner = state.is_sooner();
        drop(state);
        // What was revoked before raises the alarm now.
        held.watch(&self.alarm);
        if is_sooner {
            self.wake();
        }
    }

    /// Stops watching a hold. A lease without holds is not renewed any more.
    pub(crate) fn forget(&self, held: &Held) {
        self.lock().remove(held);
    }

    /// Everything that is held.
    pub(crate) fn everything(&self) -> Vec<Arc<Held>> {
        self.lock().holds.values().cloned().collect()
    }

    pub(crate) fn wake(&self) {
        self.alarm.notify.notify_one();
    }

    /// Takes what is due, and says when to look again; never, for `None`.
    pub(crate) fn look(&self, now: Stamp) -> Found {
        let mut found = Found::default();
        let mut state = self.lock();
        while let Some((_, id)) = state.schedule.first().copied().filter(|(at, _)| *at <= now) {
            state.schedule.pop_first();
            let Some(watched) = state.leases.get(&id) else {
                found.ended.extend(state.holds.get(&id).cloned());
                continue;
            };
            let (lease, is_renewed) = (watched.lease.clone(), watched.renew > 0);
            // Made final without the mutex, as that tells others.
            if !lease.is_valid(now) {
                state.end(&lease, &mut found.ended);
                continue;
            }
            // A renewal ends, and sets the next time, well before the deadline.
            state.schedule(id, lease.deadline());
            if is_renewed {
                found.to_renew.push(lease);
            }
        }
        let mut leases = Vec::new();
        for id in self.alarm.take() {
            match state.holds.get(&id) {
                Some(held) => found.ended.push(Arc::clone(held)),
                None if state.leases.contains_key(&id) => leases.push(id),
                None => {}
            }
        }
        if !leases.is_empty() {
            state.end_all(&leases, &mut found.ended);
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
        self.lock().leases.contains_key(&lease.serial())
    }

    /// A renewal that was sent at `sent` succeeded.
    pub(crate) fn renewed(&self, lease: &Lease, sent: Stamp) {
        self.due(lease, rounded(lease, sent + lease.ttl() / 3 - sooner(lease, SPREAD)));
    }

    /// The lease is to be renewed at `due`, or is lost by then.
    pub(crate) fn due(&self, lease: &Lease, due: Stamp) {
        let mut state = self.lock();
        state.schedule(lease.serial(), due.min(lease.deadline()));
        if state.is_sooner() {
            self.wake();
        }
    }

    #[cfg(test)]
    pub(crate) fn is_idle(&self) -> bool {
        let state = self.lock();
        state.holds.is_empty() && state.leases.is_empty() && state.schedule.is_empty()
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
