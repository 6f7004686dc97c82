//! Reservations as the client asks for them, on a backend in memory that can fail.
//!
//! Timers run on paused time. The clock stands still until the test advances it.

use std::future::IntoFuture;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use lock_core::{
    Attempt, Capabilities, Claim, Clock, DistributedLock, Holder, Lease, LockError, LockName, Locks, LossReason,
    ManualClock, MemoryLock, Released, Renewal,
};
use tokio::sync::Notify;

use crate::{paused, until};

const HOUR: Duration = Duration::from_secs(3600);
const TTL: Duration = Duration::from_secs(30);

/// What becomes of a reservation.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fate {
    Fails,
    /// Never reaches the server.
    Hangs,
    /// Is made, and never answered.
    LosesItsReply,
    /// The lock is taken away before.
    ComesTooLate,
    /// The guard's hold ends before it is answered.
    IsAnsweredLate,
}

/// A backend in memory that does what the test says.
#[derive(Debug)]
struct Trouble {
    memory: MemoryLock,
    fate: Mutex<Option<Fate>>,
    reserving: Notify,
    failing_releases: AtomicU32,
    failing_plain_releases: AtomicU32,
    failing_acquisitions: AtomicU32,
    plain_releases: AtomicUsize,
    has_reservations: bool,
}

/// The backend behind a client, the client, and the hand of the clock.
struct World {
    server: Arc<Trouble>,
    locks: Locks,
    other: Locks,
    hand: ManualClock,
}

impl World {
    fn new() -> Self {
        Self::with(true)
    }

    fn with(has_reservations: bool) -> Self {
        let (clock, hand) = Clock::manual();
        let memory = MemoryLock::with_clock(clock);
        let other = paused::client(memory.client());
        let server = Arc::new(Trouble {
            memory,
            fate: Mutex::default(),
            reserving: Notify::new(),
            failing_releases: AtomicU32::new(0),
            failing_plain_releases: AtomicU32::new(0),
            failing_acquisitions: AtomicU32::new(0),
            plain_releases: AtomicUsize::new(0),
            has_reservations,
        });
        let backend: Arc<dyn DistributedLock> = Arc::clone(&server) as _;
        let locks = Locks::with_options(backend, paused::options().ttl(TTL));
        Self {
            server,
            locks,
            other,
            hand,
        }
    }

    fn next(&self, fate: Fate) {
        *self.server.fate.lock().unwrap() = Some(fate);
    }

    async fn is_free(&self) -> bool {
        let guard = self.other.try_lock("job").await.unwrap();
        let free = guard.is_some();
        drop(guard);
        self.other.drain().await;
        free
    }
}

#[async_trait]
impl DistributedLock for Trouble {
    fn capabilities(&self) -> Capabilities {
        let mut capabilities = self.memory.capabilities();
        capabilities.reservations = self.has_reservations;
        capabilities
    }
    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, LockError> {
        fail_if_told(&self.failing_acquisitions)?;
        self.memory.try_acquire(claim).await
    }
    async fn renew(&self, lease: &Lease) -> Result<Renewal, LockError> {
        self.memory.renew(lease).await
    }
    async fn release(&self, claim: &Claim, keep: Option<Duration>) -> Result<Released, LockError> {
        if keep.is_some() {
            fail_if_told(&self.failing_releases)?;
            return self.memory.release(claim, keep).await;
        }
        self.plain_releases.fetch_add(1, Ordering::SeqCst);
        fail_if_told(&self.failing_plain_releases)?;
        self.memory.release(claim, None).await
    }
    async fn reserve(&self, claim: &Claim, length: Duration) -> Result<Renewal, LockError> {
        let fate = *self.fate.lock().unwrap();
        match fate {
            Some(Fate::Fails) => return Err(LockError::unavailable("reserve", "told to fail")),
            Some(Fate::Hangs) => {
                self.reserving.notify_one();
                std::future::pending().await
            }
            Some(Fate::LosesItsReply) => {
                self.memory.reserve(claim, length).await?;
                self.reserving.notify_one();
                std::future::pending().await
            }
            Some(Fate::IsAnsweredLate) => {
                let reserved = self.memory.reserve(claim, length).await?;
                self.reserving.notify_one();
                until(|| self.plain_releases.load(Ordering::SeqCst) > 0).await;
                return Ok(reserved);
            }
            Some(Fate::ComesTooLate) => {
                self.memory.force_release(claim.name()).await?;
            }
            None => {}
        }
        self.memory.reserve(claim, length).await
    }
    async fn holders(&self, name: &LockName) -> Result<Vec<Holder>, LockError> {
        self.memory.holders(name).await
    }
    fn clock(&self) -> Clock {
        self.memory.clock()
    }
}

fn fail_if_told(times: &AtomicU32) -> Result<(), LockError> {
    let fails = |n: u32| n.checked_sub(1);
    match times.fetch_update(Ordering::SeqCst, Ordering::SeqCst, fails) {
        Ok(_) => Err(LockError::unavailable("release", "told to fail")),
        Err(_) => Ok(()),
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_that_is_dropped_before_its_guard_reserves_nothing() {
    for fate in [Fate::Hangs, Fate::LosesItsReply] {
        let world = World::new();
        world.next(fate);
        let request = tokio::spawn(world.locks.lock("job").at_least(HOUR).into_future());
        world.server.reserving.notified().await;
        assert!(!world.is_free().await, "it is held meanwhile");
        request.abort();
        assert!(request.await.unwrap_err().is_cancelled());
        world.locks.drain().await;
        assert!(world.is_free().await, "{fate:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn what_a_dropped_request_has_reserved_is_released_after_an_outage_longer_than_its_ttl() {
    let world = World::new();
    world.next(Fate::LosesItsReply);
    let request = tokio::spawn(world.locks.lock("job").at_least(HOUR).into_future());
    world.server.reserving.notified().await;
    world.server.failing_plain_releases.store(3, Ordering::SeqCst);
    request.abort();
    assert!(request.await.unwrap_err().is_cancelled());
    until(|| world.server.failing_plain_releases.load(Ordering::SeqCst) < 3).await;
    world.hand.advance(2 * TTL);
    world.locks.drain().await;
    assert!(world.is_free().await);
}

#[tokio::test(start_paused = true)]
async fn a_hold_that_ends_while_its_name_is_reserved_is_a_loss_and_leaves_nothing() {
    let world = World::new();
    world.next(Fate::IsAnsweredLate);
    let request = world.locks.lock("job").max_hold(TTL / 3).at_least(HOUR);
    let request = tokio::spawn(request.into_future());
    world.server.reserving.notified().await;
    world.hand.advance(TTL / 2);
    let lost = request.await.unwrap().unwrap_err();
    assert!(matches!(lost, LockError::Lost { .. }), "{lost}");
    world.locks.drain().await;
    assert!(world.is_free().await);
}

#[tokio::test(start_paused = true)]
async fn what_cannot_have_been_reserved_is_released_no_longer_than_for_its_ttl() {
    let world = World::new();
    world.server.failing_acquisitions.store(1, Ordering::SeqCst);
    world.server.failing_plain_releases.store(u32::MAX, Ordering::SeqCst);
    let failed = world.locks.lock("job").at_least(HOUR).no_wait().await.unwrap_err();
    assert!(matches!(failed, LockError::Unavailable { .. }), "{failed}");
    world.hand.advance(2 * TTL);
    tokio::time::timeout(TTL, world.locks.drain())
        .await
        .expect("it is given up");
}

#[tokio::test(start_paused = true)]
async fn a_failed_reservation_is_an_error_and_leaves_nothing() {
    for fate in [Fate::Fails, Fate::ComesTooLate] {
        let world = World::new();
        world.next(fate);
        let error = world.locks.lock("job").at_least(HOUR).await.unwrap_err();
        assert_eq!(error.name().unwrap().as_str(), "job");
        match fate {
            Fate::Fails => assert!(matches!(error, LockError::Unavailable { .. }), "{error}"),
            _ => assert!(
                matches!(
                    error,
                    LockError::Lost {
                        reason: LossReason::NotHeld,
                        ..
                    }
                ),
                "{error}"
            ),
        }
        world.locks.drain().await;
        assert!(world.is_free().await, "{fate:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_failed_release_is_tried_again_and_leaves_the_reservation() {
    let world = World::new();
    let guard = world.locks.lock("job").at_least(HOUR).await.unwrap();
    world.server.failing_releases.store(2, Ordering::SeqCst);
    let error = guard.release().await.unwrap_err();
    assert!(matches!(error, LockError::Unavailable { .. }), "{error}");
    world.locks.drain().await;
    assert_eq!(world.server.failing_releases.load(Ordering::SeqCst), 0);
    assert_eq!(world.server.plain_releases.load(Ordering::SeqCst), 0);
    assert!(world.other.holder("job").await.unwrap().unwrap().is_reserved);
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_reserved_is_refused_before_anything_is_sent() {
    let world = World::with(false);
    let refused = world.locks.lock("job").at_least(HOUR).await.unwrap_err();
    assert!(
        matches!(refused, LockError::NotSupported { .. }) && refused.name().is_some(),
        "{refused}"
    );
    let refused = world
        .locks
        .run_once_per("job", HOUR, async |_| panic!("it runs"))
        .await
        .unwrap_err();
    assert!(matches!(refused, LockError::NotSupported { .. }), "{refused}");
    assert_eq!(world.locks.stats().acquired, 0);
    // None at all needs no reservation.
    drop(world.locks.lock("job").at_least(Duration::ZERO).await.unwrap());

    let world = World::new();
    let too_long = lock_core::LockRequest::MAX_AT_LEAST + Duration::from_nanos(1);
    let refused = world.locks.lock("job").at_least(too_long).await.unwrap_err();
    assert!(
        matches!(refused, LockError::Configuration { .. }) && refused.to_string().contains("366 days"),
        "{refused}"
    );
    assert_eq!(world.locks.stats().acquired, 0);
}

#[tokio::test(start_paused = true)]
async fn a_job_runs_once_per_period_whatever_it_returns() {
    let world = World::new();
    let run = async |locks: &Locks| {
        let ran = locks.run_once_per("job", HOUR, async |_| Err::<(), _>("failed")).await;
        ran.unwrap().is_some()
    };
    assert!(run(&world.locks).await);
    assert!(!run(&world.locks).await && !run(&world.other).await);
    world.hand.advance(HOUR * 9 / 10 - Duration::from_millis(1));
    assert!(!run(&world.other).await);
    world.hand.advance(Duration::from_millis(1));
    assert!(run(&world.other).await);
    assert!(!run(&world.locks).await);
}
