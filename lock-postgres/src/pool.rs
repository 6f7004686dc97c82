//! Which session carries what.
//!
//! Locks with ttls of one class share sessions, at most [`FULL`] locks each: the server goes through all locks of a session
//! at the end of each of its statements, so a session with very many of them is slow at everything. A session that carries
//! nothing any more is used for whatever comes next, with limits of its own.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lock_core::Lease;
use tokio::sync::Mutex as AsyncMutex;
use tokio::time::sleep;

use crate::carried::Carried;
use crate::failure::Failure;
use crate::open::Room;
use crate::session::Session;
use crate::sessions::Sessions;
use crate::ttl_class::class_of;

/// How many locks a session carries before the next ones go to another.
pub(crate) const FULL: usize = 1000;

/// How many sessions there are for one class of ttls. Beyond that, and while the server has no room for another session,
/// those that are there carry more than they should.
pub(crate) const MOST: usize = 128;

/// How many sessions that carry nothing are kept for what comes next.
const SPARES: usize = 2;

/// How long a claim waits at most for the attempts of others on a session that holds no lock, to use it after them: many
/// that wait with many ttls need no more than one.
const PATIENCE: Duration = Duration::from_millis(50);

/// How long it takes until it is looked at again.
const LOOK: Duration = Duration::from_millis(1);

/// The ttl of a session that carries no lock.
const PLAIN_TTL: Duration = Duration::from_secs(30);

/// The sessions of a client.
#[derive(Default)]
pub(crate) struct Pool {
    sessions: Mutex<Vec<Arc<Session>>>,
    /// One at a time opens a session of a class, whoever else wants one waits for that.
    opening: Mutex<HashMap<Duration, Arc<AsyncMutex<()>>>>,
    /// Held by whoever changes the limits of a session that carries nothing.
    changing: AsyncMutex<()>,
}

/// What is there for what is to be carried.
enum Found {
    Ready(Carried),
    /// It carries nothing, and has other limits.
    Other(Carried),
    Nothing,
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

    fn opening(&self, class: Duration) -> Arc<AsyncMutex<()>> {
        Arc::clone(lock(&self.opening).entry(class).or_default())
    }

    /// A session for one more lock of that class, in company.
    fn shared(&self, class: Duration, full: usize) -> Found {
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
        match found {
            Some(session) => Found::Ready(session.carry()),
            None => Self::free(&sessions, class, |_| true),
        }
    }

    /// A session for one claim alone.
    fn alone(&self, ttl: Duration) -> Found {
        let sessions = self.lock();
        // What shows waits goes on showing them, if there is another.
        match Self::free(&sessions, ttl, |session| session.waits() == 0) {
            Found::Nothing => Self::free(&sessions, ttl, |_| true),
            found => found,
        }
    }

    fn free(sessions: &[Arc<Session>], ttl: Duration, also: impl Fn(&Session) -> bool) -> Found {
        let mut free = sessions
            .iter()
            .filter(|session| session.is_free() && !session.is_stale() && also(session) && session.is_useful());
        let Some(first) = free.next() else {
            return Found::Nothing;
        };
        if first.ttl() == ttl {
            return Found::Ready(first.carry_alone());
        }
        match free.find(|session| session.ttl() == ttl) {
            Some(session) => Found::Ready(session.carry_alone()),
            None => Found::Other(first.carry_alone()),
        }
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

    /// Whether there is a session that is in use by attempts alone.
    fn may_become_free(&self) -> bool {
        self.lock()
            .iter()
            .any(|session| !session.holds() && session.is_useful())
    }

    /// A session that nothing depends on.
    fn idle(&self) -> Option<Carried> {
        let sessions = self.lock();
        let idle = |session: &&Arc<Session>| session.is_free() && session.waits() == 0 && session.is_useful();
        sessions.iter().find(idle).map(Session::carry_alone)
    }

    /// How many sessions of that class there are.
    fn count(&self, class: Duration) -> usize {
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

impl Sessions {
    /// A session for one more lock of that ttl.
    pub(crate) async fn shared(self: &Arc<Self>, ttl: Duration, room: Room) -> Result<Carried, Failure> {
        let class = class_of(ttl);
        if let Found::Ready(session) = self.pool.shared(class, FULL) {
            return Ok(session.with_others());
        }
        let opening = self.pool.opening(class);
        let _opening = opening.lock().await;
        if let Some(session) = self.changed(class, || self.pool.shared(class, FULL)).await {
            return Ok(session.with_others());
        }
        let others = self.pool.count(class);
        if others > 0
            && (others >= MOST || self.room.is_short(self.clock.now()))
            && let Found::Ready(session) = self.pool.shared(class, usize::MAX)
        {
            return Ok(session.with_others());
        }
        // Boxed, as it is large and rare: whatever may open a session would be as large.
        match Box::pin(self.open(class, if others == 0 { room } else { Room::WaitedFor })).await {
            Ok(session) => Ok(session.with_others()),
            Err(failure) if failure.is_about_room() => match self.pool.shared(class, usize::MAX) {
                Found::Ready(session) => Ok(session.with_others()),
                _ => Err(failure),
            },
            Err(failure) => Err(failure),
        }
    }

    /// A session for a single claim.
    pub(crate) async fn own(self: &Arc<Self>, ttl: Duration, room: Room) -> Result<Carried, Failure> {
        match self.changed(ttl, || self.pool.alone(ttl)).await {
            Some(session) => Ok(session),
            None => Box::pin(self.open(ttl, room)).await,
        }
    }

    /// One that is there, with the limits of that ttl.
    async fn changed(&self, ttl: Duration, find: impl Fn() -> Found) -> Option<Carried> {
        let mut changing = None;
        loop {
            match find() {
                Found::Ready(session) => return Some(session),
                Found::Other(session) => match session.set_ttl(ttl).await {
                    Ok(()) => return Some(session),
                    Err(failure) => {
                        tracing::debug!(target: "fencelock", ?failure, "a session that carries nothing was of no use")
                    }
                },
                Found::Nothing => {
                    if !self.pool.may_become_free() {
                        return None;
                    }
                    match &changing {
                        // One after the other.
                        None => changing = Some((self.pool.changing.lock().await, self.clock.now())),
                        Some((_, since)) if self.clock.now().since(*since) > PATIENCE => return None,
                        Some(_) => sleep(LOOK).await,
                    }
                }
            }
        }
    }

    /// A session for a question that takes no lock. It carries nothing else meanwhile.
    pub(crate) async fn any(self: &Arc<Self>) -> Result<Carried, Failure> {
        match self.pool.idle() {
            Some(session) => Ok(session),
            None => Box::pin(self.open(PLAIN_TTL, Room::Needed)).await,
        }
    }

    /// A session for a statement that takes no lock, beside whatever it carries; a new one only if there is none.
    pub(crate) async fn at_hand(self: &Arc<Self>) -> Result<Carried, Failure> {
        match self.pool.idle().or_else(|| self.pool.beside(|_| true)) {
            Some(session) => Ok(session),
            None => self.any().await,
        }
    }

    /// A session that carries no lock, for what takes long, such as a wait for the disk; beside locks only if the server has no room for
    /// another.
    pub(crate) async fn unhurried(self: &Arc<Self>) -> Result<Carried, Failure> {
        match self.any().await {
            Ok(session) => Ok(session),
            Err(failure) => self.pool.beside(|_| failure.is_about_room()).ok_or(failure),
        }
    }

    /// A session to raise the ceiling of tokens with, which has not waited for that itself when it was opened.
    pub(crate) async fn raiser(self: &Arc<Self>) -> Result<Carried, Failure> {
        match self.pool.idle() {
            Some(session) => Ok(session),
            None => Box::pin(self.open_as_it_is(PLAIN_TTL)).await,
        }
    }

    /// Takes back a session that carries nothing any more.
    pub(crate) fn spare(&self, session: Carried) {
        let over = session.is_over();
        // One that can take no more locks may still carry some.
        if session.carries() <= 1 && !session.is_useful() {
            session.wire.end();
        }
        drop(session);
        if over {
            // What ended it may have ended the other ones, unnoticed so far.
            self.pool.end_free(0);
        } else {
            self.tidy();
        }
    }

    /// Ends sessions that carry nothing, but for a few: for all of them if the server is short of connections and this client
    /// holds nothing.
    pub(crate) fn tidy(&self) {
        let short = self.room.is_short(self.clock.now());
        self.pool.end_free(if short { 1 } else { SPARES });
    }

    /// A session that can show a wait, beside whatever else it does: one that is there already, or else one for that ttl.
    pub(crate) async fn ear(self: &Arc<Self>, ttl: Duration) -> Result<Arc<Session>, Failure> {
        let there = |session: &Session| session.is_useful() && !session.is_silent() && !session.is_stale();
        let found = self.pool.find(|session| there(session) && session.waits() > 0);
        match found.or_else(|| self.pool.find(there)) {
            Some(session) => Ok(session),
            None => Ok(Arc::clone(&*self.shared(ttl, Room::WaitedFor).await?)),
        }
    }

    /// The session that keeps that shared lease now.
    pub(crate) fn by_lease(&self, lease: &Lease) -> Option<Arc<Session>> {
        self.pool
            .find(|session| session.wire.lease().is_some_and(|kept| kept.id() == lease.id()))
    }

    /// Whether the session with that backend is one of this client.
    pub(crate) fn by_pid(&self, pid: i32) -> bool {
        self.pool.find(|session| session.pid == pid).is_some()
    }

    /// Some session that is alive.
    pub(crate) fn witness(&self) -> Option<Arc<Session>> {
        self.pool.find(|session| !session.is_over())
    }

    /// The highest token that this client has seen.
    pub(crate) fn saw(&self, token: u64) {
        self.seen.fetch_max(token, Ordering::AcqRel);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing here panics while holding a mutex.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
