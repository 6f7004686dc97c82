//! Observing who holds a lock, such as the leader.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::{Changes, Holder, LockError, LockName, Locks, Stamp};

/// Between two looks where the server does not push.
const POLL: Duration = Duration::from_millis(250);
/// Between two looks where it does: a push can be lost.
const CHECK: Duration = Duration::from_secs(5);
/// Before the next look after one that failed.
const RETRY: Duration = Duration::from_secs(1);

impl Locks {
    /// Observes who holds the lock: the leader, if it is one that clients [lead](crate::LockRequest::lead) with.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), fencelock::LockError> {
    /// use fencelock::{Locks, MemoryLock};
    ///
    /// let locks = Locks::new(MemoryLock::new());
    /// let mut leaders = locks.observe("leader");
    /// assert!(leaders.next().await?.is_none());
    ///
    /// let guard = locks.lock("leader").label("host 7").await?;
    /// let leader = leaders.next().await?;
    /// assert_eq!(leader.and_then(|leader| leader.label).as_deref(), Some("host 7"));
    /// # drop(guard);
    /// # Ok(()) }
    /// ```
    ///
    /// Nothing happens before [`Observation::next`] is awaited. etcd pushes every change of the holder. On Redis and Postgres a leader pushes that
    /// it leads, and that its term has ended by itself; other changes, such as the end of a leader that lost its lock, and of locks
    /// that are not led, are noticed within 5 s. A leader that died is shown until its lease is over, on Redis and SQLite until what it
    /// has [reserved](crate::LockRequest::at_least) is over. SQLite and the backend in memory are asked 4 times a second.
    #[must_use]
    pub fn observe(&self, name: impl AsRef<str>) -> Observation {
        Observation {
            name: self.full_name(name.as_ref()).map_err(Arc::new),
            locks: self.clone(),
            pushes: Pushes::Unknown,
            seen: None,
            state: State::Look,
        }
    }
}

/// The holders of a lock, one after the other. Made by [`Locks::observe`].
///
/// It shows what was true a moment ago: never base a write on it, only the token of the writer's own grant.
pub struct Observation {
    name: Result<LockName, Arc<LockError>>,
    locks: Locks,
    pushes: Pushes,
    /// What was returned last; the outer `None` before that.
    seen: Option<Option<Holder>>,
    state: State,
}

enum Pushes {
    /// Not asked for, or ended.
    Unknown,
    Some(Changes),
    /// The server does not push.
    None,
}

#[derive(Clone, Copy, Debug)]
enum State {
    /// There may be news.
    Look,
    /// There is none before a change or before that time. Not a length, which a caller that drops the future early would begin anew.
    WaitUntil(Stamp),
}

impl Observation {
    /// Returns the holder at present when it is called for the first time, and from then on waits for another one: `None` when the name is
    /// free. A holder that has come and gone between two calls is skipped.
    ///
    /// # Errors
    ///
    /// [`LockError::NotSupported`] where the backend cannot tell holders, [`LockError::Unavailable`] if it failed: what was returned
    /// before may not be true any more. The next call asks again, after a pause of 1 s.
    ///
    /// # Cancellation
    ///
    /// Dropping the future loses nothing.
    pub async fn next(&mut self) -> Result<Option<Holder>, LockError> {
        let name = self.name.clone().map_err(Arc::unwrap_or_clone)?;
        loop {
            if let State::WaitUntil(time) = self.state {
                self.wait(time).await.map_err(|error| error.of(&name))?;
                self.state = State::Look;
            }
            let holder = match self.look(&name).await {
                Ok(holder) => holder,
                Err(error) => {
                    self.pushes = Pushes::Unknown;
                    self.state = State::WaitUntil(self.locks.core.clock.now() + RETRY);
                    return Err(error.of(&name));
                }
            };
            let remaining = holder.as_ref().and_then(|holder| holder.remaining);
            let longest = match self.pushes {
                Pushes::Some(_) => CHECK,
                _ => POLL,
            };
            // A lease that ends is pushed by no server.
            let pause = remaining.map_or(longest, |left| left.max(POLL).min(longest));
            self.state = State::WaitUntil(self.locks.core.clock.now() + pause);
            let is_news = match &self.seen {
                Some(seen) => !is_same(seen.as_ref(), holder.as_ref()),
                None => true,
            };
            if is_news {
                self.seen = Some(holder.clone());
                return Ok(holder.map(|holder| self.locks.seen_from_here(holder)));
            }
        }
    }

    /// Asks who holds the lock. Listens before, so that no change after the answer is missed.
    async fn look(&mut self, name: &LockName) -> Result<Option<Holder>, LockError> {
        let core = &self.locks.core;
        core.process.check()?;
        // A change wakes all observers of a name at once. The semaphore is never closed.
        let _slot = core.looks.acquire().await.ok();
        if matches!(self.pushes, Pushes::Unknown) {
            let (backend, name) = (Arc::clone(&core.backend), name.clone());
            let changes = core
                .call("listening", async move { backend.changes(&name).await })
                .await?;
            self.pushes = changes.map_or(Pushes::None, Pushes::Some);
        }
        let (backend, name) = (Arc::clone(&core.backend), name.clone());
        let holder = core.call("holder", async move { backend.holder(&name).await }).await?;
        // A name that is only reserved has no holder.
        Ok(holder.filter(|holder| !holder.is_reserved))
    }

    async fn wait(&mut self, until: Stamp) -> Result<(), LockError> {
        let core = &self.locks.core;
        let pause = core.sleep(until.since(core.clock.now()));
        let Pushes::Some(changes) = &mut self.pushes else {
            return pause.await;
        };
        tokio::select! {
            biased;
            change = changes.next() => {
                if change.is_none() {
                    self.pushes = Pushes::Unknown;
                }
                Ok(())
            }
            slept = pause => slept,
        }
    }
}

/// Whether both are the same acquisition.
fn is_same(a: Option<&Holder>, b: Option<&Holder>) -> bool {
    match (a, b) {
        (None, None) => true,
        // A holder that could not be asked in time is known by its session alone.
        (Some(a), Some(b)) if b.token.is_none() && b.owner.is_none() && a.token.is_some() => true,
        (Some(a), Some(b)) => (a.owner, a.token, a.pid, &a.host) == (b.owner, b.token, b.pid, &b.host),
        _ => false,
    }
}

impl fmt::Debug for Observation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Observation")
            .field("name", &self.name)
            .field("seen", &self.seen)
            .finish_non_exhaustive()
    }
}
