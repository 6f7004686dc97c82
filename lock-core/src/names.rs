//! What this client does with each name: the waiters, and the claim that is at the server.
//!
//! **Invariant.** For each key (the name, or a key of its own for a claim that others may hold beside) at most one claim of this client is at
//! the server, be it asking, waiting, held or being released. A claim follows another one only when the release of the first is confirmed, or
//! when its lease must have ended at the server.
//!
//! Claims that others may hold beside have a key each, and so no queue here: the server puts them into their order.
//!
//! What callers, guards and the [task](crate::name_task) of a name share is here, under one mutex. The task exists while there is something to
//! send: a name that is held has none.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use foldhash::fast::RandomState;
use tokio::sync::{Notify, oneshot};

use crate::acquire_options::AcquireOptions;
use crate::held::Held;
use crate::name_state::{Ask, Name, Unkept};
use crate::owner::Owners;
use crate::process::{ExitDelay, Process};
use crate::queue::{Answer, Known, Waiter};
use crate::release::{Release, Releases, Releasing};
use crate::stats::Counter;
use crate::wait::SharedWait;
use crate::{LockError, LockName, Stamp};

/// All names that a client uses at the moment.
pub(crate) struct Names {
    state: Mutex<State>,
    /// How long a claim is kept without a guard.
    pub(crate) linger: Duration,
    owners: Owners,
    /// Callers of a drain, while which nothing is kept.
    pub(crate) draining: Arc<Counter>,
    process: Arc<Process>,
    releasing: Arc<Counter>,
    pub(crate) releases: Releases,
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
    /// The client does not use the name otherwise. The request is sent without a waiter so far.
    First(u64, Ask, Arc<Notify>),
    /// The next hold of a claim that was kept, and the one before.
    Held(Arc<Held>, Arc<Held>),
    Wait,
}

/// A request that waits.
#[derive(Default)]
pub(crate) struct Queued {
    pub(crate) serial: u64,
    /// The task of the name, if it is to be started.
    pub(crate) task: Option<Arc<Notify>>,
    /// The hold of a claim that is kept no more.
    pub(crate) unkept: Option<Arc<Held>>,
}

/// What becomes of a claim whose guard has ended.
pub(crate) enum Ended {
    /// The first waiter gets it, without a request.
    Next(Release, Box<Waiter>, Arc<Held>, Vec<Answer>),
    Kept(Release),
    /// It is released. With the task of the name, if it is to be started.
    Releasing(Option<Arc<Notify>>),
}

/// What the task of a name does next.
pub(crate) enum Next {
    Ask,
    Release,
    End,
}

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

    /// Counts a release as under way for as long as the result lives.
    pub(crate) fn releasing(&self) -> Releasing {
        Releasing {
            _counted: self.releasing.hold(),
            _drained: self.releases.begin(),
            _exit: ExitDelay::of(&self.process),
        }
    }

    /// Begins a request, before it has a waiter.
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
        let mut entry = match names.entry(Arc::clone(key)) {
            Entry::Occupied(entry) => entry,
            Entry::Vacant(entry) => {
                *last_serial += 1;
                let task = Arc::new(Notify::new());
                let claim = options.claim(self.owners.next(), name.clone(), !self.linger.is_zero());
                let deadline = options.wait.map_or(Stamp::MAX, |limit| now + limit);
                let wait = options.waits().then(|| SharedWait::new(deadline, &task));
                entry.insert(Box::new(Name {
                    task: Some(Arc::clone(&task)),
                    asks: Some(claim.clone()),
                    wait: wait.clone(),
                    ..Name::default()
                }));
                return Begin::First(*last_serial, (claim, wait), task);
            }
        };
        let name = entry.get_mut();
        let kept = name.hold.clone().filter(|_| name.is_kept);
        let fits = |kept: &Arc<Held>| options.is_served_by(&kept.grant.claim);
        let Some(kept) = kept.filter(fits) else {
            return Begin::Wait;
        };
        let Some(token) = kept.next_token(now) else {
            return Begin::Wait;
        };
        *last_serial += 1;
        let next = kept.next(token, options, *last_serial, now);
        // No caller is refused: one that had come would have had the claim released.
        name.hold(&next, now);
        Begin::Held(next, kept)
    }

    /// The claim is granted to the request that has begun first. Returns those that are refused.
    pub(crate) fn granted_at_once(&self, held: &Arc<Held>, now: Stamp) -> Vec<Answer> {
        let granted = self.change(&held.key, |name| {
            name.task = None;
            name.hold(held, now)
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
    ) -> Result<Queued, Answer> {
        let mut state = self.lock();
        if state.closed {
            return Err((Box::new(waiter), LockError::closed()));
        }
        let serial = begun.unwrap_or(state.last_serial + 1);
        state.last_serial = state.last_serial.max(serial);
        let name = state.names.entry(Arc::clone(key)).or_default();
        let is_busy = name.is_busy();
        if is_busy && waiter.is_impatient {
            let error = waiter.timed_out(waiter.started, name.known.as_ref().and_then(Known::holder));
            return Err((Box::new(waiter), error));
        }
        waiter.serial = serial;
        name.put_off(&waiter);
        name.queue.get_or_insert_default().push(Box::new(waiter), is_busy);
        let counted = self.count(name);
        let (unkept, task) = match name.unkeep(|| self.releasing(), now) {
            Some((held, task)) => (Some(held), task),
            None if name.hold.is_some() => (None, None),
            None => (None, name.wake()),
        };
        drop(state);
        drop(counted);
        Ok(Queued { serial, task, unkept })
    }

    /// Takes out a request whose caller has gone away.
    pub(crate) fn leave(&self, key: &str, serial: u64) -> Option<Box<Waiter>> {
        self.change(key, |name| {
            let waiter = name.queue.as_mut().and_then(|queue| queue.remove(serial));
            if let Some(hold) = name.hold.as_ref().filter(|hold| hold.serial == serial) {
                hold.is_undelivered.store(true, Ordering::Relaxed);
            }
            name.notify();
            waiter
        })?
    }

    /// Ends a request whose time is over, or returns when it is to be looked at again.
    pub(crate) fn expire(&self, key: &str, serial: u64, now: Stamp) -> Result<Option<Stamp>, Answer> {
        let expired = self.change(key, |name| {
            let asked_until = name.wait.as_ref().and_then(|wait| wait.deadline());
            let Some(queue) = &mut name.queue else {
                return Ok(None);
            };
            let expired = queue.expire(serial, now, name.known.as_ref(), asked_until);
            name.notify();
            expired
        });
        expired.unwrap_or(Ok(None))
    }

    /// Ends all requests, and accepts no more.
    pub(crate) fn close(&self) -> Vec<Answer> {
        let mut state = self.lock();
        state.closed = true;
        let mut answers = Vec::new();
        for name in state.names.values_mut() {
            answers.extend(name.refuse_all(&LockError::closed()));
            name.notify();
        }
        answers
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.lock().closed
    }

    /// Decides what becomes of the claim of a guard that has ended.
    pub(crate) fn ended(&self, held: &Arc<Held>, release: Release, now: Stamp) -> Ended {
        let mut state = self.lock();
        let is_shared = state.sharing.contains_key(&held.key);
        let closed = state.closed;
        let name = state.names.entry(Arc::clone(&held.key)).or_default();
        if !closed {
            if let Some(token) = held.next_token(now)
                && let Some((waiter, next, refused)) = name.serve(&held.grant.claim, now, |waiter| {
                    held.next(token, &waiter.options, waiter.serial, now)
                })
            {
                return Ended::Next(release, waiter, next, refused);
            }
            let may_keep = self.draining.get() == 0 && !is_shared && name.front().is_none();
            if may_keep && held.keep(self.linger, now) {
                name.is_kept = true;
                return Ended::Kept(release);
            }
        }
        name.release(release);
        Ended::Releasing(name.wake())
    }

    /// The release of a claim is confirmed. Forgets the name, unless a waiter has come.
    pub(crate) fn released_at_once(&self, key: &str) -> Option<Box<Release>> {
        let mut state = self.lock();
        state.names.get(key).filter(|name| name.front().is_none())?;
        let mut name = state.names.remove(key)?;
        drop(state);
        name.released(true)
    }

    /// Has all claims released that are kept.
    pub(crate) fn unkeep_all(&self, now: Stamp) -> Vec<Unkept> {
        let mut state = self.lock();
        let unkept = state.names.values_mut();
        unkept
            .filter_map(|name| name.unkeep(|| self.releasing(), now))
            .collect()
    }

    /// Counts a request that waits for a name to share it, for as long as the result lives. Nothing is kept of that name meanwhile.
    pub(crate) fn sharing<'a>(&'a self, name: &Arc<str>) -> impl Drop + use<'a> {
        struct Sharing<'a>(&'a Names, Arc<str>);
        impl Drop for Sharing<'_> {
            fn drop(&mut self) {
                let sharing = &mut self.0.lock().sharing;
                if let Entry::Occupied(mut count) = sharing.entry(Arc::clone(&self.1)) {
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
    pub(crate) fn vacate(&self, key: &str, now: Stamp) -> (Option<Unkept>, Option<oneshot::Receiver<()>>) {
        let vacated = self.change(key, |name| {
            let unkept = name.unkeep(|| self.releasing(), now);
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

    /// The claim of a hold goes on as that of another one, under another key. Returns the task of its name, if it is to be started.
    pub(crate) fn replace(&self, hold: &Held, by: &Arc<Held>) -> Option<Arc<Notify>> {
        let mut state = self.lock();
        let other = state.names.entry(Arc::clone(&by.key)).or_default();
        other.hold = Some(Arc::clone(by));
        let name = state.names.get_mut(&hold.key)?;
        (name.hold, name.known) = (None, None);
        if name.task.is_none() && name.front().is_none() {
            state.names.remove(&hold.key);
            return None;
        }
        name.wake()
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

    /// Counts the clean-up of a claim that no request wants any more. Returns what has counted one that is wanted again, or granted.
    fn count(&self, name: &mut Name) -> Option<Box<Releasing>> {
        if name.asks.is_none() || name.is_wanted() {
            return name.abandoned.take();
        }
        name.abandoned.get_or_insert_with(|| Box::new(self.releasing()));
        None
    }

    /// Forgets a name whose task cannot run any more.
    pub(crate) fn give_up(&self, key: &str, error: &LockError) -> Vec<Answer> {
        let name = self.lock().names.remove(key);
        name.map(|mut name| name.refuse_all(error)).unwrap_or_default()
    }

    /// Decides what the task of a name does next.
    pub(crate) fn next(&self, key: &str) -> Next {
        let mut state = self.lock();
        let Some(name) = state.names.get_mut(key) else {
            return Next::End;
        };
        name.queue.take_if(|queue| queue.len() == 0);
        if name.release.is_some() {
            return Next::Release;
        }
        if name.hold.is_some() {
            name.task = None;
            return Next::End;
        }
        let Some(queue) = &name.queue else {
            state.names.remove(key);
            return Next::End;
        };
        // It asks for tokens for others that wait, or that are likely to come.
        let for_others = queue.len() > 1 || !self.linger.is_zero() || name.is_contended;
        let front = queue.front();
        name.asks = front.map(|front| front.options.claim(self.owners.next(), front.name.clone(), for_others));
        Next::Ask
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
