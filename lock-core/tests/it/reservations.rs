//! Reservations as the client asks for them, of a server that can fail.

use std::time::Duration;

use lock_core::{LockError, LockRequest, LossReason};

use crate::engine::scripted::{Asked, Fate, Op, SECOND, TTL, World, ask};
use crate::until;

const HOUR: Duration = Duration::from_secs(3600);

fn world() -> World {
    World::with(|kind| kind.reserves = true)
}

fn job(world: &World) -> LockRequest {
    world.lock("job").at_least(HOUR)
}

/// A request whose reservation has that fate, and is under way.
async fn reserving(world: &World, request: LockRequest, fate: Fate) -> Asked {
    world.server.next(Op::Reserve, [fate]);
    let request = ask(request);
    until(|| world.server.count(Op::Reserve) == 1).await;
    world.settle().await;
    request
}

#[tokio::test(start_paused = true)]
async fn a_request_that_is_dropped_before_its_guard_reserves_nothing() {
    // Also after an outage that is longer than its ttl.
    for (fate, failures) in [(Fate::Hang, 0), (Fate::LoseReply, 0), (Fate::LoseReply, 3)] {
        let world = world();
        let request = reserving(&world, job(&world), fate).await;
        assert!(world.server.keeps("job"), "it is held meanwhile");
        world.server.next(Op::Release, vec![Fate::Fail; failures]);
        request.abort();
        assert!(request.await.unwrap_err().is_cancelled());
        if failures > 0 {
            until(|| world.server.count(Op::Release) == 1).await;
            world.hand.advance(2 * TTL);
        }
        world.locks.drain().await;
        assert!(!world.server.keeps("job"), "{fate:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn what_cannot_have_been_reserved_is_released_no_longer_than_for_its_ttl() {
    let world = world();
    world.server.next(Op::Try, [Fate::Fail]);
    world.server.next(Op::Release, [Fate::Fail; 1_000]);
    fails!(job(&world).no_wait().await, LockError::Unavailable { .. });
    world.hand.advance(2 * TTL);
    let drained = tokio::time::timeout(TTL, world.locks.drain()).await;
    drained.expect("it is given up");
}

#[tokio::test(start_paused = true)]
async fn a_reservation_that_fails_or_comes_too_late_is_an_error_and_leaves_nothing() {
    for (fate, lost) in [
        (Fate::Fail, None),
        (Fate::AnswerAfter(2 * SECOND), Some(LossReason::MaxHold)),
        (Fate::DeliverAfter(SECOND), Some(LossReason::NotHeld)),
    ] {
        let world = world();
        let request = reserving(&world, job(&world).max_hold(SECOND * 3 / 2), fate).await;
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
    fails!(guard.release().await, LockError::Unavailable { .. });
    world.locks.drain().await;
    assert_eq!(world.server.count(Op::Release), 3);
    world.hand.advance(2 * TTL);
    assert!(world.server.keeps("job") && world.locks.try_lock("job").await.unwrap().is_none());
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
