//! Observing who holds a lock, on the backend in memory.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::future::IntoFuture;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use lock_core::{
    Attempt, Capabilities, Claim, DistributedLock, Holder, Lease, LockError, LockName, Locks, MemoryLock, Released,
    Renewal,
};
use tokio::task::JoinSet;

const SOON: Duration = Duration::from_secs(20);

#[tokio::test]
async fn holders_are_told_one_after_the_other() {
    let memory = MemoryLock::new();
    let (locks, other) = (Locks::new(memory.client()).scoped("shop"), Locks::new(memory.client()));
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
        while other.stats().waiting == 0 {
            tokio::task::yield_now().await;
        }
        guard.release().await.unwrap();
        let next = next.await.unwrap().unwrap();
        let seen = tokio::time::timeout(SOON, holders.next()).await.unwrap().unwrap();
        assert_eq!(seen.unwrap().token, Some(next.token()));
        next.release().await.unwrap();
        let seen = tokio::time::timeout(SOON, holders.next()).await.unwrap().unwrap();
        assert!(seen.is_none());
    }
}

#[tokio::test]
async fn a_future_that_is_dropped_loses_no_change() {
    let locks = Locks::new(MemoryLock::new());
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

#[tokio::test]
async fn what_is_only_reserved_is_held_by_no_one() {
    let locks = Locks::new(MemoryLock::new());
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

#[tokio::test]
async fn failures_are_told_and_name_the_lock() {
    let locks = Locks::new(MemoryLock::new());
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
}

#[tokio::test]
async fn a_hundred_observers_of_a_client_look_two_at_a_time() {
    let backend = Arc::new(Counted {
        memory: MemoryLock::new(),
        now: AtomicUsize::new(0),
        most: AtomicUsize::new(0),
    });
    let locks = Locks::new(Arc::clone(&backend) as Arc<dyn DistributedLock>);
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
