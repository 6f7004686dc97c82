//! Observing who holds a lock, on the backend in memory.

use std::future::IntoFuture;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use lock_core::{
    Attempt, Capabilities, Claim, Clock, DistributedLock, Holder, Lease, LockError, LockName, MemoryLock, Released,
    Renewal,
};
use tokio::task::JoinSet;

use crate::{paused, until};

/// Paused time within which a change is noticed: the backend in memory is asked 4 times a second.
const SOON: Duration = Duration::from_secs(1);

#[tokio::test(start_paused = true)]
async fn holders_are_told_one_after_the_other() {
    let memory = paused::memory();
    let (locks, other) = (
        paused::client(memory.client()).scoped("shop"),
        paused::client(memory.client()),
    );
    let mut holders = locks.observe("job");
    assert!(holders.next().await.unwrap().is_none());
    let mut last = None;
    for _ in 0..3 {
        let guard = other.lock("shop/job").await.unwrap();
        let seen = tokio::time::timeout(SOON, holders.next()).await.unwrap().unwrap();
        let seen = seen.unwrap();
        assert_eq!(seen.token, Some(guard.token()));
        assert!(seen.token > last);
        assert_eq!(seen.name.unwrap().as_str(), "job");
        last = seen.token;
        // A hand-over to another holder is one change.
        let next = other.lock("shop/job").into_future();
        let next = tokio::spawn(next);
        until(|| other.stats().waiting > 0).await;
        guard.release().await.unwrap();
        let next = next.await.unwrap().unwrap();
        let seen = tokio::time::timeout(SOON, holders.next()).await.unwrap().unwrap();
        assert_eq!(seen.unwrap().token, Some(next.token()));
        next.release().await.unwrap();
        let seen = tokio::time::timeout(SOON, holders.next()).await.unwrap().unwrap();
        assert!(seen.is_none());
    }
}

#[tokio::test(start_paused = true)]
async fn a_future_that_is_dropped_loses_no_change() {
    let locks = paused::client(paused::memory());
    let mut holders = locks.observe("job");
    assert!(holders.next().await.unwrap().is_none());
    let dropped = tokio::time::timeout(Duration::from_millis(1), holders.next()).await;
    assert!(dropped.is_err());
    let guard = locks.lock("job").await.unwrap();
    for _ in 0..20 {
        let Ok(seen) = tokio::time::timeout(Duration::from_millis(50), holders.next()).await else {
            continue;
        };
        assert_eq!(seen.unwrap().unwrap().token, Some(guard.token()));
        return;
    }
    panic!("the change was not told");
}

#[tokio::test(start_paused = true)]
async fn what_is_only_reserved_is_held_by_no_one() {
    let locks = paused::client(paused::memory());
    let guard = locks.lock("job").at_least(Duration::from_secs(3600)).await.unwrap();
    let mut holders = locks.observe("job");
    assert!(holders.next().await.unwrap().is_some());
    guard.release().await.unwrap();
    assert!(
        tokio::time::timeout(SOON, holders.next())
            .await
            .unwrap()
            .unwrap()
            .is_none()
    );
}

#[tokio::test(start_paused = true)]
async fn failures_are_told_and_name_the_lock() {
    let locks = paused::client(paused::memory());
    let unusable = locks.observe("two\nlines").next().await.unwrap_err();
    assert!(matches!(unusable, LockError::InvalidName { .. }), "{unusable}");
    let mut holders = locks.observe("job");
    assert!(holders.next().await.unwrap().is_none());
    locks.shutdown().await.unwrap();
    let closed = tokio::time::timeout(SOON, holders.next()).await.unwrap().unwrap_err();
    assert!(
        matches!(closed, LockError::Closed { .. }) && closed.name().is_some(),
        "{closed}"
    );
}

/// A backend in memory that counts the looks at holders that are under way.
#[derive(Debug)]
struct Counted {
    memory: MemoryLock,
    now: AtomicUsize,
    most: AtomicUsize,
}

#[async_trait]
impl DistributedLock for Counted {
    fn capabilities(&self) -> Capabilities {
        self.memory.capabilities()
    }
    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, LockError> {
        self.memory.try_acquire(claim).await
    }
    async fn renew(&self, lease: &Lease) -> Result<Renewal, LockError> {
        self.memory.renew(lease).await
    }
    async fn release(&self, claim: &Claim) -> Result<Released, LockError> {
        self.memory.release(claim).await
    }
    async fn holder(&self, name: &LockName) -> Result<Option<Holder>, LockError> {
        let now = self.now.fetch_add(1, Ordering::SeqCst) + 1;
        self.most.fetch_max(now, Ordering::SeqCst);
        // The others get their turns.
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        self.now.fetch_sub(1, Ordering::SeqCst);
        self.memory.holder(name).await
    }
    fn clock(&self) -> Clock {
        self.memory.clock()
    }
}

#[tokio::test(start_paused = true)]
async fn a_hundred_observers_of_a_client_look_two_at_a_time() {
    let backend = Arc::new(Counted {
        memory: paused::memory(),
        now: AtomicUsize::new(0),
        most: AtomicUsize::new(0),
    });
    let locks = paused::client(Arc::clone(&backend) as Arc<dyn DistributedLock>);
    let mut looks = JoinSet::new();
    for _ in 0..100 {
        let mut holders = locks.observe("job");
        looks.spawn(async move { holders.next().await });
    }
    while let Some(look) = looks.join_next().await {
        assert!(look.unwrap().unwrap().is_none());
    }
    assert_eq!(backend.most.load(Ordering::SeqCst), 2);
}
