//! Locks that a number of clients hold at once.

use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::request::LockRequest;
use crate::{LockError, LockGuard, LockName, Locks, LossSignal, Mode, OwnerId, ReleaseOutcome, Renew};

impl Locks {
    /// Asks for one of `permits` permits of a name: as many holders as that are admitted at once. For work that a resource bears in a limited number, such as
    /// calls of an API that counts them.
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
    /// A permit has no token: several are valid at once, and at a resource they would refuse each other. Everything else is as for a
    /// [lock](Locks::lock): its ttl, its wait, renewal and loss.
    ///
    /// While a name is used as a semaphore, it has one number of permits: a request with another one, and a request for a lock of that name,
    /// end with [`LockError::InvalidMode`]. [`LockError::NotSupported`] where the backend has no [permits](crate::Capabilities::permits), and
    /// [`LockError::Configuration`] for no permit at all.
    pub fn semaphore(&self, name: impl AsRef<str>, permits: u32) -> SemaphoreRequest {
        SemaphoreRequest(self.lock(name).mode(Mode::Permit { of: permits }))
    }
}

/// A request for a permit: set what matters, then await it. Made by [`Locks::semaphore`]; what it sets is documented at [`LockRequest`].
#[must_use = "a request does nothing until it is awaited"]
#[derive(Clone, Debug)]
pub struct SemaphoreRequest(LockRequest);

impl SemaphoreRequest {
    /// As [`LockRequest::ttl`].
    pub fn ttl(self, ttl: Duration) -> Self {
        Self(self.0.ttl(ttl))
    }

    /// As [`LockRequest::wait_for`].
    pub fn wait_for(self, limit: Duration) -> Self {
        Self(self.0.wait_for(limit))
    }

    /// As [`LockRequest::wait_forever`].
    pub fn wait_forever(self) -> Self {
        Self(self.0.wait_forever())
    }

    /// As [`LockRequest::no_wait`].
    pub fn no_wait(self) -> Self {
        Self(self.0.no_wait())
    }

    /// As [`LockRequest::label`].
    pub fn label(self, label: impl Into<Arc<str>>) -> Self {
        Self(self.0.label(label))
    }

    /// As [`LockRequest::renew`].
    pub fn renew(self, renew: Renew) -> Self {
        Self(self.0.renew(renew))
    }

    /// As [`LockRequest::max_hold`].
    pub fn max_hold(self, limit: Duration) -> Self {
        Self(self.0.max_hold(limit))
    }

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

impl Permit {
    /// The name of the semaphore, with all scopes.
    #[must_use]
    pub fn name(&self) -> &LockName {
        self.0.name()
    }

    /// As [`LockGuard::owner`].
    #[must_use]
    pub fn owner(&self) -> OwnerId {
        self.0.owner()
    }

    /// As [`LockGuard::ttl`].
    #[must_use]
    pub fn ttl(&self) -> Duration {
        self.0.ttl()
    }

    /// As [`LockGuard::remaining`].
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.0.remaining()
    }

    /// As [`LockGuard::is_held`].
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.0.is_held()
    }

    /// As [`LockGuard::lost`].
    #[must_use]
    pub fn lost(&self) -> LossSignal {
        self.0.lost()
    }

    /// As [`LockGuard::cancellation_token`].
    #[must_use]
    pub fn cancellation_token(&self) -> CancellationToken {
        self.0.cancellation_token()
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
