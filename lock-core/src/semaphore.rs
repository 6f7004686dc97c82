//! Semaphores.

use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::request::{LockRequest, sets_as_a_lock_request};
use crate::{LockError, LockGuard, LockName, Locks, LossSignal, Mode, OwnerId, ReleaseOutcome, Renew};

impl Locks {
    /// Returns a request for one of `permits` permits of a name, which as many holders have at once. For work that a resource can do a limited
    /// number of times at once, such as calls of an API.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), fencelock::LockError> {
    /// use fencelock::{Locks, MemoryLock};
    ///
    /// let locks = Locks::new(MemoryLock::new());
    /// let first = locks.semaphore("api", 2).await?;
    /// let second = locks.semaphore("api", 2).await?;
    /// assert!(locks.semaphore("api", 2).no_wait().await.unwrap_err().is_busy());
    /// first.release().await?;
    /// second.release().await?;
    /// # Ok(()) }
    /// ```
    ///
    /// A permit has no token: several are valid at once, and a resource would refuse the older ones. Its ttl, wait, renewal and loss are those
    /// of a [lock](Locks::lock).
    ///
    /// While a name is used as a semaphore, it has one number of permits: a request with another number, and a request for a lock of that name,
    /// fail with [`LockError::InvalidMode`]. [`LockError::NotSupported`] where the backend has no [permits](crate::Capabilities::permits), and
    /// [`LockError::Configuration`] for zero permits.
    pub fn semaphore(&self, name: impl AsRef<str>, permits: u32) -> SemaphoreRequest {
        SemaphoreRequest(self.lock(name).mode(Mode::Permit { of: permits }))
    }
}

/// A request for a permit: set what matters, then await it. Made by [`Locks::semaphore`]. [`LockRequest`] documents its settings.
#[must_use = "a request does nothing until it is awaited"]
#[derive(Clone, Debug)]
pub struct SemaphoreRequest(LockRequest);

sets_as_a_lock_request!(SemaphoreRequest, 0);

impl SemaphoreRequest {
    /// As [`LockRequest::acquire_blocking`].
    ///
    /// # Errors
    ///
    /// As when awaiting the request, and as [`LockRequest::acquire_blocking`].
    #[track_caller]
    pub fn acquire_blocking(self) -> Result<Permit, LockError> {
        self.0.acquire_blocking().map(Permit)
    }

    /// Runs `body` with a permit, as [`LockRequest::with`].
    ///
    /// # Errors
    ///
    /// As [`LockRequest::with`].
    pub async fn with<F: AsyncFnOnce() -> T, T>(self, body: F) -> Result<T, LockError> {
        self.0.with(async |_| body().await).await
    }
}

impl IntoFuture for SemaphoreRequest {
    type Output = Result<Permit, LockError>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move { self.0.await.map(Permit) })
    }
}

/// A permit of a semaphore, renewed until it is released, dropped or lost. Dropping it releases in the background.
#[must_use = "dropping a permit releases it at once"]
#[derive(Debug)]
pub struct Permit(LockGuard);

/// Methods that are those of the guard.
macro_rules! as_a_guard {
    ($($name:ident -> $type:ty),+ $(,)?) => {$(
        #[doc = concat!("As [`LockGuard::", stringify!($name), "`].")]
        #[must_use]
        pub fn $name(&self) -> $type {
            self.0.$name()
        }
    )+};
}

impl Permit {
    as_a_guard! {
        name -> &LockName,
        owner -> OwnerId,
        ttl -> Duration,
        remaining -> Duration,
        is_held -> bool,
        lost -> LossSignal,
        cancellation_token -> CancellationToken,
    }

    /// As [`LockGuard::run`].
    ///
    /// # Errors
    ///
    /// As [`LockGuard::run`].
    pub async fn run<F: Future>(&self, work: F) -> Result<F::Output, LockError> {
        self.0.run(work).await
    }

    /// As [`LockGuard::renew_now`].
    ///
    /// # Errors
    ///
    /// As [`LockGuard::renew_now`].
    pub async fn renew_now(&self) -> Result<(), LockError> {
        self.0.renew_now().await
    }

    /// As [`LockGuard::release`].
    ///
    /// # Errors
    ///
    /// As [`LockGuard::release`].
    pub async fn release(self) -> Result<ReleaseOutcome, LockError> {
        self.0.release().await
    }

    /// As [`LockGuard::release_blocking`].
    ///
    /// # Errors
    ///
    /// As [`LockGuard::release`].
    #[track_caller]
    pub fn release_blocking(self) -> Result<ReleaseOutcome, LockError> {
        self.0.release_blocking()
    }
}
