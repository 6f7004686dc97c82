//! Backends that queue with the first request.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use lock_core::{
    Attempt, Capabilities, Claim, Clock, DistributedLock, Lease, LockError, Locks, MemoryLock, Released, Renewal, Wait,
};

use crate::{paused, until};

const OP_TIMEOUT: Duration = Duration::from_secs(5);

/// What becomes of the first request.
#[derive(Clone, Copy, Debug)]
enum First {
    Fails,
    Panics,
    IsNotAnswered,
}

/// The backend in memory, with a first request that comes to nothing.
#[derive(Debug)]
struct Queueing {
    memory: MemoryLock,
    tells: bool,
    first: First,
    calls: Arc<Calls>,
}

#[derive(Debug, Default)]
struct Calls {
    asked: AtomicUsize,
    answers: AtomicUsize,
    waits: AtomicUsize,
    releases: AtomicUsize,
}

impl Calls {
    async fn reach(count: &AtomicUsize, wanted: usize) {
        until(|| count.load(Ordering::SeqCst) >= wanted).await;
    }
}

#[async_trait]
impl DistributedLock for Queueing {
    fn capabilities(&self) -> Capabilities {
        self.memory.capabilities().with_op_timeout(OP_TIMEOUT)
    }
    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, LockError> {
        self.memory.try_acquire(claim).await
    }
    async fn renew(&self, lease: &Lease) -> Result<Renewal, LockError> {
        self.memory.renew(lease).await
    }
    async fn release(&self, claim: &Claim, keep: Option<Duration>) -> Result<Released, LockError> {
        self.calls.releases.fetch_add(1, Ordering::SeqCst);
        self.memory.release(claim, keep).await
    }
    fn clock(&self) -> Clock {
        self.memory.clock()
    }
    async fn acquire(&self, claim: &Claim, mut wait: Wait) -> Result<Attempt, LockError> {
        let is_first = self.calls.asked.fetch_add(1, Ordering::SeqCst) == 0;
        // Others of the same client come meanwhile.
        tokio::task::yield_now().await;
        if !is_first {
            self.calls.waits.fetch_add(1, Ordering::SeqCst);
            return self.memory.acquire(claim, wait).await;
        }
        if let Attempt::Busy(found) = self.memory.try_acquire(claim).await?
            && self.tells
        {
            wait.busy(&found);
        }
        self.calls.answers.fetch_add(1, Ordering::SeqCst);
        match self.first {
            First::Fails => Err(LockError::unavailable("acquire", "made to fail")),
            First::Panics => panic!("told to panic"),
            First::IsNotAnswered => std::future::pending().await,
        }
    }
}

/// A client whose first request comes to that while another client holds `a`, and what has been asked of its backend.
async fn held_elsewhere(tells: bool, first: First) -> (MemoryLock, Claim, Locks, Arc<Calls>) {
    let memory = paused::memory();
    let elsewhere = memory.client();
    let holder = Claim::new("a".parse().unwrap(), Duration::from_secs(30));
    assert!(elsewhere.try_acquire(&holder).await.unwrap().granted().is_some());
    let calls = Arc::<Calls>::default();
    let backend = Queueing {
        memory,
        tells,
        first,
        calls: Arc::clone(&calls),
    };
    (elsewhere, holder, paused::client(backend), calls)
}

#[tokio::test(start_paused = true)]
async fn a_first_request_that_fails_is_followed_by_a_wait() {
    for (tells, first) in [
        (true, First::Fails),
        (true, First::Panics),
        (false, First::Fails),
        (false, First::Panics),
    ] {
        let (elsewhere, holder, locks, calls) = held_elsewhere(tells, first).await;
        let waiting = tokio::spawn(locks.lock("a").into_future());
        let behind = tokio::spawn(locks.lock("a").into_future());
        // What is told counts for all who asked by then, whatever came of the request.
        assert!(locks.try_lock("a").await.unwrap().is_none());
        Calls::reach(&calls.waits, 1).await;
        assert!(locks.try_lock("a").await.unwrap().is_none());
        elsewhere.release(&holder, None).await.unwrap();
        waiting.await.unwrap().unwrap().release().await.unwrap();
        assert!(behind.await.unwrap().unwrap().is_held());
        assert_eq!(calls.asked.load(Ordering::SeqCst), 2);
    }
}

#[tokio::test(start_paused = true)]
async fn who_does_not_want_to_wait_is_refused_while_another_task_waits() {
    let (_elsewhere, _, locks, calls) = held_elsewhere(true, First::IsNotAnswered).await;
    let waiting = tokio::spawn(locks.lock("a").into_future());
    Calls::reach(&calls.answers, 1).await;
    assert!(locks.try_lock("a").await.unwrap().is_none());

    // Far longer than a first answer may take.
    tokio::time::sleep(2 * OP_TIMEOUT).await;
    assert!(!waiting.is_finished());
    waiting.abort();
    Calls::reach(&calls.releases, 1).await;
}

#[tokio::test(start_paused = true)]
async fn a_wait_that_the_backend_does_not_end_is_cut_off() {
    let (_elsewhere, _, locks, calls) = held_elsewhere(true, First::IsNotAnswered).await;
    let wait = Duration::from_millis(50);
    let error = locks.lock("a").wait_for(wait).await.unwrap_err();
    assert!(matches!(error, LockError::Unavailable { .. }), "{error}");
    Calls::reach(&calls.releases, 1).await;
}
