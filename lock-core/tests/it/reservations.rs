//! Reservations as the client asks for them, of a server that can fail.

use std::future::IntoFuture;
use std::time::Duration;

use lock_core::{LockError, LockRequest, LossReason};

use crate::engine::scripted::{Fate, Op, SECOND, TTL, World};
use crate::until;

const HOUR: Duration = Duration::from_secs(3600);
fn world() -> World {
    World::with(|server| server.reserves = true)
}

fn job(world: &World) -> LockRequest {
    world.locks.lock("job").at_least(HOUR)
}

/// Waits until the server has been asked for a reservation.
async fn asked(world: &World) {
    until(|| world.server.count(Op::Reserve) == 1).await;
    world.settle().await;
}

#[tokio::test(start_paused = true)]
async fn a_request_that_is_dropped_before_its_guard_reserves_nothing() {
    for fate in [Fate::Hang, Fate::LoseReply] {
        let world = world();
        world.server.next(Op::Reserve, [fate]);
        let request = tokio::spawn(job(&world).into_future());
        asked(&world).await;
        assert!(world.server.keeps("job"), "it is held meanwhile");
        request.abort();
        assert!(request.await.unwrap_err().is_cancelled());
        world.locks.drain().await;
        assert!(!world.server.keeps("job"), "{fate:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn what_a_dropped_request_has_reserved_is_released_after_an_outage_longer_than_its_ttl() {
    let world = world();
    world.server.next(Op::Reserve, [Fate::LoseReply]);
    let request = tokio::spawn(job(&world).into_future());
    asked(&world).await;
    world.server.next(Op::Release, [Fate::Fail; 3]);
    request.abort();
    assert!(request.await.unwrap_err().is_cancelled());
    until(|| world.server.count(Op::Release) == 1).await;
    world.hand.advance(2 * TTL);
    world.locks.drain().await;
    assert!(!world.server.keeps("job"));
}

#[tokio::test(start_paused = true)]
async fn what_cannot_have_been_reserved_is_released_no_longer_than_for_its_ttl() {
    let world = world();
    world.server.next(Op::Try, [Fate::Fail]);
    world.server.next(Op::Release, [Fate::Fail; 1_000]);
    let failed = job(&world).no_wait().await.unwrap_err();
    assert!(matches!(failed, LockError::Unavailable { .. }), "{failed}");
    world.hand.advance(2 * TTL);
    tokio::time::timeout(TTL, world.locks.drain())
        .await
        .expect("it is given up");
}

#[tokio::test(start_paused = true)]
async fn a_reservation_that_fails_or_comes_too_late_is_an_error_and_leaves_nothing() {
    for (fate, lost) in [
        (Fate::Fail, None),
        (Fate::AnswerAfter(2 * SECOND), Some(LossReason::MaxHold)),
        (Fate::DeliverAfter(SECOND), Some(LossReason::NotHeld)),
    ] {
        let world = world();
        world.server.next(Op::Reserve, [fate]);
        let request = tokio::spawn(job(&world).max_hold(SECOND * 3 / 2).into_future());
        asked(&world).await;
        if lost == Some(LossReason::NotHeld) {
            world.server.take_away("job");
        }
        let error = request.await.unwrap().unwrap_err();
        let reason = match &error {
            LockError::Unavailable { .. } => None,
            LockError::Lost { reason, .. } => Some(*reason),
            _ => panic!("{error}"),
        };
        assert_eq!(reason, lost, "{error}");
        assert!(error.name().is_some());
        world.locks.drain().await;
        assert!(!world.server.keeps("job"));
    }
}

#[tokio::test(start_paused = true)]
async fn a_failed_release_is_tried_again_and_leaves_the_reservation() {
    let world = world();
    let guard = job(&world).await.unwrap();
    world.server.next(Op::Release, [Fate::Fail; 2]);
    let error = guard.release().await.unwrap_err();
    assert!(matches!(error, LockError::Unavailable { .. }), "{error}");
    world.locks.drain().await;
    assert_eq!(world.server.count(Op::Release), 3);
    world.hand.advance(2 * TTL);
    assert!(world.server.keeps("job") && world.locks.try_lock("job").await.unwrap().is_none());
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_reserved_is_refused_before_anything_is_sent() {
    let cannot = World::new();
    let refused = job(&cannot).await.unwrap_err();
    assert!(
        matches!(refused, LockError::NotSupported { .. }) && refused.name().is_some(),
        "{refused}"
    );
    let run = cannot.locks.run_once_per("job", HOUR, async |_| panic!("it runs"));
    let refused = run.await.unwrap_err();
    assert!(matches!(refused, LockError::NotSupported { .. }), "{refused}");
    assert_eq!(cannot.requests(), 0);
    // None at all needs no reservation.
    drop(cannot.locks.lock("job").at_least(Duration::ZERO).await.unwrap());

    let world = world();
    let too_long = LockRequest::MAX_AT_LEAST + Duration::from_nanos(1);
    let refused = world.locks.lock("job").at_least(too_long).await.unwrap_err();
    assert!(
        matches!(refused, LockError::Configuration { .. }) && refused.to_string().contains("366 days"),
        "{refused}"
    );
    assert_eq!(world.requests(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_job_runs_once_per_period_whatever_it_returns() {
    let world = world();
    let run = async || {
        let ran = world.locks.run_once_per("job", HOUR, async |_| Err::<(), _>("failed"));
        ran.await.unwrap().is_some()
    };
    assert!(run().await && !run().await);
    world.hand.advance(HOUR * 9 / 10 - SECOND);
    assert!(!run().await);
    world.hand.advance(2 * SECOND);
    assert!(run().await && !run().await);
}
