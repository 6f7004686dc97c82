//! Limits of time, and locks as tests take them.

use std::time::{Duration, Instant};

use lock_core::{Attempt, Claim, Clock, DistributedLock, Grant, LockName, Stamp, Wait};
use lock_postgres::PostgresLock;
use tokio::task::JoinHandle;

/// The time after which a test fails because something that must happen has not happened. No test depends on its length.
pub(crate) const HANG_LIMIT: Duration = Duration::from_secs(60);

/// Returns the output of the future; panics if it takes longer than [`HANG_LIMIT`].
pub(crate) async fn in_time<T>(work: impl Future<Output = T>) -> T {
    let output = tokio::time::timeout(HANG_LIMIT, work).await;
    output.unwrap_or_else(|_| panic!("it takes longer than {HANG_LIMIT:?}"))
}

/// Waits until that holds.
pub(crate) async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let start = Instant::now();
    while !holds().await {
        assert!(start.elapsed() < HANG_LIMIT, "not in time: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}
pub(crate) fn claim(name: &str, ttl: Duration) -> Claim {
    Claim::new(name.parse().unwrap(), ttl)
}

pub(crate) fn name(name: &str) -> LockName {
    name.parse().unwrap()
}

/// The latest moment up to which a wait goes on that must not end without the lock.
pub(crate) fn soon() -> Option<Stamp> {
    Some(Clock::system().now() + HANG_LIMIT)
}

pub(crate) async fn granted(lock: &PostgresLock, claim: &Claim) -> Grant {
    let attempt = lock.try_acquire(claim).await.unwrap();
    attempt.granted().expect("the lock is free")
}

/// Waits for the lock, which it has to get.
pub(crate) async fn waited(lock: &PostgresLock, claim: &Claim) -> Grant {
    let attempt = lock.acquire(claim, Wait::until(soon())).await.unwrap();
    attempt.granted().expect("a wait without end")
}

/// [Waits](waited) for the lock beside whatever else happens.
pub(crate) fn waiting(lock: &PostgresLock, claim: Claim) -> JoinHandle<Grant> {
    let lock = lock.clone();
    tokio::spawn(async move { waited(&lock, &claim).await })
}

pub(crate) async fn is_busy(lock: &PostgresLock, claim: &Claim) -> bool {
    matches!(lock.try_acquire(claim).await.unwrap(), Attempt::Busy(_))
}
