//! Locks that several hold at once.

use std::future::IntoFuture;
use std::time::Duration;

use lock_core::fence::Fence;
use lock_core::{
    Attempt, Capabilities, Claim, DistributedLock, LockError, LockGuard, Locks, LossReason, MemoryLock, Mode, Options,
    Released, Renewal, Scope, async_trait,
};
use tokio::task::JoinHandle;

use crate::{paused, until};

const SECOND: Duration = Duration::from_secs(1);

fn waits(locks: &Locks, shared: bool) -> JoinHandle<Result<LockGuard, LockError>> {
    let request = locks.lock("a");
    tokio::spawn(if shared { request.shared() } else { request }.into_future())
}

/// Waits until that many claims wait at the store.
async fn queued(memory: &MemoryLock, claims: usize) {
    until(|| memory.waiters() == claims).await;
}

#[tokio::test(start_paused = true)]
async fn a_semaphore_has_as_many_permits_as_it_was_given() {
    let memory = paused::memory();
    let (one, other) = (paused::client(memory.client()), paused::client(memory.client()));
    let mut permits = Vec::new();
    for turn in 0..3 {
        let locks = if turn == 1 { &other } else { &one };
        permits.push(locks.semaphore("a", 3).no_wait().await.unwrap());
    }
    assert!(other.semaphore("a", 3).no_wait().await.unwrap_err().is_busy());
    let next = tokio::spawn(other.semaphore("a", 3).into_future());
    queued(&memory, 1).await;
    permits.remove(1).release().await.unwrap();
    permits.push(next.await.unwrap().unwrap());
    assert!(one.semaphore("a", 3).no_wait().await.unwrap_err().is_busy());
    drop(permits);
    one.drain().await;
    other.drain().await;
    assert_eq!(one.semaphore("a", 1).with(async || 5).await.unwrap(), 5);
    let refused = one.semaphore("a", 0).await.unwrap_err();
    assert!(matches!(refused, LockError::Configuration { .. }), "{refused}");
}

#[test]
fn a_permit_is_taken_and_released_without_a_runtime() {
    let locks = Locks::new(MemoryLock::new());
    let permit = locks.semaphore("api", 1).acquire_blocking().unwrap();
    let token = permit.cancellation_token();
    assert!(
        locks
            .semaphore("api", 1)
            .no_wait()
            .acquire_blocking()
            .unwrap_err()
            .is_busy()
    );
    permit.release_blocking().unwrap();
    while !token.is_cancelled() {
        std::thread::yield_now();
    }
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
async fn a_name_has_one_kind_while_it_is_used() {
    let locks = paused::client(paused::memory());
    let asked = |mode: &str| {
        let locks = locks.clone();
        let mode = mode.to_owned();
        async move {
            match mode.as_str() {
                "exclusive" => locks.lock("a").no_wait().await.map(drop),
                "shared" => locks.lock("a").shared().no_wait().await.map(drop),
                permits => locks.semaphore("a", permits.parse().unwrap()).no_wait().await.map(drop),
            }
        }
    };
    let permit = locks.semaphore("a", 2).await.unwrap();
    for mode in ["exclusive", "shared", "3"] {
        let error = asked(mode).await.unwrap_err();
        assert!(
            matches!(
                error,
                LockError::InvalidMode {
                    found: Mode::Permit { of: 2 },
                    ..
                }
            ),
            "{mode}: {error}"
        );
    }
    let error = locks.lock("b").shared().lead(async |_| {}).await.unwrap_err();
    assert!(matches!(error, LockError::Configuration { .. }), "{error}");
    let error = locks.lock("a").await.unwrap_err();
    assert_eq!(
        error.to_string(),
        "lock \"a\": it is in use as a semaphore of 2, and was asked for as an exclusive lock; use another name for one of them"
    );
    permit.release().await.unwrap();
    let guard = locks.lock("a").shared().await.unwrap();
    assert!(matches!(
        asked("2").await,
        Err(LockError::InvalidMode {
            found: Mode::Shared,
            ..
        })
    ));
    guard.release().await.unwrap();
    asked("2").await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_downgrade_lets_no_writer_in_between() {
    let memory = paused::memory();
    let (one, other) = (paused::client(memory.client()), paused::client(memory.client()));
    let fence = Fence::new("a", 0);
    let guard = one.lock("a").max_hold(600 * SECOND).await.unwrap();
    fence.admit(guard.token()).unwrap();
    let (signal, token) = (guard.lost(), guard.token());
    let (elsewhere, here) = (waits(&other, false), waits(&one, false));
    let reader = waits(&other, true);
    queued(&memory, 2).await;
    let guard = guard.downgrade().await.unwrap();
    assert_eq!(signal.await, LossReason::Released);
    assert!(guard.is_held() && guard.token() == token);
    fence.admit_shared(guard.token()).unwrap();
    // The writer that came before it keeps the reader out.
    queued(&memory, 3).await;
    assert!(!elsewhere.is_finished() && !here.is_finished() && !reader.is_finished());
    assert_eq!(one.stats().held, 1);
    let guard = guard.downgrade().await.unwrap();
    // It is renewed as any other.
    tokio::time::sleep(100 * SECOND).await;
    assert!(guard.is_held());
    guard.release().await.unwrap();
    let writer = elsewhere.await.unwrap().unwrap();
    assert!(writer.token() > token);
    drop(writer);
    drop(reader.await.unwrap().unwrap());
    assert!(here.await.unwrap().unwrap().is_held());
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

/// A backend with the three methods only.
#[derive(Debug)]
struct Plain(MemoryLock);

#[async_trait]
impl DistributedLock for Plain {
    fn capabilities(&self) -> Capabilities {
        Capabilities::new(Scope::Process)
    }
    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, LockError> {
        self.0.try_acquire(claim).await
    }
    async fn renew(&self, lease: &lock_core::Lease) -> Result<Renewal, LockError> {
        self.0.renew(lease).await
    }
    async fn release(&self, claim: &Claim, keep: Option<Duration>) -> Result<Released, LockError> {
        self.0.release(claim, keep).await
    }
}

#[tokio::test]
async fn what_the_backend_cannot_is_refused_before_anything_is_sent() {
    let memory = MemoryLock::new();
    let plain = Locks::with_options(Plain(memory.client()), Options::new());
    let refused = [
        plain.lock("a").shared().await.map(drop),
        plain.semaphore("a", 2).await.map(drop),
        plain.lock("b").await.unwrap().downgrade().await.map(drop),
        Locks::new(memory.client())
            .lock("a")
            .shared()
            .at_least(SECOND)
            .await
            .map(drop),
    ];
    for refused in refused {
        let refused = refused.unwrap_err();
        assert!(
            matches!(refused, LockError::NotSupported { .. }) && refused.name().is_some(),
            "{refused}"
        );
    }
    plain.drain().await;
    assert!(Locks::new(memory).list("").await.unwrap().is_empty());
}
