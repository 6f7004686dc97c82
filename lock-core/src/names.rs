//! What this client does with each name: the waiters, and the claim that is at the server.
//!
//! **Invariant.** For each key (the name, or a key of its own for a claim that others may hold beside) at most one claim of this client is at the server, be it asking, waiting, held or being released. A
//! claim follows another one only when the release of the first is confirmed, or when its lease must have ended at the server.
//!
//! Claims that others may hold beside have a key each, and so no queue here: the server puts them into their order.
//!
//! The state of a name is changed here, under one mutex. The [task](crate::name_task) of the name sends the requests. It exists while there
//! is something to do: a name that is held has none, unless the time of a waiter ends by itself.

mod name;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use foldhash::fast::RandomState;
use tokio::sync::Notify;

use crate::acquire_options::AcquireOptions;
use crate::held::Held;
use crate::owner::Owners;
use crate::release::{Release, Releasing, Reservation};
use crate::stats::{Counter, Gauge};
use crate::wait::SharedWait;
use crate::waiters::{Answers, GRACE, Waiter};
use crate::{Claim, FencingToken, Lease, LockError, LockName, Stamp};
use name::KnownHolder;
pub(crate) use name::{Ask, Name, Served};

/// A request whose time ends that soon is not repeated.
pub(crate) const TOO_LATE: Duration = Duration::from_millis(50);

/// All names that a client uses at the moment.
pub(crate) struct Names {
    state: Mutex<State>,
    /// Longest time of one request.
    op_timeout: Duration,
    /// Every claim asks for tokens for later holders.
    lingers: bool,
    owners: Owners,
    /// Callers of a drain, while which nothing is kept.
    draining: Arc<Counter>,
}

#[derive(Default)]
struct State {
    // Boxed: a table keeps a third of its places empty.
    names: HashMap<Arc<str>, Box<Name>, RandomState>,
    last_serial: u64,
    closed: bool,
    /// How many requests of this client wait for a name to share it, each under a key of its own.
    sharing: HashMap<Arc<str>, usize, RandomState>,
}

/// A request that waits.
pub(crate) struct Queued {
    pub(crate) serial: u64,
    /// The task of the name, if it is to be started.
    pub(crate) task: Option<Arc<Notify>>,
    /// What the client keeps for the name: it is to be let go, and the task to be woken after that.
    pub(crate) kept: Option<Arc<Held>>,
}

/// What the task of a name does next.
pub(crate) enum Step {
    Ask(Ask),
    Release(Claim, Reservation),
    /// Nothing, until a guard is released or a wait ends.
    Hold,
    End,
}

/// The first request for a name, which begins in the task of its caller.
pub(crate) struct First {
    pub(crate) serial: u64,
    pub(crate) ask: Ask,
    pub(crate) task: Arc<Notify>,
}

impl Names {
    pub(crate) fn new(op_timeout: Duration, lingers: bool) -> Self {
        Self {
            state: Mutex::default(),
            op_timeout,
            lingers,
            owners: Owners::default(),
            draining: Arc::default(),
        }
    }

    /// Counts a request that waits for a name to share it, for as long as the result lives.
    pub(crate) fn sharing<'a>(&'a self, name: &Arc<str>) -> impl Drop + use<'a> {
        struct Sharing<'a>(&'a Names, Arc<str>);
        impl Drop for Sharing<'_> {
            fn drop(&mut self) {
                let mut state = self.0.lock();
                if let Some(count) = state.sharing.get_mut(&self.1) {
                    *count -= 1;
                    if *count == 0 {
                        state.sharing.remove(&self.1);
                    }
                }
            }
        }
        *self.lock().sharing.entry(Arc::clone(name)).or_default() += 1;
        Sharing(self, Arc::clone(name))
    }

    /// A key that no other claim has.
    pub(crate) fn new_key(&self, name: &str) -> Arc<str> {
        let mut state = self.lock();
        state.last_serial += 1;
        // No name has a line feed.
        format!("{name}\n{}", state.last_serial).into()
    }

    /// The claim of a name goes on under another key. Returns the task of the name if it is to be started.
    pub(crate) fn vacate(&self, key: &str, to: &Arc<str>) -> Option<Arc<Notify>> {
        let mut state = self.lock();
        state.names.entry(Arc::clone(to)).or_default().is_held = true;
        let name = state.names.get_mut(key)?;
        name.is_held = false;
        name.holder = None;
        if name.task.is_none() && name.front().is_none() {
            state.names.remove(key);
            return None;
        }
        name.wake()
    }

    /// Begins the first request for a name of which nothing is known, without a waiter so far.
    pub(crate) fn begin(&self, key: &Arc<str>, name: &LockName, options: &AcquireOptions, now: Stamp) -> Option<First> {
        let mut state = self.lock();
        let State {
            names,
            last_serial,
            closed: false,
            ..
        } = &mut *state
        else {
            return None;
        };
        let Entry::Vacant(entry) = names.entry(Arc::clone(key)) else {
            return None;
        };
        *last_serial += 1;
        let claim = options.claim(self.owners.next(), name.clone(), self.lingers);
        let task = Arc::new(Notify::new());
        entry.insert(Box::new(Name::begun(claim.clone(), &task)));
        let deadline = options.wait.map_or(Stamp::MAX, |limit| now + limit);
        let wait = options.waits().then(|| SharedWait::new(deadline, &task));
        Some(First {
            serial: *last_serial,
            ask: Ask { claim, wait },
            task,
        })
    }

    /// Puts a request into the queue, or answers it at once. One that has begun has its serial, and comes first.
    pub(crate) fn enter(&self, key: &Arc<str>, mut waiter: Waiter, begun: Option<u64>) -> Result<Queued, LockError> {
        // Dropped without the mutex.
        let _abandoned;
        let mut state = self.lock();
        if state.closed {
            return Err(LockError::closed());
        }
        let serial = begun.unwrap_or(state.last_serial + 1);
        state.last_serial = state.last_serial.max(serial);
        let name = state.names.entry(Arc::clone(key)).or_default();
        let is_busy = name.is_busy();
        if is_busy && waiter.is_impatient {
            let busy = name.holder.as_ref().map(KnownHolder::busy).unwrap_or_default();
            return Err(waiter.timed_out(waiter.started, &busy));
        }
        let queue = name.queue.get_or_insert_default();
        if is_busy {
            queue.busy_up_to = serial;
        }
        let first_response = (!is_busy).then(|| waiter.started + self.op_timeout + GRACE);
        waiter.expiry = waiter.deadline.filter(|_| !waiter.is_impatient).or(first_response);
        waiter.serial = serial;
        // Behind a holder of this client only the end of its own time concerns the task.
        let needs_task = !name.is_held || waiter.expiry.is_some() && name.kept.is_none();
        queue.push(Box::new(waiter));
        _abandoned = name.wanted_again();
        let (task, kept) = (needs_task.then(|| name.wake()).flatten(), name.kept.clone());
        Ok(Queued { serial, task, kept })
    }

    /// Takes out a request whose caller has gone away. `count` counts the clean-up of what the server may do for it.
    pub(crate) fn leave(&self, key: &str, serial: u64, count: impl FnOnce() -> Releasing) -> Option<Box<Waiter>> {
        // Dropped without the mutex.
        let _abandoned;
        let mut state = self.lock();
        let name = state.names.get_mut(key)?;
        let Some(waiter) = name.queue.as_mut().and_then(|queue| queue.remove(serial)) else {
            name.is_undelivered |= name.served == serial;
            return None;
        };
        name.count_abandoned(count);
        _abandoned = name.wanted_again();
        if let Some(task) = &name.task {
            task.notify_one();
        }
        Some(waiter)
    }

    /// Ends all requests, and accepts no more.
    pub(crate) fn close(&self) -> Answers {
        let mut state = self.lock();
        state.closed = true;
        let mut answers = Answers::new();
        for name in state.names.values_mut() {
            answers.extend(name.refuse_all(&LockError::closed()));
            if let Some(task) = &name.task {
                task.notify_one();
            }
        }
        answers
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.lock().closed
    }

    /// A guard has ended: its claim is to be released. Returns the task if it is to be started.
    pub(crate) fn release(&self, key: &Arc<str>, release: Release) -> Option<Arc<Notify>> {
        let mut state = self.lock();
        let name = state.names.entry(Arc::clone(key)).or_default();
        name.is_held = false;
        name.releasing = Some(Box::new(release));
        name.wake()
    }

    /// The release of a claim is confirmed. Forgets the name, unless a waiter has come.
    pub(crate) fn released_at_once(&self, key: &Arc<str>) -> Option<Box<Release>> {
        // Dropped without the mutex.
        let mut name;
        let mut state = self.lock();
        match state.names.entry(Arc::clone(key)) {
            Entry::Occupied(entry) if !entry.get().has_waiters() => name = entry.remove(),
            _ => return None,
        }
        drop(state);
        name.released(true)
    }

    /// The guard with `claim` has ended: takes out the first waiter, which gets the same claim with `token`. `None` if the claim is to be
    /// released.
    pub(crate) fn hand_on(&self, key: &str, claim: &Claim, token: FencingToken, now: Stamp) -> Option<Served> {
        let mut state = self.lock();
        if state.closed {
            return None;
        }
        let name = state.names.get_mut(key)?;
        // Those are refused that came while the client was about to release what it kept.
        let served = name.serve(claim, token, now)?;
        if name.front().is_none()
            && let Some(task) = &name.task
        {
            task.notify_one();
        }
        Some(served)
    }

    /// Keeps a claim while no guard has it. Refused if a waiter has come, if the hold has ended, or if the client is to keep nothing.
    pub(crate) fn keep(&self, key: &str, idle: &Arc<Held>) -> bool {
        let mut state = self.lock();
        let may_keep =
            !state.closed && self.draining.get() == 0 && !idle.has_ended() && !state.sharing.contains_key(key);
        match state.names.get_mut(key) {
            Some(name) if may_keep && name.is_held && name.front().is_none() => {
                name.kept = Some(Arc::clone(idle));
                true
            }
            _ => false,
        }
    }

    /// Looks at a name that the client uses, or changes it. What `look` takes out is to be returned, so that it is dropped without the mutex.
    pub(crate) fn with<T>(&self, key: &str, look: impl FnOnce(&mut Name) -> T) -> Option<T> {
        self.lock().names.get_mut(key).map(|name| look(name))
    }

    /// The claim that is kept for a name. It counts as kept until it is released or has a guard again.
    pub(crate) fn kept(&self, key: &str) -> Option<Arc<Held>> {
        self.with(key, |name| name.kept.clone())?
    }

    /// All claims that are kept. None is until the result is dropped.
    pub(crate) fn keep_none(&self) -> (Vec<Arc<Held>>, Gauge) {
        let draining = self.draining.hold();
        let state = self.lock();
        let kept = state.names.values().filter_map(|name| name.kept.clone());
        (kept.collect(), draining)
    }

    /// Forgets a name whose task cannot run any more.
    pub(crate) fn give_up(&self, key: &str, error: &LockError) -> Answers {
        let mut state = self.lock();
        let name = state.names.remove(key);
        drop(state);
        name.map(|mut name| name.refuse_all(error)).unwrap_or_default()
    }

    /// Decides what the task of a name does next. `clean_up` makes the release of a claim that has no use any more.
    pub(crate) fn next(
        &self,
        key: &str,
        clean_up: impl FnOnce(Claim, Option<Lease>, Option<Releasing>) -> Release,
    ) -> Step {
        let mut state = self.lock();
        let Some(name) = state.names.get_mut(key) else {
            return Step::End;
        };
        name.queue.take_if(|queue| queue.is_empty());
        if let Some(release) = &name.releasing {
            return Step::Release(release.claim.clone(), release.reservation);
        }
        if name.is_held {
            if name.next_expiry().is_some() {
                return Step::Hold;
            }
            name.task = None;
            return Step::End;
        }
        let unwanted = name.asking.take_if(|asking| !asking.serves(name.queue.as_deref()));
        if let Some(asking) = unwanted.filter(|asking| asking.sent > 0) {
            let release = clean_up(asking.claim.clone(), asking.shared, asking.abandoned);
            name.releasing = Some(Box::new(release));
            return Step::Release(asking.claim, Reservation::None);
        }
        match name.ask(&self.owners, self.lingers) {
            Some(ask) => Step::Ask(ask),
            None => {
                state.names.remove(key);
                Step::End
            }
        }
    }

    #[cfg(test)]
    pub(crate) fn is_idle(&self) -> bool {
        self.lock().names.is_empty()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing here panics while holding the mutex.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Names {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.lock();
        f.debug_struct("Names").field("names", &state.names.len()).finish()
    }
}
