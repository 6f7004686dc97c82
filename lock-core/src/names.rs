//! What this client does with each name: the waiters, and the claim that is at the server.
//!
//! **Invariant.** For each key (the name, or a key of its own for a claim that others may hold beside) at most one claim of this client is at
//! the server, be it asking, waiting, held or being released. A claim follows another one only when the release of the first is confirmed, or
//! when its lease must have ended at the server.
//!
//! Claims that others may hold beside have a key each, and so no queue here: the server puts them into their order.
//!
//! The state of a name is changed here, under one mutex. The [task](crate::name_task) of the name sends the requests. It exists while there
//! is something to send: a name that is held has none.

mod name;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use foldhash::fast::RandomState;
use tokio::sync::{Notify, oneshot};

use crate::acquire_options::AcquireOptions;
use crate::held::Held;
use crate::owner::Owners;
use crate::process::{ExitDelay, Process};
use crate::queue::{Answers, Waiter};
use crate::release::{Release, Releases, Releasing, Reservation};
use crate::stats::{Counter, Gauge};
use crate::wait::SharedWait;
use crate::{Claim, FencingToken, Grant, LockError, LockName, Stamp};
pub(crate) use name::{Ask, Name};
use name::{AtServer, KnownHolder};

/// All names that a client uses at the moment.
pub(crate) struct Names {
    state: Mutex<State>,
    /// How long a claim is kept without a guard.
    linger: Duration,
    owners: Owners,
    /// Callers of a drain, while which nothing is kept.
    draining: Arc<Counter>,
    process: Arc<Process>,
    releasing: Arc<Counter>,
    releases: Releases,
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

/// How a request begins.
pub(crate) enum Begin {
    /// The client uses the name for nothing else. The request is sent without a waiter so far.
    Ask(u64, Ask, Arc<Notify>),
    /// It gets the claim that is kept, with the next token of its block.
    Kept(Arc<Held>, FencingToken, Answers),
    Wait,
}

/// A request that waits.
pub(crate) struct Queued {
    pub(crate) serial: u64,
    /// Whether its time is to be looked at.
    pub(crate) expires: bool,
    /// The task of the name, if it is to be started.
    pub(crate) task: Option<Arc<Notify>>,
    pub(crate) unkept: Option<Arc<Held>>,
}

/// What becomes of a claim whose guard has ended.
pub(crate) enum Ended {
    /// The first waiter gets it, without a request.
    Next(Release, Box<Waiter>, FencingToken, Answers),
    Kept(Release),
    /// It is released. With the task of the name, if it is to be started.
    Releasing(Option<Arc<Notify>>),
}

/// What the task of a name does next.
pub(crate) enum Next {
    Ask(Ask),
    Release(Claim, Reservation, bool),
    End,
}

/// A claim that is kept no more: its hold, and the task of its name, if it is to be started.
pub(crate) type Unkept = (Arc<Held>, Option<Arc<Notify>>);

impl Names {
    pub(crate) fn new(linger: Duration, process: &Arc<Process>, releasing: &Arc<Counter>) -> Self {
        Self {
            state: Mutex::default(),
            linger,
            owners: Owners::default(),
            draining: Arc::default(),
            process: Arc::clone(process),
            releasing: Arc::clone(releasing),
            releases: Releases::default(),
        }
    }

    /// Whether claims are kept without a guard.
    pub(crate) fn lingers(&self) -> bool {
        !self.linger.is_zero()
    }

    /// Counts a release as under way for as long as the result lives.
    pub(crate) fn releasing(&self) -> Releasing {
        Releasing {
            _counted: self.releasing.hold(),
            _drained: self.releases.begin(),
            _exit: ExitDelay::of(&self.process),
        }
    }

    /// Waits for the releases that are under way.
    pub(crate) async fn drain(&self) {
        self.releases.drain().await;
    }

    /// Counts a request that waits for a name to share it, for as long as the result lives. Nothing is kept of that name meanwhile.
    pub(crate) fn sharing<'a>(&'a self, name: &Arc<str>) -> impl Drop + use<'a> {
        struct Sharing<'a>(&'a Names, Arc<str>);
        impl Drop for Sharing<'_> {
            fn drop(&mut self) {
                let mut state = self.0.lock();
                if let Entry::Occupied(mut count) = state.sharing.entry(Arc::clone(&self.1)) {
                    *count.get_mut() -= 1;
                    if *count.get() == 0 {
                        count.remove();
                    }
                }
            }
        }
        *self.lock().sharing.entry(Arc::clone(name)).or_default() += 1;
        Sharing(self, Arc::clone(name))
    }

    /// Has a claim that is kept released. The second result ends at the first response to a release that is under way.
    pub(crate) fn vacated(&self, key: &str, now: Stamp) -> (Option<Unkept>, Option<oneshot::Receiver<()>>) {
        let vacated = self.change(key, |name| {
            let unkept = name.unkeep(|| self.releasing(), now);
            let unkept = unkept.map(|held| (held, name.wake()));
            let release = name.releasing().filter(|release| !release.has_failed);
            let response = release.map(|release| {
                let (tell, told) = oneshot::channel();
                release.told.push(tell);
                told
            });
            (unkept, response)
        });
        vacated.unwrap_or_default()
    }

    /// A key that no other claim has.
    pub(crate) fn new_key(&self, name: &str) -> Arc<str> {
        let mut state = self.lock();
        state.last_serial += 1;
        // No name has a line feed.
        format!("{name}\n{}", state.last_serial).into()
    }

    /// The claim of a name goes on under another key. Returns the task of the name if it is to be started.
    pub(crate) fn rename(&self, key: &str, to: &Arc<str>) -> Option<Arc<Notify>> {
        let mut state = self.lock();
        let name = state.names.get_mut(key)?;
        name.holder = None;
        let held = mem::take(&mut name.at_server);
        let task = match name.task.is_some() || name.has_waiters() {
            true => name.wake(),
            false => state.names.remove(key).and(None),
        };
        state.names.entry(Arc::clone(to)).or_default().at_server = held;
        task
    }

    /// Begins a request.
    pub(crate) fn begin(&self, key: &Arc<str>, name: &LockName, options: &AcquireOptions, now: Stamp) -> Begin {
        let mut state = self.lock();
        let State {
            names,
            last_serial,
            closed: false,
            ..
        } = &mut *state
        else {
            return Begin::Wait;
        };
        match names.entry(Arc::clone(key)) {
            Entry::Vacant(entry) => {
                *last_serial += 1;
                let claim = options.claim(self.owners.next(), name.clone(), self.lingers());
                let task = Arc::new(Notify::new());
                let deadline = options.wait.map_or(Stamp::MAX, |limit| now + limit);
                let wait = options.waits().then(|| SharedWait::new(deadline, &task));
                let (name, ask) = Name::begun(*last_serial, claim, wait, &task);
                entry.insert(Box::new(name));
                Begin::Ask(*last_serial, ask, task)
            }
            Entry::Occupied(mut entry) => {
                let name = entry.get_mut();
                let AtServer::Kept(kept) = &name.at_server else {
                    return Begin::Wait;
                };
                let kept = Arc::clone(kept);
                let fits = options.is_served_by(&kept.grant.claim);
                let Some(token) = kept.next_token(now).filter(|_| fits) else {
                    return Begin::Wait;
                };
                *last_serial += 1;
                let refused = name.hold(*last_serial, &kept.grant.claim, token, now);
                Begin::Kept(kept, token, refused)
            }
        }
    }

    /// The claim is granted to the request that has begun first.
    pub(crate) fn granted_at_once(&self, key: &str, grant: &Grant, serial: u64, now: Stamp) -> Answers {
        let granted = self.change(key, |name| {
            name.task = None;
            name.hold(serial, &grant.claim, grant.first_token(), now)
        });
        granted.unwrap_or_default()
    }

    /// Puts a request into the queue, or answers it at once. One that has begun has its serial, and comes first.
    pub(crate) fn enter(
        &self,
        key: &Arc<str>,
        mut waiter: Waiter,
        begun: Option<u64>,
        now: Stamp,
    ) -> Result<Queued, LockError> {
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
        waiter.serial = serial;
        waiter.set_expiry(is_busy);
        // The task of the name sees to that of the request which has begun.
        let expires = waiter.expiry.is_some() && begun.is_none();
        let queue = name.queue.get_or_insert_default();
        if is_busy {
            queue.busy_up_to = serial;
        }
        queue.push(Box::new(waiter));
        name.put_off();
        // One that was just kept: another task has taken its place since this request began.
        let unkept = name.unkeep(|| self.releasing(), now);
        let is_held = matches!(name.at_server, AtServer::Held { .. });
        let task = if is_held { None } else { name.wake() };
        let counted = self.count(name);
        drop(state);
        drop(counted);
        Ok(Queued {
            serial,
            expires,
            task,
            unkept,
        })
    }

    /// Takes out a request whose caller has gone away.
    pub(crate) fn leave(&self, key: &str, serial: u64) -> Option<Box<Waiter>> {
        self.change(key, |name| {
            let waiter = name.queue.as_mut().and_then(|queue| queue.remove(serial));
            if let AtServer::Held {
                serial: served,
                is_undelivered,
            } = &mut name.at_server
            {
                *is_undelivered |= *served == serial;
            }
            if let Some(task) = &name.task {
                task.notify_one();
            }
            waiter
        })?
    }

    /// Ends a request whose time is over, or returns when it is looked at again.
    pub(crate) fn expire(&self, key: &str, serial: u64, now: Stamp) -> Result<Option<Stamp>, (Box<Waiter>, LockError)> {
        let expired = self.change(key, |name| {
            let expired = name.expire(serial, now);
            if let Some(task) = &name.task {
                task.notify_one();
            }
            expired
        });
        expired.unwrap_or(Ok(None))
    }

    /// Ends all requests, and accepts no more.
    pub(crate) fn close(&self) -> Answers {
        let mut counted = Vec::new();
        let mut answers = Answers::new();
        let mut state = self.lock();
        state.closed = true;
        for name in state.names.values_mut() {
            answers.extend(name.refuse_all(&LockError::closed()));
            counted.extend(self.count(name));
            if let Some(task) = &name.task {
                task.notify_one();
            }
        }
        drop(state);
        answers
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.lock().closed
    }

    /// Decides what becomes of the claim of a guard that has ended.
    pub(crate) fn ended(&self, held: &Arc<Held>, release: Release, now: Stamp) -> Ended {
        let mut state = self.lock();
        let State {
            names, closed, sharing, ..
        } = &mut *state;
        let name = names.entry(Arc::clone(&held.key)).or_default();
        if !*closed {
            let claim = &held.grant.claim;
            if let Some(token) = held.next_token(now)
                && let Some((waiter, refused)) = name.serve(claim, token, now)
            {
                return Ended::Next(release, waiter, token, refused);
            }
            let may_keep = self.draining.get() == 0 && !name.has_waiters() && !sharing.contains_key(&held.key);
            if may_keep && held.keep(self.linger, now) {
                name.at_server = AtServer::Kept(Arc::clone(held));
                return Ended::Kept(release);
            }
        }
        name.at_server = AtServer::Releasing(Box::new(release));
        Ended::Releasing(name.wake())
    }

    /// Has a claim released that no guard has. Returns the task if it is to be started.
    pub(crate) fn release(&self, key: &Arc<str>, release: Release) -> Option<Arc<Notify>> {
        let mut state = self.lock();
        let name = state.names.entry(Arc::clone(key)).or_default();
        name.at_server = AtServer::Releasing(Box::new(release));
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

    /// Has claims released that are kept: that of one hold, or all of them.
    pub(crate) fn unkeep(&self, hold: Option<&Held>, now: Stamp) -> Vec<Unkept> {
        let unkeep = |name: &mut Name| Some((name.unkeep(|| self.releasing(), now)?, name.wake()));
        let mut state = self.lock();
        match hold {
            None => state.names.values_mut().filter_map(|name| unkeep(name)).collect(),
            Some(hold) => {
                let name = state.names.get_mut(&hold.key);
                let name =
                    name.filter(|name| matches!(&name.at_server, AtServer::Kept(kept) if std::ptr::eq(&**kept, hold)));
                name.and_then(|name| unkeep(name)).into_iter().collect()
            }
        }
    }

    /// Nothing is kept until the result is dropped.
    pub(crate) fn keep_none(&self) -> Gauge {
        self.draining.hold()
    }

    /// Looks at a name that the client uses, or changes it. What `change` takes out is to be returned, so that it is dropped without the mutex.
    pub(crate) fn change<T>(&self, key: &str, change: impl FnOnce(&mut Name) -> T) -> Option<T> {
        let mut state = self.lock();
        let name = state.names.get_mut(key)?;
        let changed = change(name);
        let counted = self.count(name);
        drop(state);
        drop(counted);
        Some(changed)
    }

    /// Counts the clean-up of a claim that no waiter wants any more. Returns what has counted one that a waiter wants again.
    fn count(&self, name: &mut Name) -> Option<Box<Releasing>> {
        if !name.is_abandoned() {
            return name.abandoned.take();
        }
        name.abandoned.get_or_insert_with(|| Box::new(self.releasing()));
        None
    }

    /// Forgets a name whose task cannot run any more.
    pub(crate) fn give_up(&self, key: &str, error: &LockError) -> Answers {
        let name = self.lock().names.remove(key);
        name.map(|mut name| name.refuse_all(error)).unwrap_or_default()
    }

    /// Decides what the task of a name does next. `abandoned` counts the claims that are released as no waiter wants them.
    pub(crate) fn next(&self, key: &str, now: Stamp, abandoned: &Counter) -> Next {
        let mut state = self.lock();
        let Some(name) = state.names.get_mut(key) else {
            return Next::End;
        };
        name.queue.take_if(|queue| queue.len() == 0);
        if let AtServer::Held { .. } | AtServer::Kept(_) = name.at_server {
            name.task = None;
            return Next::End;
        }
        if name.give_up_unwanted(|| self.releasing(), now) {
            abandoned.add();
        }
        if let Some(release) = name.releasing() {
            return Next::Release(release.claim.clone(), release.reservation, release.has_failed);
        }
        match name.ask(&self.owners, self.lingers()) {
            Some(ask) => Next::Ask(ask),
            None => {
                state.names.remove(key);
                Next::End
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
