//! How many releases a client has under way at once.

use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::LockError;
use crate::sync::time::timeout;
use crate::sync::{Semaphore, SemaphorePermit};

/// Enough to keep a server busy. Each backend works on its requests one after the other in the end, and a request that waits there
/// uses up its own time limit: with thousands at once most would run out of time.
pub(crate) const FIRST_ATTEMPTS: usize = 128;

/// Repeated releases have slots of their own, so that those that fail again and again, as on one hung session, do not delay the
/// releases of other locks.
pub(crate) const RETRIES: usize = 16;

/// Bounds the releases that are under way, so that the time limit of each counts from its sending.
#[derive(Debug)]
pub(crate) struct ReleaseSlots {
    free: Semaphore,
    /// How many releases were answered so far.
    answered: AtomicU64,
}

impl ReleaseSlots {
    pub(crate) fn new(count: usize) -> Self {
        Self {
            free: Semaphore::new(count),
            answered: AtomicU64::new(0),
        }
    }

    /// Waits for a slot, for as long as other releases are answered. The slot is free again when the result is dropped.
    ///
    /// # Errors
    ///
    /// [`LockError::Unavailable`] if no release was answered for `limit`.
    pub(crate) async fn take(&self, limit: Duration) -> Result<SemaphorePermit<'_>, LockError> {
        let mut free = pin!(self.free.acquire());
        loop {
            let before = self.answered.load(Ordering::Relaxed);
            match timeout(limit, &mut free).await {
                Ok(slot) => return slot.map_err(|_| LockError::closed()),
                Err(_) if self.answered.load(Ordering::Relaxed) != before => {}
                Err(_) => return Err(LockError::no_answer("release", limit)),
            }
        }
    }

    /// The server answered a release.
    pub(crate) fn answered(&self) {
        self.answered.fetch_add(1, Ordering::Relaxed);
    }
}
