//! What fails while a lock is waited for: what may pass is waited out and told once, all else ends the wait.

use std::fmt::{self, Debug};
use std::future::IntoFuture;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lock_core::{
    Attempt, Capabilities, Claim, Clock, DistributedLock, Lease, LockError, Locks, MemoryLock, Released, Renewal,
    async_trait,
};
use tokio::sync::Semaphore;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::{child, paused, until};

type Failing = fn() -> LockError;

/// A store that can be made to fail, and to answer requests only as they are let through.
#[derive(Debug)]
struct Store {
    inner: MemoryLock,
    error: Arc<Mutex<Option<Failing>>>,
    let_through: Arc<Semaphore>,
}

impl Store {
    fn new() -> Self {
        Self {
            inner: paused::memory(),
            error: Arc::default(),
            let_through: Arc::new(Semaphore::new(Semaphore::MAX_PERMITS)),
        }
    }

    fn client(&self) -> Locks {
        let client = Self {
            inner: self.inner.client(),
            error: Arc::clone(&self.error),
            let_through: Arc::clone(&self.let_through),
        };
        paused::client(client)
    }

    fn fails(&self, error: Option<Failing>) {
        *self.error.lock().unwrap() = error;
    }
}

// The provided `acquire` looks several times a second.
#[async_trait]
impl DistributedLock for Store {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, LockError> {
        self.let_through.acquire().await.unwrap().forget();
        let error = *self.error.lock().unwrap();
        if let Some(error) = error {
            return Err(error());
        }
        self.inner.try_acquire(claim).await
    }

    async fn renew(&self, lease: &Lease) -> Result<Renewal, LockError> {
        self.inner.renew(lease).await
    }

    async fn release(&self, claim: &Claim, keep: Option<Duration>) -> Result<Released, LockError> {
        self.inner.release(claim, keep).await
    }

    fn clock(&self) -> Clock {
        self.inner.clock()
    }
}

fn revoked() -> LockError {
    LockError::configuration("the user lacks a right; grant it")
}

fn away() -> LockError {
    LockError::failed("acquire", "connection refused")
}

#[tokio::test(start_paused = true)]
async fn a_failure_that_only_a_person_can_change_ends_every_wait() {
    let store = Store::new();
    let (holder, locks) = (store.client(), store.client());
    let held = holder.lock("n").await.unwrap();
    let waits: Vec<_> = (0..5).map(|_| tokio::spawn(locks.lock("n").into_future())).collect();
    until(|| locks.stats().waiting == 5).await;
    assert!(locks.try_lock("n").await.unwrap().is_none());
    store.fails(Some(revoked));
    for wait in waits {
        let error = wait.await.unwrap().unwrap_err();
        assert!(matches!(error, LockError::Configuration { .. }), "{error}");
        assert!(format!("{error:#}").contains("grant it"), "{error}");
    }
    held.release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn who_waits_for_the_answer_to_another_request_hears_whether_its_failure_may_pass() {
    for (error, may_pass) in [(revoked as Failing, false), (away, true)] {
        let store = Store::new();
        let locks = store.client();
        store.fails(Some(error));
        store.let_through.forget_permits(Semaphore::MAX_PERMITS);
        let waits: Vec<_> = (0..3).map(|_| tokio::spawn(locks.lock("n").into_future())).collect();
        until(|| locks.stats().waiting == 3).await;
        // Of the others none sends a request of its own.
        store.let_through.add_permits(1);
        for wait in waits {
            let error = wait.await.unwrap().unwrap_err();
            assert_eq!(error.is_retryable(), may_pass, "{error:?}");
        }
    }
}

/// What was told of outages.
#[derive(Clone, Default)]
struct Told(Arc<Mutex<Vec<(Level, String)>>>);

impl Subscriber for Told {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        let is_outage = metadata.target() == "fencelock" && metadata.fields().field("outage").is_some();
        is_outage && *metadata.level() <= Level::INFO
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut text = Text(String::new());
        event.record(&mut text);
        self.0.lock().unwrap().push((*event.metadata().level(), text.0));
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        use fmt::Write;
        if field.name() == "message" {
            let _ = write!(self.0, "{value:?}");
        }
    }
}

#[test]
fn a_failure_that_may_pass_is_told_once_with_its_reason_and_so_is_its_end() {
    // Subscribers of single threads can miss events that other threads tell first.
    let test = "waiting_errors::a_failure_that_may_pass_is_told_once_with_its_reason_and_so_is_its_end";
    child::alone(test, fail_and_answer);
}

#[tokio::main(flavor = "current_thread", start_paused = true)]
async fn fail_and_answer() {
    let told = Told::default();
    tracing::subscriber::set_global_default(told.clone()).unwrap();
    let store = Store::new();
    let (holder, locks) = (store.client(), store.client());
    let held = [holder.lock("a").await.unwrap(), holder.lock("b").await.unwrap()];
    let waits = ["a", "b"].map(|name| tokio::spawn(locks.lock(name).into_future()));
    until(|| locks.stats().waiting == 2).await;
    for name in ["a", "b"] {
        assert!(locks.try_lock(name).await.unwrap().is_none());
    }
    let asked = store.let_through.available_permits();
    store.fails(Some(away));
    // Both fail several times.
    until(|| store.let_through.available_permits() + 10 < asked).await;
    store.fails(None);
    for held in held {
        held.release().await.unwrap();
    }
    for wait in waits {
        wait.await.unwrap().unwrap().release().await.unwrap();
    }
    let told = told.0.lock().unwrap().clone();
    assert_eq!(told.len(), 2, "{told:?}");
    assert!(
        told[0].0 == Level::WARN && told[0].1.contains("connection refused"),
        "{told:?}"
    );
    assert!(told[1].0 == Level::INFO && told[1].1.contains("answers"), "{told:?}");
}
