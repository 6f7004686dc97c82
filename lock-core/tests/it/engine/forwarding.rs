//! Pointers to a backend, and what the trait provides.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use lock_core::{
    Attempt, Capabilities, Claim, Clock, DistributedLock, Holder, Lease, LockError, LockName, Released, Renewal, Scope,
    ServerInfo, Wait,
};

/// Answers every call with an error that names the call.
#[derive(Debug)]
struct Echo;

fn echo<T>(operation: &'static str) -> Result<T, LockError> {
    Err(LockError::not_supported(operation))
}

#[async_trait]
impl DistributedLock for Echo {
    fn capabilities(&self) -> Capabilities {
        Capabilities::new(Scope::Process).with_op_timeout(Duration::from_millis(77))
    }
    async fn try_acquire(&self, _: &Claim) -> Result<Attempt, LockError> {
        echo("own try_acquire")
    }
    async fn renew(&self, _: &Lease) -> Result<Renewal, LockError> {
        echo("own renew")
    }
    async fn release(&self, _: &Claim, _: Option<Duration>) -> Result<Released, LockError> {
        echo("own release")
    }
    async fn acquire(&self, _: &Claim, _: Wait) -> Result<Attempt, LockError> {
        echo("own acquire")
    }
    async fn reserve(&self, _: &Claim, _: Duration) -> Result<Renewal, LockError> {
        echo("own reserve")
    }
    async fn holders(&self, _: &LockName) -> Result<Vec<Holder>, LockError> {
        echo("own holder")
    }
    async fn list(&self, _: &str) -> Result<Vec<Holder>, LockError> {
        echo("own list")
    }
    async fn force_release(&self, _: &LockName) -> Result<Vec<Holder>, LockError> {
        echo("own force_release")
    }
    async fn server_info(&self) -> Result<ServerInfo, LockError> {
        echo("own server_info")
    }
    async fn close(&self) -> Result<(), LockError> {
        echo("own close")
    }
    fn clock(&self) -> Clock {
        Clock::manual().0
    }
}

async fn forwards_everything(lock: impl DistributedLock) {
    fn told<T: std::fmt::Debug>(result: Result<T, LockError>) -> &'static str {
        match result.unwrap_err() {
            LockError::NotSupported { operation, .. } => operation,
            other => panic!("{other}"),
        }
    }
    let name: LockName = "a".parse().unwrap();
    let claim = Claim::new(name.clone(), Duration::from_secs(1));
    let lease = Lease::for_claim(&claim, Clock::system().now());
    assert_eq!(lock.capabilities(), Echo.capabilities());
    assert_eq!(told(lock.try_acquire(&claim).await), "own try_acquire");
    assert_eq!(told(lock.renew(&lease).await), "own renew");
    assert_eq!(told(lock.release(&claim, None).await), "own release");
    assert_eq!(told(lock.acquire(&claim, Wait::until(None)).await), "own acquire");
    let second = Duration::from_secs(1);
    assert_eq!(told(lock.reserve(&claim, second).await), "own reserve");
    assert_eq!(told(lock.holders(&name).await), "own holder");
    assert_eq!(told(lock.list("").await), "own list");
    assert_eq!(told(lock.force_release(&name).await), "own force_release");
    assert_eq!(told(lock.server_info().await), "own server_info");
    assert_eq!(told(lock.close().await), "own close");
    assert_eq!(format!("{:?}", lock.clock()), "Clock::Manual");
}

#[tokio::test]
async fn pointers_forward_what_the_backend_overrides() {
    forwards_everything(Echo).await;
    forwards_everything(Arc::new(Echo)).await;
    forwards_everything(Box::new(Echo)).await;
    forwards_everything(Arc::new(Echo) as Arc<dyn DistributedLock>).await;
    forwards_everything(Box::new(Echo) as Box<dyn DistributedLock>).await;
}

/// Only what is required, busy for a number of tries.
#[derive(Debug)]
struct Minimal {
    busy: std::sync::atomic::AtomicU32,
}

#[async_trait]
impl DistributedLock for Minimal {
    fn capabilities(&self) -> Capabilities {
        Capabilities::new(Scope::Process)
    }
    async fn try_acquire(&self, _: &Claim) -> Result<Attempt, LockError> {
        use std::sync::atomic::Ordering::SeqCst;
        match self.busy.fetch_update(SeqCst, SeqCst, |n| n.checked_sub(1)) {
            Ok(_) => Ok(Attempt::busy()),
            Err(_) => echo("the last try"),
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
