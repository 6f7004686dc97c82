//! The same locks for code without a runtime: every call blocks its thread until it has its answer.
//!
//! ```
//! # #[cfg(feature = "memory")] {
//! use std::time::Duration;
//! use fencelock::blocking;
//!
//! let locks = blocking::connect("memory:")?;
//! let guard = locks.lock("stock/10000").wait_for(Duration::from_secs(5)).acquire()?;
//! println!("write with token {}", guard.token());
//! guard.release()?;
//! # }
//! # Ok::<(), fencelock::LockError>(())
//! ```
//!
//! Leases are renewed on the [background thread](crate::backend::background), whatever the caller's thread does. Renewals, losses,
//! tokens and errors are those of [`crate::Locks`], which [`Locks::get_ref`] gives.
//!
//! In a task of an asynchronous runtime, use [`crate::Locks`]: a call from here would block a worker of the runtime. On a thread that may
//! block, such as one of `tokio::task::spawn_blocking`, both will do.

use std::future::IntoFuture;
use std::sync::Arc;
use std::time::Duration;

use pollster::block_on;

use crate::{FencingToken, Holder, LockError, LockName, LossReason, Options, OwnerId, ReleaseOutcome, Renew, Retry};

/// Connects to the backend at that address. See [`crate::connect`].
///
/// # Errors
///
/// As [`crate::connect`].
pub fn connect(url: impl AsRef<str>) -> Result<Locks, LockError> {
    connect_with(url, Options::new())
}

/// Connects to the backend at that address with those options. See [`crate::connect_with`].
///
/// # Errors
///
/// As [`crate::connect_with`].
pub fn connect_with(url: impl AsRef<str>, options: Options) -> Result<Locks, LockError> {
    block_on(crate::connect_with(url, options)).map(Locks::from)
}

/// A client whose calls block. Cheap to clone; see [`crate::Locks`].
#[derive(Clone, Debug)]
pub struct Locks(crate::Locks);

impl From<crate::Locks> for Locks {
    fn from(locks: crate::Locks) -> Self {
        Self(locks)
    }
}

impl Locks {
    /// The client for asynchronous code that this one blocks for. They share everything.
    #[must_use]
    pub fn get_ref(&self) -> &crate::Locks {
        &self.0
    }

    /// Asks for a lock. Set what matters on the request, then [acquire](LockRequest::acquire) it.
    pub fn lock(&self, name: impl AsRef<str>) -> LockRequest {
        LockRequest(self.0.lock(name))
    }

    /// The lock if it is free now, otherwise `None`. See [`crate::Locks::try_lock`].
    ///
    /// # Errors
    ///
    /// As [`crate::Locks::try_lock`].
    pub fn try_lock(&self, name: impl AsRef<str>) -> Result<Option<LockGuard>, LockError> {
        Ok(block_on(self.0.try_lock(name))?.map(LockGuard))
    }

    /// A view in which every name has `scope` and a `/` in front. See [`crate::Locks::scoped`].
    #[must_use]
    pub fn scoped(&self, scope: impl AsRef<str>) -> Self {
        Self(self.0.scoped(scope))
    }

    /// The holder of the lock, as far as the server can tell. See [`crate::Locks::holder`].
    ///
    /// # Errors
    ///
    /// As [`crate::Locks::holder`].
    pub fn holder(&self, name: impl AsRef<str>) -> Result<Option<Holder>, LockError> {
        block_on(self.0.holder(name))
    }

    /// Everything that is held under names that start with `prefix`. See [`crate::Locks::list`].
    ///
    /// # Errors
    ///
    /// As [`crate::Locks::list`].
    pub fn list(&self, prefix: impl AsRef<str>) -> Result<Vec<Holder>, LockError> {
        block_on(self.0.list(prefix))
    }

    /// Runs `body` under the lock, unless it has been run within nine tenths of `period`. See [`crate::Locks::run_once_per`]. As with
    /// [`LockRequest::with`], `body` is not cancelled when the lock is lost.
    ///
    /// # Errors
    ///
    /// As [`crate::Locks::run_once_per`].
    pub fn run_once_per<T>(
        &self,
        name: impl AsRef<str>,
        period: Duration,
        body: impl FnOnce(&crate::LockGuard) -> T,
    ) -> Result<Option<T>, LockError> {
        block_on(self.0.run_once_per(name, period, async |guard| body(guard)))
    }

    /// Waits until no release of this client is under way. See [`crate::Locks::drain`].
    pub fn drain(&self) {
        block_on(self.0.drain());
    }

    /// Ends the client, for all its clones. See [`crate::Locks::shutdown`].
    ///
    /// # Errors
    ///
    /// As [`crate::Locks::shutdown`].
    pub fn shutdown(&self) -> Result<(), LockError> {
        block_on(self.0.shutdown())
    }
}

/// A lock that is asked for. Made by [`Locks::lock`]; nothing happens before it is [acquired](Self::acquire).
#[must_use = "a lock request does nothing until it is acquired"]
#[derive(Clone, Debug)]
pub struct LockRequest(crate::LockRequest);

impl LockRequest {
    /// See [`crate::LockRequest::ttl`].
    pub fn ttl(self, ttl: Duration) -> Self {
        Self(self.0.ttl(ttl))
    }

    /// Waits at most that long. See [`crate::LockRequest::wait_for`].
    pub fn wait_for(self, limit: Duration) -> Self {
        Self(self.0.wait_for(limit))
    }

    /// Waits as long as it takes. The default.
    pub fn wait_forever(self) -> Self {
        Self(self.0.wait_forever())
    }

    /// Does not wait for a holder. See [`crate::LockRequest::no_wait`].
    pub fn no_wait(self) -> Self {
        Self(self.0.no_wait())
    }

    /// Asks a number of times. See [`crate::LockRequest::retry`].
    pub fn retry(self, retry: Retry) -> Self {
        Self(self.0.retry(retry))
    }

    /// A text for people. See [`crate::LockRequest::label`].
    pub fn label(self, label: impl Into<Arc<str>>) -> Self {
        Self(self.0.label(label))
    }

    /// Whether the lock is kept alive while it is held.
    pub fn renew(self, renew: Renew) -> Self {
        Self(self.0.renew(renew))
    }

    /// Ends the lock that long after the grant. See [`crate::LockRequest::max_hold`].
    pub fn max_hold(self, limit: Duration) -> Self {
        Self(self.0.max_hold(limit))
    }

    /// Keeps the name taken for at least that long after the grant. See [`crate::LockRequest::at_least`].
    pub fn at_least(self, length: Duration) -> Self {
        Self(self.0.at_least(length))
    }

    /// Blocks until the lock is held or the wait is over.
    ///
    /// # Errors
    ///
    /// As when awaiting [`crate::LockRequest`].
    pub fn acquire(self) -> Result<LockGuard, LockError> {
        block_on(self.0.into_future()).map(LockGuard)
    }

    /// Runs `body` under the lock and releases it afterwards. Unlike asynchronous code, `body` is not cancelled when the lock is lost: a
    /// long one looks at [`LockGuard::is_held`].
    ///
    /// # Errors
    ///
    /// Whatever acquiring can end with; [`LockError::Lost`] if the lock was lost before `body` ended. A failed release is no error, as
    /// the server frees the lock when its ttl is over.
    pub fn with<T>(self, body: impl FnOnce(&crate::LockGuard) -> T) -> Result<T, LockError> {
        block_on(self.0.with(async |guard| body(guard)))
    }
}

/// A lock that is held, and renewed until it is released, dropped or lost. See [`crate::LockGuard`].
///
/// Dropping it releases in the background; a program that returns from `main` waits for that.
#[must_use = "dropping a guard releases its lock at once"]
#[derive(Debug)]
pub struct LockGuard(crate::LockGuard);

impl LockGuard {
    /// The guard for asynchronous code that this one blocks for.
    pub fn get_ref(&self) -> &crate::LockGuard {
        &self.0
    }

    /// The fencing token of this grant. It never changes.
    #[must_use]
    pub fn token(&self) -> FencingToken {
        self.0.token()
    }

    /// The name that is locked, with all scopes.
    #[must_use]
    pub fn name(&self) -> &LockName {
        self.0.name()
    }

    /// The identifier of this acquisition. See [`crate::LockGuard::owner`].
    #[must_use]
    pub fn owner(&self) -> OwnerId {
        self.0.owner()
    }

    /// How long the server keeps the lock after the last sign of life.
    #[must_use]
    pub fn ttl(&self) -> Duration {
        self.0.ttl()
    }

    /// How long the lock is certain to be held if it is not renewed from now on. Zero once it is lost.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.0.remaining()
    }

    /// Whether the lock can still be believed in. See [`crate::LockGuard::is_held`].
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.0.is_held()
    }

    /// Blocks until the lock is lost, for a thread that watches it.
    #[must_use]
    pub fn wait_lost(&self) -> LossReason {
        block_on(self.0.lost().wait())
    }

    /// Renews now instead of at the next third of the ttl. See [`crate::LockGuard::renew_now`].
    ///
    /// # Errors
    ///
    /// As [`crate::LockGuard::renew_now`].
    pub fn renew_now(&self) -> Result<(), LockError> {
        block_on(self.0.renew_now())
    }

    /// Releases the lock and waits for the server's answer. See [`crate::LockGuard::release`].
    ///
    /// # Errors
    ///
    /// As [`crate::LockGuard::release`].
    pub fn release(self) -> Result<ReleaseOutcome, LockError> {
        block_on(self.0.release())
    }
}
