//! Locks that several hold at once.

use std::future::IntoFuture;
use std::time::Duration;

use lock_core::{LockError, Locks, MemoryLock};

use crate::engine::scripted::{SECOND, World};
use crate::{paused, until};

/// Waits until that many claims wait at the store.
async fn queued(memory: &MemoryLock, claims: usize) {
    until(|| memory.waiters() == claims).await;
}

#[tokio::test(start_paused = true)]
async fn several_locks_are_shared_together() {
    let memory = paused::memory();
    let (one, other) = (paused::client(memory.client()), paused::client(memory.client()));
    let readers = one.lock_all(["a", "b"]).shared().await.unwrap();
    let beside = other.lock_all(["b", "a"]).shared().await.unwrap();
    assert!(other.lock_all(["b"]).no_wait().await.unwrap_err().is_busy());
    readers.release().await.unwrap();
    beside.release().await.unwrap();
    assert!(other.lock_all(["b"]).no_wait().await.unwrap().is_held());
}

#[tokio::test(start_paused = true)]
async fn a_downgrade_that_fails_releases_the_lock() {
    let memory = paused::memory();
    let locks = paused::client(memory.client());
    let guard = locks.lock("a").await.unwrap();
    memory.set_reachable(false);
    let error = guard.downgrade().await.unwrap_err();
    assert!(
        matches!(error, LockError::Unavailable { .. }) && error.name().is_some(),
        "{error}"
    );
    memory.set_reachable(true);
    locks.drain().await;
    assert!(locks.holder("a").await.unwrap().is_none());
    // Nor does a future that is dropped leave anything.
    let guard = locks.lock("a").await.unwrap();
    drop(guard.downgrade());
    let guard = locks.lock("a").await.unwrap();
    let mut downgrade = Box::pin(guard.downgrade());
    assert!(tokio::time::timeout(Duration::ZERO, &mut downgrade).await.is_err());
    drop(downgrade);
    until(|| locks.stats().held == 0).await;
    locks.drain().await;
    assert!(locks.holder("a").await.unwrap().is_none());
    let guard = locks.lock("b").at_least(SECOND).await.unwrap();
    assert!(matches!(guard.downgrade().await, Err(LockError::NotSupported { .. })));
    // One that was lost.
    let guard = locks.lock("a").await.unwrap();
    memory.steal(guard.name());
    assert!(matches!(guard.downgrade().await, Err(LockError::Lost { .. })));
}

#[tokio::test(start_paused = true)]
async fn a_lock_that_is_kept_for_the_next_holder_is_released_for_one_that_shares() {
    let memory = paused::memory();
    let locks = Locks::with_options(memory.client(), paused::options().linger(9 * SECOND));
    for _ in 0..3 {
        locks.lock("a").await.unwrap().release().await.unwrap();
        tokio::time::sleep(SECOND / 1000).await;
    }
    let reader = locks.lock("a").shared().no_wait().await.unwrap();
    reader.release().await.unwrap();
    assert!(locks.holder("a").await.unwrap().is_none(), "a share is not kept");
    // Nor do those wait for its time that are there before it is released.
    let guard = locks.lock("a").await.unwrap();
    let readers: Vec<_> = (0..3)
        .map(|_| tokio::spawn(locks.lock("a").shared().wait_for(SECOND).into_future()))
        .collect();
    queued(&memory, 3).await;
    guard.release().await.unwrap();
    for reader in readers {
        assert!(reader.await.unwrap().unwrap().is_held());
    }
}

#[tokio::test(start_paused = true)]
async fn what_the_backend_cannot_is_refused_before_anything_is_sent() {
    let plain = World::new();
    let memory = paused::client(paused::memory());
    let refused = [
        plain.locks.lock("a").shared().await.map(drop),
        plain.locks.semaphore("a", 2).await.map(drop),
        memory.lock("a").shared().at_least(SECOND).await.map(drop),
        plain.locks.lock("b").await.unwrap().downgrade().await.map(drop),
    ];
    for refused in refused {
        let refused = refused.unwrap_err();
        assert!(
            matches!(refused, LockError::NotSupported { .. }) && refused.name().is_some(),
            "{refused}"
        );
    }
    plain.locks.drain().await;
    assert_eq!(plain.requests(), 2, "one lock was acquired and released");
    assert_eq!(memory.stats().acquired, 0);
}
