//! The wait that the trait provides.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use lock_core::{Attempt, Capabilities, Claim, DistributedLock, Lease, LockError, Released, Renewal, Scope, Wait};

/// Only what is required, busy for a number of tries.
#[derive(Debug)]
struct Minimal {
    busy: AtomicU32,
}

#[async_trait]
impl DistributedLock for Minimal {
    fn capabilities(&self) -> Capabilities {
        Capabilities::new(Scope::Process)
    }
    async fn try_acquire(&self, _: &Claim) -> Result<Attempt, LockError> {
        match self
            .busy
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1))
        {
            Ok(_) => Ok(Attempt::busy()),
            Err(_) => Err(LockError::not_supported("the last try")),
        }
    }
    async fn renew(&self, _: &Lease) -> Result<Renewal, LockError> {
        Ok(Renewal::NotHeld)
    }
    async fn release(&self, _: &Claim, _: Option<Duration>) -> Result<Released, LockError> {
        Ok(Released::NotHeld)
    }
}

#[tokio::test(start_paused = true)]
async fn the_provided_wait_polls_until_an_answer_or_the_deadline() {
    let claim = Claim::new("a".parse().unwrap(), Duration::from_secs(1));
    let lock = Minimal { busy: 20.into() };
    let started = tokio::time::Instant::now();
    assert!(matches!(
        lock.acquire(&claim, Wait::until(None)).await,
        Err(LockError::NotSupported { .. })
    ));
    let polled = started.elapsed();
    assert!(
        polled > Duration::from_millis(100) && polled < Duration::from_secs(20 * 375 / 1000 + 1),
        "{polled:?}"
    );

    let lock = Minimal { busy: u32::MAX.into() };
    let deadline = lock.clock().now();
    assert!(matches!(
        lock.acquire(&claim, Wait::until(Some(deadline))).await,
        Ok(Attempt::Busy(_))
    ));
}
