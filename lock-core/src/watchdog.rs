//! What keeps locks alive, and notices when they are not.
//!
//! The watchdog schedules *leases*, not locks: ten thousand locks on one lease are one renewal. A lease is renewed at a
//! third of its ttl, or somewhat sooner, so that leases that were taken at once are not renewed at once; failures are tried
//! again until its deadline. Renewals run beside each other, so that a slow one delays no other. While anything is held the
//! clock is read at least once a second, because timers stand still while the machine sleeps and the clock does not.

use std::collections::btree_map::Entry as Slot;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, PoisonError, Weak};
use std::time::Duration;

use crate::alarm::Alarm;
use crate::call::catch_panic;
use crate::client::ClientInner;
use crate::held::Held;
use crate::sync::{Mutex, MutexGuard, time};
use crate::{Lease, LockError, LossReason, Renewal, Stamp};

const LONGEST_NAP: Duration = Duration::from_secs(1);

/// The part of its beat by which the first renewal of a lease may come sooner. No more, as most locks are released before
/// they need one at all.
const FIRST_SPREAD: f64 = 0.5;

/// The same for every later one: little, as each is a request more. Over time it evens out what is left of a burst.
const SPREAD: f64 = 0.125;

#[derive(Debug, Default)]
pub(crate) struct Watchdog {
    state: Mutex<State>,
    alarm: Arc<Alarm>,
}

/// The part of its ttl by which a lease is renewed sooner if another one is due: many that are asked for together cost a client and
/// its server less than each for itself.
const BATCH_WINDOW: u32 = 1000;
/// The same for the longest of leases.
const LONGEST_BATCH_WINDOW: Duration = Duration::from_millis(50);

#[derive(Debug, Default)]
struct State {
    leases: BTreeMap<u64, Entry>,
    schedule: BTreeSet<(Stamp, u64)>,
    /// Guards that end at a set time.
    limits: BTreeSet<(Stamp, usize, u64)>,
    /// When the task looks next. Never, once nothing was held at two looks in a row: what is held again soon after is mostly due later, and need
    /// not wake the task.
    next_look: Option<Stamp>,
    /// Whether the task runs.
    is_running: bool,
}

#[derive(Debug)]
struct Entry {
    lease: Lease,
    due: Stamp,
    guards: Guards,
}

impl State {
    /// Whether the task is to be woken for what is due then.
    fn is_earlier(&self, due: Stamp) -> bool {
        self.next_look.is_none_or(|look| due < look)
    }

    /// Takes what is to be renewed before long.
    fn batch(&mut self, now: Stamp) -> Vec<Lease> {
        let Self { leases, schedule, .. } = self;
        let soon = schedule.range(..=(now + LONGEST_BATCH_WINDOW, u64::MAX)).copied();
        let taken: Vec<_> = soon
            .filter(|(at, serial)| {
                leases.get(serial).is_some_and(|entry| {
                    // One that is being renewed, or is not to be, is due at its deadline.
                    let waits = entry.due < entry.lease.deadline() && entry.guards.iter().any(|held| held.renews());
                    waits && at.since(now) <= entry.lease.ttl() / BATCH_WINDOW
                })
            })
            .collect();
        let mut due = Vec::with_capacity(taken.len());
        for (at, serial) in taken {
            let Some(entry) = leases.get_mut(&serial) else { continue };
            schedule.remove(&(at, serial));
            entry.due = entry.lease.deadline();
            schedule.insert((entry.due, serial));
            due.push(entry.lease.clone());
        }
        due
    }
}

/// The guards that one lease keeps, by their revocations. Mostly it is one, which takes no map.
#[derive(Debug)]
#[expect(clippy::box_collection, reason = "every lease would have the room for a map")]
enum Guards {
    One(Arc<Held>),
    Many(Box<HashMap<usize, Arc<Held>>>),
}

impl Guards {
    fn insert(&mut self, held: &Arc<Held>) {
        if let Self::One(first) = self {
            if id(first) == id(held) {
                *first = Arc::clone(held);
                return;
            }
            let guards = HashMap::from([(id(first), Arc::clone(first))]);
            *self = Self::Many(Box::new(guards));
        }
        if let Self::Many(guards) = self {
            guards.insert(id(held), Arc::clone(held));
        }
    }

    /// True if none is left.
    fn remove(&mut self, guard: usize) -> bool {
        match self {
            Self::One(held) => id(held) == guard,
            Self::Many(guards) => {
                guards.remove(&guard);
                guards.is_empty()
            }
        }
    }

    fn get(&self, guard: usize) -> Option<&Arc<Held>> {
        match self {
            Self::One(held) => Some(held).filter(|held| id(held) == guard),
            Self::Many(guards) => guards.get(&guard),
        }
    }

    fn iter(&self) -> impl Iterator<Item = &Arc<Held>> {
        let (one, many) = match self {
            Self::One(held) => (Some(held), None),
            Self::Many(guards) => (None, Some(guards.values())),
        };
        one.into_iter().chain(many.into_iter().flatten())
    }
}

impl Watchdog {
    /// Starts to watch a guard, and with it its lease.
    pub(crate) fn watch(&self, held: &Arc<Held>) {
        let lease = held.lease();
        let serial = lease.serial();
        let mut locked = self.lock();
        let state = &mut *locked;
        // With the mutex: should it raise the alarm at once, the guard is there when it is looked for.
        held.raise(&self.alarm);
        let mut earliest = None;
        match state.leases.entry(serial) {
            Slot::Occupied(mut known) => {
                let entry = known.get_mut();
                entry.guards.insert(held);
                // It may have ended since the grant, and those on it have been told by then.
                if !lease.is_valid(held.core().clock.now()) {
                    self.alarm.revoked(serial, lease.revocation().id());
                }
                // The first to renew on a lease that nobody renewed so far.
                let due = first_due(lease, held.renews());
                if due < entry.due
                    && !entry
                        .guards
                        .iter()
                        .any(|other| other.renews() && !Arc::ptr_eq(other, held))
                {
                    state.schedule.remove(&(entry.due, serial));
                    entry.due = due;
                    state.schedule.insert((due, serial));
                    earliest = Some(due);
                }
            }
            Slot::Vacant(new) => {
                lease.revocation().alarm(&self.alarm, serial, lease.revocation().id());
                let due = first_due(lease, held.renews());
                state.schedule.insert((due, serial));
                earliest = Some(due);
                new.insert(Entry {
                    lease: lease.clone(),
                    due,
                    guards: Guards::One(Arc::clone(held)),
                });
            }
        }
        if let Some(limit) = held.limit() {
            state.limits.insert((limit, id(held), serial));
            earliest = Some(earliest.map_or(limit, |due| due.min(limit)));
        }
        let wakes = earliest.is_some_and(|due| state.is_earlier(due));
        let was_running = std::mem::replace(&mut state.is_running, true);
        drop(locked);
        if !was_running {
            held.core().start_watchdog();
        } else if wakes {
            self.alarm.notify.notify_one();
        }
    }

    /// Watches `next` in the place of `ended`, a guard with the same grant. What is due of the lease stays.
    pub(crate) fn replace(&self, ended: &Held, next: &Arc<Held>) {
        let serial = next.lease().serial();
        let mut state = self.lock();
        let Some(entry) = state.leases.get_mut(&serial) else {
            drop(state);
            return self.watch(next);
        };
        entry.guards.insert(next);
        next.raise(&self.alarm);
        // An alarm, or the end of the lease, may have found the one that has ended.
        if next.is_revoked() {
            self.alarm.revoked(serial, id(next));
        }
        if !next.lease().is_valid(next.core().clock.now()) {
            self.alarm.revoked(serial, next.lease().revocation().id());
        }
        if let Some(limit) = ended.limit() {
            state.limits.remove(&(limit, id(ended), serial));
        }
        if let Some(limit) = next.limit() {
            state.limits.insert((limit, id(next), serial));
            if state.is_earlier(limit) {
                self.alarm.notify.notify_one();
            }
        }
        let was_running = std::mem::replace(&mut state.is_running, true);
        drop(state);
        if !was_running {
            next.core().start_watchdog();
        }
    }

    /// Stops watching a guard. A lease without guards is not renewed any more.
    pub(crate) fn forget(&self, held: &Held) {
        let serial = held.lease().serial();
        let mut state = self.lock();
        if let Some(limit) = held.limit() {
            state.limits.remove(&(limit, id(held), serial));
        }
        let Some(entry) = state.leases.get_mut(&serial) else {
            return;
        };
        if entry.guards.remove(id(held)) {
            let due = entry.due;
            state.leases.remove(&serial);
            state.schedule.remove(&(due, serial));
        }
    }

    /// Every guard that is held.
    pub(crate) fn everything(&self) -> Vec<Arc<Held>> {
        self.lock()
            .leases
            .values()
            .flat_map(|entry| entry.guards.iter().cloned())
            .collect()
    }

    fn watches(&self, lease: &Lease) -> bool {
        self.lock().leases.contains_key(&lease.serial())
    }

    pub(crate) fn wake(&self) {
        self.alarm.notify.notify_one();
    }

    /// Does what is due, and says when to look again. Never, for `None`.
    fn tick(&self, core: &Arc<ClientInner>) -> Option<Stamp> {
        let now = core.clock.now();
        let mut lost = Vec::new();
        let mut due = Vec::new();
        let next_look = {
            let mut state = self.lock();
            for (serial, revocation) in self.alarm.take_revoked() {
                let Some(entry) = state.leases.get(&serial) else {
                    continue;
                };
                if entry.lease.revocation().id() == revocation {
                    lost.extend(entry.guards.iter().cloned());
                } else {
                    // The one that was revoked may be gone, and another one may be at its address or have the same grant.
                    let guard = entry.guards.get(revocation);
                    lost.extend(guard.filter(|held| held.is_revoked()).cloned());
                }
            }
            for &(_, guard, serial) in state.limits.range(..=(now, usize::MAX, u64::MAX)) {
                lost.extend(state.leases.get(&serial).and_then(|e| e.guards.get(guard)).cloned());
            }
            while let Some(&(at, serial)) = state.schedule.first().filter(|(at, _)| *at <= now) {
                state.schedule.remove(&(at, serial));
                let State { leases, schedule, .. } = &mut *state;
                let Some(entry) = leases.get_mut(&serial) else { continue };
                if !entry.lease.is_valid(now) {
                    lost.extend(entry.guards.iter().cloned());
                    continue;
                }
                if entry.guards.iter().any(|held| held.renews()) {
                    due.push(entry.lease.clone());
                }
                // A renewal ends, and sets the next time, well before the deadline.
                entry.due = entry.lease.deadline();
                schedule.insert((entry.due, serial));
            }
            if !due.is_empty() {
                due.extend(state.batch(now));
            }
            let next = [state.schedule.first().map(|s| s.0), state.limits.first().map(|l| l.0)];
            let next = next.into_iter().flatten().min();
            let nap = next.map(|at| at.since(now).min(LONGEST_NAP));
            let nap = nap.or_else(|| state.is_earlier(now).then_some(LONGEST_NAP));
            state.next_look = nap.map(|nap| now + nap);
            state.next_look
        };
        for lease in due {
            core.spawn_renewal(lease);
        }
        for held in lost {
            let reason = held.lost(now).unwrap_or(LossReason::Expired);
            held.let_go(reason, None);
        }
        next_look
    }

    /// A renewal ended; the lease is due again at `due`, or lost.
    fn renewed(&self, lease: &Lease, due: Stamp) {
        let mut state = self.lock();
        let State { leases, schedule, .. } = &mut *state;
        let Some(entry) = leases.get_mut(&lease.serial()) else {
            return;
        };
        schedule.remove(&(entry.due, lease.serial()));
        entry.due = due;
        schedule.insert((due, lease.serial()));
        self.alarm.notify.notify_one();
    }

    #[cfg(test)]
    pub(crate) fn is_idle(&self) -> bool {
        let state = self.lock();
        state.leases.is_empty() && state.schedule.is_empty() && state.limits.is_empty()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing here panics while holding the mutex.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Tells a guard from all others that are held: of one grant there is one at a time.
fn id(held: &Held) -> usize {
    held.grant().revocation().id()
}

fn first_due(lease: &Lease, renews: bool) -> Stamp {
    // A lease taken late by another guard has less than a ttl left; two thirds before its end is never too late.
    if renews {
        lease.deadline() - lease.ttl() / 3 * 2 - sooner(lease, FIRST_SPREAD)
    } else {
        lease.deadline()
    }
}

/// How much sooner than need be. A lease that locks share is one renewal in any case.
fn sooner(lease: &Lease, spread: f64) -> Duration {
    match lease.claim() {
        Some(_) => (lease.ttl() / 3).mul_f64(spread * fastrand::f64()),
        None => Duration::ZERO,
    }
}

impl ClientInner {
    fn start_watchdog(self: &Arc<Self>) {
        let alarm = Arc::clone(&self.watchdog.alarm);
        // Neither keeps the client alive nor is waited for by a shutdown.
        let watching = |_| self.executor.spawn(watch(Post(Arc::downgrade(self)), alarm));
        if let Err(error) = self.executor.handle().and_then(watching) {
            tracing::error!(target: "fencelock", error = format_args!("{error:#}"), "locks are not renewed");
        }
    }

    fn spawn_renewal(self: &Arc<Self>, lease: Lease) {
        let core = Arc::clone(self);
        let work = async move {
            // It may have been released before this task ran.
            if !core.watchdog.watches(&lease) {
                return;
            }
            let asked = core.clock.now();
            let mut renewing = Renewing {
                core: &core,
                lease: &lease,
                due: asked,
            };
            let outcome = core.renew(&lease).await;
            renewing.due = match outcome {
                Ok(()) => asked + lease.ttl() / 3 - sooner(&lease, SPREAD),
                Err(error) => {
                    tracing::warn!(target: "fencelock", lease = %lease.id(), error = format_args!("{error:#}"), "renewal failed; trying again");
                    core.clock.now() + retry_pause(lease.ttl())
                }
            };
        };
        if let Err(error) = self.spawn(work) {
            tracing::error!(target: "fencelock", error = format_args!("{error:#}"), "a lease could not be renewed");
        }
    }

    /// One renewal. Ok also when the server refused, which ends the lease.
    pub(crate) async fn renew(&self, lease: &Lease) -> Result<(), LockError> {
        let limit = self.op_timeout.min(lease.ttl() / 4);
        let sent = self.clock.now();
        let renewal = catch_panic("renewal", async { self.backend.renew(lease).await });
        let answer = time::timeout(limit, renewal).await;
        let answer = answer.unwrap_or_else(|_| Err(unanswered(limit, lease.ttl())));
        match answer {
            Ok(Renewal::Renewed) => {
                self.stats.renewed.add();
                lease.refreshed(sent, self.clock.now());
                tracing::trace!(target: "fencelock", lease = %lease.id(), "renewed");
                Ok(())
            }
            Ok(Renewal::NotHeld) => {
                lease.revoker().revoke(LossReason::NotHeld);
                Ok(())
            }
            Err(error) => {
                self.stats.renewal_errors.add();
                Err(error)
            }
        }
    }
}

/// A renewal was not answered within `limit`.
fn unanswered(limit: Duration, ttl: Duration) -> LockError {
    if limit < ttl / 4 {
        return LockError::no_answer("renewal", limit);
    }
    LockError::unavailable(
        "renewal",
        format!(
            "no answer within {limit:?}, a quarter of the ttl of {ttl:?}; if round trips to the server take that long, raise \
             the ttl"
        ),
    )
}

/// A renewal under way. Dropping it sets when the lease is due again.
struct Renewing<'a> {
    core: &'a ClientInner,
    lease: &'a Lease,
    due: Stamp,
}

impl Drop for Renewing<'_> {
    fn drop(&mut self) {
        self.core
            .watchdog
            .renewed(self.lease, self.due.min(self.lease.deadline()));
    }
}

async fn watch(post: Post, alarm: Arc<Alarm>) {
    loop {
        let nap = match post.0.upgrade() {
            Some(core) => {
                let next_look = core.watchdog.tick(&core);
                next_look.map_or(Duration::MAX, |look| look.since(core.clock.now()))
            }
            None => return,
        };
        tokio::select! {
            () = alarm.notify.notified() => {}
            () = time::sleep(nap) => {}
        }
    }
}

/// Ends all holds when the runtime of the watchdog ends.
struct Post(Weak<ClientInner>);

impl Drop for Post {
    fn drop(&mut self) {
        let Some(core) = self.0.upgrade() else { return };
        core.watchdog.lock().is_running = false;
        for held in core.watchdog.everything() {
            held.let_go(LossReason::RuntimeEnded, None);
        }
    }
}

fn retry_pause(ttl: Duration) -> Duration {
    (ttl / 20).clamp(Duration::from_millis(10), Duration::from_secs(1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Locks, MemoryLock};

    #[tokio::test]
    async fn an_alarm_about_a_guard_that_is_gone_harms_no_other_at_its_address() {
        let locks = Locks::new(MemoryLock::new().sharing_leases());
        let guard = locks.lock("a").await.unwrap();
        let watchdog = &locks.core.watchdog;
        let held = watchdog.everything().remove(0);
        // As the guard before it left it there. Nobody is woken, so that it is this look that finds it.
        watchdog.alarm.lock().push((held.lease().serial(), id(&held)));
        watchdog.tick(&locks.core);
        assert!(guard.is_held(), "{:?}", held.grant().revoked());
        assert_eq!(locks.stats().held, 1);
    }
}
