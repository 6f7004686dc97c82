//! Several locks, held together.

use std::collections::BTreeSet;
use std::fmt;
use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;

use crate::guard::{LockGuard, first_loss, run_while_held};
use crate::request::{LockRequest, release_held, sets_as_a_lock_request};
use crate::{FencingToken, InvalidName, LockError, LockName, Locks, LossReason, Renew};

/// A request for several locks: set what matters, then await it. Made by [`Locks::lock_all`].
///
/// Nothing is sent before it is awaited. Its settings apply to each of the locks, except the wait, which is one for all of them together.
#[must_use = "a lock request does nothing until it is awaited"]
#[derive(Clone, Debug)]
pub struct LockAllRequest {
    names: Result<Vec<LockName>, InvalidName>,
    /// The request for each of the locks, without its name.
    settings: LockRequest,
}

impl Locks {
    /// Returns a request for the locks of all `names`: all or none.
    ///
    /// They are acquired one after the other, in an order that all clients share, so that requests cannot deadlock, unless a caller awaits one
    /// while it holds locks of another. A name that is given twice counts once.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), fencelock::LockError> {
    /// use fencelock::{Locks, MemoryLock};
    ///
    /// let locks = Locks::new(MemoryLock::new());
    /// let accounts = locks.lock_all(["account/2", "account/1"]).await?;
    /// assert!(locks.try_lock("account/1").await?.is_none());
    /// println!("write to account 2 with token {:?}", accounts.token("account/2"));
    /// accounts.release().await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// As when awaiting [`lock`](Self::lock), about the first name that could not be locked; [`LockError::Lost`] if one of the locks was lost
    /// during the wait for the next one. None is held then.
    ///
    /// # Cancellation
    ///
    /// Dropping the future releases, in the background, the locks that it has acquired.
    pub fn lock_all<N: AsRef<str>>(&self, names: impl IntoIterator<Item = N>) -> LockAllRequest {
        let names = names.into_iter().map(|name| self.full_name(name.as_ref())).collect();
        LockAllRequest {
            settings: self.lock(""),
            names,
        }
    }
}

sets_as_a_lock_request!(LockAllRequest, settings);

impl LockAllRequest {
    /// As [`LockRequest::shared`], for each of the locks.
    pub fn shared(mut self) -> Self {
        self.settings = self.settings.shared();
        self
    }

    /// Runs `body` under all of the locks and releases them afterwards. If one is lost, `body` is dropped at its next await.
    ///
    /// # Errors
    ///
    /// As [`LockRequest::with`].
    pub async fn with<F, T>(self, body: F) -> Result<T, LockError>
    where
        F: AsyncFnOnce(&LockGuards) -> T,
    {
        let guards = self.await?;
        let value = guards.run(body(&guards)).await?;
        match guards.release().await {
            Err(lost @ LockError::Lost { .. }) => Err(lost),
            // The server frees the locks when their ttl is over.
            Ok(()) | Err(_) => Ok(value),
        }
    }

    async fn acquire(self) -> Result<LockGuards, LockError> {
        let names = self.names?;
        let locks = &self.settings.locks;
        let started = locks.core.clock.now();
        // Each once, and in the same order everywhere, so that no two requests wait for each other.
        let names: BTreeSet<_> = names.into_iter().collect();
        let mut all = LockGuards {
            locks: locks.clone(),
            guards: Vec::with_capacity(names.len()),
        };
        for name in names {
            let request = self.settings.for_name(name, started);
            // The loss of a lock that is held so far ends the request.
            let next = run_while_held(&all.guards, request.into_future()).await?;
            all.guards.push(next.map_err(|error| match self.settings.waits() {
                true => error.after(locks.core.clock.now().since(started)),
                false => error,
            })?);
        }
        Ok(all)
    }
}

impl IntoFuture for LockAllRequest {
    type Output = Result<LockGuards, LockError>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.acquire())
    }
}

/// Several locks that are held together. They count as lost when one of them is lost; the others stay held until this is released or dropped.
/// Dropping it releases all in the background.
#[must_use = "dropping guards releases their locks at once"]
pub struct LockGuards {
    /// The scope of the names.
    locks: Locks,
    guards: Vec<LockGuard>,
}

impl LockGuards {
    /// Returns the fencing token of the name, spelt as for [`Locks::lock_all`]; `None` if it is not among these. Each lock has its own token:
    /// send that of the resource that is written to.
    #[must_use]
    pub fn token(&self, name: impl AsRef<str>) -> Option<FencingToken> {
        let name = self.locks.full_name(name.as_ref()).ok()?;
        self.iter().find(|(held, _)| **held == name).map(|(_, token)| token)
    }

    /// Returns the names, with all scopes, and their fencing tokens.
    pub fn iter(&self) -> impl Iterator<Item = (&LockName, FencingToken)> {
        self.guards.iter().map(|guard| (guard.name(), guard.token()))
    }

    /// Returns whether all of them are held. See [`LockGuard::is_held`].
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.guards.iter().all(LockGuard::is_held)
    }

    /// Returns how long all of them stay held without another renewal. See [`LockGuard::remaining`].
    #[must_use]
    pub fn remaining(&self) -> Duration {
        let remaining = self.guards.iter().map(LockGuard::remaining);
        remaining.min().unwrap_or(Duration::MAX)
    }

    /// Waits until one of them is lost, and returns its name and the reason. Never completes without locks. Cancellation-safe.
    pub async fn lost(&self) -> (LockName, LossReason) {
        let (at, reason) = first_loss(self.guards.iter().map(LockGuard::lost)).await;
        (self.guards[at].name().clone(), reason)
    }

    /// Runs `work` for as long as all of them are held. See [`LockGuard::run`].
    ///
    /// # Errors
    ///
    /// [`LockError::Lost`] with the name of the first one that was lost.
    pub async fn run<F: Future>(&self, work: F) -> Result<F::Output, LockError> {
        run_while_held(&self.guards, work).await
    }

    /// Releases all of them, at once, and waits for the responses of the server.
    ///
    /// # Errors
    ///
    /// [`LockError::Lost`] if one had been lost before; else [`LockError::Unavailable`] if the server did not respond. The releases are
    /// retried in the background.
    ///
    /// # Cancellation
    ///
    /// Dropping the future stops no release.
    pub async fn release(self) -> Result<(), LockError> {
        let releases = self.guards.into_iter().map(release_held);
        let failures = join_all(releases).await.into_iter().filter_map(Result::err);
        // A loss comes first.
        let failure = failures.min_by_key(|error| !matches!(error, LockError::Lost { .. }));
        failure.map_or(Ok(()), Err)
    }
}

impl fmt::Debug for LockGuards {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.guards).finish()
    }
}
