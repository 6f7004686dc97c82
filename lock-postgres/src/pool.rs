//! Which session carries what.
//!
//! Locks with ttls of one class share sessions, at most [`FULL`] locks each: the server goes through all locks of a session
//! at the end of each of its statements, so a session with very many of them is slow at everything. A session that carries
//! nothing any more is used for whatever comes next, with limits of its own.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Mutex as AsyncMutex;

use crate::carried::Carried;
use crate::session::Session;

/// How many locks a session carries before the next ones go to another.
pub(crate) const FULL: usize = 1000;

/// How many sessions there are for one class of ttls. Beyond that, and while the server has no room for another session,
/// those that are there carry more than they should.
pub(crate) const MOST: usize = 128;

/// The sessions of a client.
#[derive(Default)]
pub(crate) struct Pool {
    sessions: Mutex<Vec<Arc<Session>>>,
    /// One at a time opens a session of a class, whoever else wants one waits for that.
    opening: Mutex<HashMap<Duration, Arc<AsyncMutex<()>>>>,
}

impl Pool {
    fn lock(&self) -> MutexGuard<'_, Vec<Arc<Session>>> {
        lock(&self.sessions)
    }

    pub(crate) fn all(&self) -> Vec<Arc<Session>> {
        self.lock().clone()
    }

    pub(crate) fn find(&self, matches: impl Fn(&Session) -> bool) -> Option<Arc<Session>> {
        self.lock().iter().find(|session| matches(session)).cloned()
    }

    pub(crate) fn add(&self, session: &Arc<Session>) {
        let mut sessions = self.lock();
        sessions.retain(|session| !session.is_over());
        sessions.push(Arc::clone(session));
    }

    pub(crate) fn end_all(&self) {
        let sessions = std::mem::take(&mut *self.lock());
        for session in sessions {
            session.wire.end();
        }
    }

    pub(crate) fn opening(&self, class: Duration) -> Arc<AsyncMutex<()>> {
        Arc::clone(lock(&self.opening).entry(class).or_default())
    }

    /// The session for one more lock of that class, in company.
    pub(crate) fn shared(&self, class: Duration, full: usize) -> Option<Carried> {
        let sessions = self.lock();
        let fits = |session: &&Arc<Session>| {
            session.ttl() == class && !session.is_alone() && session.carries() < full && session.is_useful()
        };
        // A stale one could not end if it were used on and on; it is better than none.
        let found = if full == usize::MAX {
            let load = |session: &&Arc<Session>| (session.is_stale(), session.carries());
            sessions.iter().filter(fits).min_by_key(load)
        } else {
            sessions.iter().filter(fits).find(|session| !session.is_stale())
        };
        found.map(Session::carry)
    }

    /// A session that carries nothing, for what has that ttl. What shows waits goes on showing them, if there is another.
    pub(crate) fn free(&self, ttl: Duration) -> Option<Carried> {
        let sessions = self.lock();
        let free = |session: &&Arc<Session>| session.is_free() && !session.is_stale() && session.is_useful();
        let least = |session: &&Arc<Session>| (session.waits() > 0, session.ttl() != ttl);
        sessions.iter().filter(free).min_by_key(least).map(Session::carry_alone)
    }

    /// The first session that matches, for one more statement beside what it carries; none that something has to itself.
    pub(crate) fn beside(&self, matches: impl Fn(&Arc<Session>) -> bool) -> Option<Carried> {
        let sessions = self.lock();
        let fits = |session: &&Arc<Session>| !session.is_alone() && !session.is_silent() && !session.is_over();
        sessions
            .iter()
            .filter(fits)
            .find(|session| matches(session))
            .map(Session::carry)
    }

    /// A session that nothing depends on.
    pub(crate) fn idle(&self) -> Option<Carried> {
        let sessions = self.lock();
        let idle = |session: &&Arc<Session>| session.is_free() && session.waits() == 0 && session.is_useful();
        sessions.iter().find(idle).map(Session::carry_alone)
    }

    /// How many sessions of that class there are.
    pub(crate) fn count(&self, class: Duration) -> usize {
        let sessions = self.lock();
        sessions.iter().filter(|s| s.ttl() == class && !s.is_over()).count()
    }

    /// Ends sessions that nothing is carried by and no wait is shown by, but for so many.
    pub(crate) fn end_free(&self, but: usize) {
        let mut sessions = self.lock();
        let mut kept = 0;
        sessions.retain(|session| {
            let free = session.is_free() && session.waits() == 0;
            kept += usize::from(free);
            if free && kept > but {
                session.wire.end();
            }
            !session.is_over()
        });
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing here panics while holding a mutex.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
