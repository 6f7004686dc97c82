//! How often to ask for a lock that is busy.

use std::time::Duration;

/// A number of attempts with pauses between them, for [`LockRequest::retry`](crate::LockRequest::retry).
///
/// ```
/// use std::time::Duration;
/// use fencelock::{Locks, MemoryLock, Retry};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), fencelock::LockError> {
/// let locks = Locks::new(MemoryLock::new());
/// let retry = Retry::new(32, Duration::from_millis(100)).jitter(Duration::from_millis(100));
/// let guard = locks.lock("stock/10000").retry(retry).await?;
/// # drop(guard);
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct Retry {
    pub(crate) attempts: u32,
    pause: Duration,
    jitter: Duration,
}

impl Retry {
    /// Asks up to `attempts` times, with `pause` between two attempts. Zero attempts count as one.
    pub fn new(attempts: u32, pause: Duration) -> Self {
        Self {
            attempts,
            pause,
            jitter: Duration::ZERO,
        }
    }

    /// Makes each pause longer, by a random time of up to `jitter`, so that clients that began together do not ask together.
    pub fn jitter(mut self, jitter: Duration) -> Self {
        self.jitter = jitter;
        self
    }

    pub(crate) fn next_pause(&self) -> Duration {
        self.pause.saturating_add(self.jitter.mul_f64(fastrand::f64()))
    }
}
