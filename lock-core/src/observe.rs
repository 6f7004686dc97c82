//! Observing who holds a lock, such as the leader.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_core::Stream;
use futures_core::future::BoxFuture;
use futures_util::FutureExt;
use futures_util::stream::StreamExt;

use crate::{Holder, InvalidName, LockError, LockName, Locks, Stamp};

impl Locks {
    /// Observes who holds the lock, such as the [leader](crate::LockRequest::lead).
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), fencelock::LockError> {
    /// use fencelock::{Leadership, Locks, MemoryLock};
    ///
    /// let locks = Locks::new(MemoryLock::new());
    /// let guard = locks.lock("leader").label("host 7").await?;
    /// let mut leaders = locks.observe("leader");
    /// while let Some(leadership) = leaders.next().await {
    ///     match leadership? {
    ///         Leadership::Held(leader) => println!("{leader} leads"),
    ///         _ => println!("no one leads"),
    ///     }
    /// #   break;
    /// }
    /// # drop(guard);
    /// # Ok(()) }
    /// ```
    ///
    /// Nothing is sent before [`Observation::next`] is awaited. From then on the server is asked once a second, or as often as
    /// [`Observation::every`] says. A leader that died is shown until its lease is over, on Redis and SQLite until what it has
    /// [reserved](crate::LockRequest::at_least) is over. Holders of one client that follow each other without a request are shown as one.
    #[must_use]
    pub fn observe(&self, name: impl AsRef<str>) -> Observation {
        Observation {
            name: self.full_name(name.as_ref()),
            locks: self.clone(),
            interval: Observation::DEFAULT_INTERVAL,
            next_look: None,
            look: None,
            seen: None,
            has_ended: false,
        }
    }
}

/// Who holds an observed lock.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Leadership {
    /// No client holds it. It may still be [reserved](Holder::is_reserved).
    Vacant,
    /// This one does.
    Held(Holder),
}

impl Leadership {
    /// The holder, if there is one.
    #[must_use]
    pub fn holder(&self) -> Option<&Holder> {
        match self {
            Self::Vacant => None,
            Self::Held(holder) => Some(holder),
        }
    }
}

/// [`Stream`] of the holders of a lock, one after the other. Made by [`Locks::observe`].
///
/// An item may be outdated when it is read: never base a write on it, only on the token of the writer's own grant.
///
/// The first item is the present holder; each further one is another holder, or an error. A holder that has come and gone between two requests
/// is skipped. After an error that is [worth a retry](LockError::is_retryable) the stream continues; after any other it ends.
pub struct Observation {
    name: Result<LockName, InvalidName>,
    locks: Locks,
    interval: Duration,
    next_look: Option<Stamp>,
    /// The look that is under way.
    look: Option<BoxFuture<'static, Result<Leadership, LockError>>>,
    /// What was returned last, unless an error has come since.
    seen: Option<Leadership>,
    has_ended: bool,
}

impl Observation {
    /// Time between two requests unless [`every`](Self::every) sets another one: 1 s.
    pub const DEFAULT_INTERVAL: Duration = Duration::from_secs(1);
    /// Shortest time between two requests: 10 ms.
    pub const MIN_INTERVAL: Duration = Duration::from_millis(10);

    /// Sets the time between two requests, at least [`MIN_INTERVAL`](Self::MIN_INTERVAL).
    #[must_use]
    pub fn every(mut self, interval: Duration) -> Self {
        self.interval = interval.max(Self::MIN_INTERVAL);
        self
    }

    /// Waits for the next item of the stream; `None` if it has ended.
    ///
    /// # Errors
    ///
    /// [`LockError::NotSupported`] where the backend cannot tell holders, [`LockError::Unavailable`] if it failed or has not responded within
    /// [`Options::op_timeout`](crate::Options::op_timeout).
    ///
    /// # Cancellation
    ///
    /// Dropping the future loses nothing.
    pub async fn next(&mut self) -> Option<Result<Leadership, LockError>> {
        StreamExt::next(self).await
    }

    /// Waits until `due`, and asks who holds the lock.
    fn look(&self, due: Option<Stamp>) -> impl Future<Output = Result<Leadership, LockError>> + Send + 'static {
        let (name, core) = (self.name.clone(), Arc::clone(&self.locks.core));
        async move {
            let name = name?;
            if let Some(due) = due {
                let pause = core.sleep(due.since(core.clock.now()));
                pause.await.map_err(|error| error.of(&name))?;
            }
            let (looks, asked) = (Arc::clone(&core), name.clone());
            let holders = core.call("asking who holds a lock", async move {
                // The limit of the call includes the wait for the turn. The semaphore is never closed.
                let _turn = looks.looks.acquire().await.ok();
                looks.backend.holders(&asked).await
            });
            let holders = holders.await.map_err(|error| error.of(&name))?;
            // A name that is only reserved has no holder.
            let holder = holders.into_iter().find(|holder| !holder.is_reserved);
            Ok(holder.map_or(Leadership::Vacant, Leadership::Held))
        }
    }
}

impl Stream for Observation {
    type Item = Result<Leadership, LockError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        while !self.has_ended {
            let mut look = match self.look.take() {
                Some(look) => look,
                None => {
                    let due = self.next_look;
                    let now = self.locks.core.clock.now();
                    self.next_look = Some(due.unwrap_or(now).max(now) + self.interval);
                    self.look(due).boxed()
                }
            };
            let Poll::Ready(seen) = look.poll_unpin(cx) else {
                self.look = Some(look);
                return Poll::Pending;
            };
            let leadership = match seen {
                Ok(leadership) if self.seen.as_ref().is_some_and(|seen| is_same(seen, &leadership)) => continue,
                Ok(leadership) => leadership,
                Err(error) => {
                    self.has_ended = !error.is_retryable();
                    return Poll::Ready(Some(Err(error)));
                }
            };
            self.seen = Some(leadership.clone());
            return Poll::Ready(Some(Ok(match leadership {
                Leadership::Held(holder) => Leadership::Held(self.locks.seen_from_here(holder)),
                vacant => vacant,
            })));
        }
        Poll::Ready(None)
    }
}

/// Whether both are the same acquisition.
fn is_same(a: &Leadership, b: &Leadership) -> bool {
    match (a.holder(), b.holder()) {
        (None, None) => true,
        // A holder that could not be asked in time is known by its session alone.
        (Some(a), Some(b)) if b.token.is_none() && b.owner.is_none() && a.token.is_some() => true,
        (Some(a), Some(b)) => (a.owner, a.token, a.pid, &a.host) == (b.owner, b.token, b.pid, &b.host),
        _ => false,
    }
}

impl fmt::Debug for Observation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Observation").finish_non_exhaustive()
    }
}
