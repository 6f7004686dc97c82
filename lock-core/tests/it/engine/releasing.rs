//! What is let go of is let go of, whatever happens on the way.

use std::future::IntoFuture;
use std::time::Duration;

use lock_core::{LockError, ReleaseOutcome};
use tokio::time::Instant;

use super::scripted::{Fate, HANGING, OP_TIMEOUT, Op, SECOND, World};

#[tokio::test(start_paused = true)]
async fn a_failed_release_is_told_and_tried_again() {
    for fate in [Fate::Fail, Fate::Panic] {
        let world = World::new();
        let guard = world.locks.lock("a").await.unwrap();
        world.server.next(Op::Release, [fate; 2]);
        assert!(matches!(guard.release().await, Err(LockError::Unavailable { .. })));
        assert!(world.server.keeps("a"));
        world.pass(SECOND).await;
        assert!(!world.server.keeps("a"));
        assert_eq!(world.server.count(Op::Release), 3);
    }
}

#[tokio::test(start_paused = true)]
async fn a_failed_release_fails_no_wait_that_has_time_left() {
    let world = World::new();
    let guard = world.locks.lock("a").await.unwrap();
    let wait = || {
        let request = world.locks.lock("a").wait_for(30 * SECOND);
        tokio::spawn(async move { request.await?.release().await })
    };
    let mut waits = vec![wait()];
    world.settle().await;
    world.server.next(Op::Release, [Fate::FailAfter(SECOND)]);
    // Nor do the attempts of the first in line that follow.
    world.server.next(Op::Try, [Fate::Fail; 3]);
    drop(guard);
    world.settle().await;
    // These arrive while the release is under way, and do not know that the lock was held.
    waits.extend((0..5).map(|_| wait()));
    let cannot_wait = tokio::spawn(world.locks.lock("a").no_wait().into_future());
    world.settle().await;
    for wait in waits {
        assert_eq!(wait.await.unwrap().unwrap(), ReleaseOutcome::Released);
    }
    let error = cannot_wait.await.unwrap().unwrap_err();
    assert!(matches!(error, LockError::Unavailable { .. }), "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_wait_that_ends_after_a_failed_release_says_why_once() {
    let world = World::new();
    let guard = world.locks.lock("a").await.unwrap();
    let first = tokio::spawn(world.locks.lock("a").wait_for(3 * OP_TIMEOUT).into_future());
    world.settle().await;
    world.server.next(Op::Release, [Fate::Hang]);
    world.server.next(Op::Try, [Fate::Hang; 1000]);
    drop(guard);
    world.settle().await;
    // It was not told that the lock was held, so it waits for a first answer for as long as one request may take.
    let started = world.now();
    world.pass(OP_TIMEOUT / 2).await;
    let error = world.locks.lock("a").await.unwrap_err();
    assert_eq!(error.to_string(), "lock \"a\": acquire failed: no answer within 5s");
    assert_eq!(world.now().since(started).as_secs(), (OP_TIMEOUT * 3 / 2).as_secs());
    first.abort();
}

#[tokio::test(start_paused = true)]
async fn a_long_hold_without_contention_does_not_stand_back() {
    let world = World::with(|server| server.fair = false);
    let guard = world.locks.lock("a").await.unwrap();
    world.pass(SECOND).await;
    let started = world.now();
    guard.release().await.unwrap();
    world.locks.lock("a").await.unwrap().release().await.unwrap();
    assert!(world.now().since(started) < Duration::from_millis(10));
}

#[tokio::test(start_paused = true)]
async fn a_grant_that_arrives_during_a_shutdown_is_given_back() {
    let world = World::new();
    world.server.next(Op::Try, [Fate::AnswerAfter(SECOND)]);
    let request = tokio::spawn({
        let locks = world.locks.clone();
        async move { locks.lock("a").await }
    });
    world.settle().await;
    world.locks.shutdown().await.unwrap();
    assert!(matches!(request.await.unwrap(), Err(LockError::Closed { .. })));
    assert!(!world.server.keeps("a"));
}

#[tokio::test(start_paused = true)]
async fn a_client_whose_last_clone_is_gone_leaves_no_task_behind() {
    let world = World::new();
    drop(world.locks.lock("a").await.unwrap());
    world.settle().await;
    let before = tokio::runtime::Handle::current().metrics().num_alive_tasks();
    drop(world.locks);
    for _ in 0..50 {
        tokio::task::yield_now().await;
    }
    assert_eq!(
        tokio::runtime::Handle::current().metrics().num_alive_tasks(),
        before - 1,
        "the watchdog has ended"
    );
}

#[tokio::test(start_paused = true)]
async fn releases_that_hang_again_and_again_do_not_delay_others() {
    let world = World::new();
    let mut hanging = Vec::new();
    for lock in 0..500 {
        hanging.push(world.locks.lock(format!("{HANGING}{lock}")).await.unwrap());
    }
    drop(hanging);
    // By then each has been tried once.
    world.pass(5 * OP_TIMEOUT).await;
    for lock in 0..10 {
        let guard = world.locks.lock(lock.to_string()).await.unwrap();
        let started = world.now();
        guard.release().await.unwrap();
        assert!(world.now().since(started) < SECOND);
    }
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_releases_more_locks_than_the_server_can_within_one_limit() {
    const LOCKS: usize = 2_000;
    let world = World::new();
    let mut guards = Vec::new();
    for lock in 0..LOCKS {
        guards.push(world.locks.lock(lock.to_string()).await.unwrap());
    }
    // At most 128 are under way at once.
    world.server.next(Op::Release, vec![Fate::AnswerAfter(SECOND); LOCKS]);
    let started = world.now();
    world.locks.shutdown().await.unwrap();
    let took = world.now().since(started);
    assert!(took > 3 * OP_TIMEOUT, "{took:?}");
    assert!((0..LOCKS).all(|lock| !world.server.keeps(&lock.to_string())));
}

#[tokio::test(start_paused = true)]
async fn a_list_may_take_longer_than_one_request_and_ends_with_its_caller_or_client() {
    let world = World::new();
    let _guard = world.locks.lock("a").await.unwrap();
    world.server.next(Op::List, [Fate::AnswerAfter(3 * OP_TIMEOUT)]);
    assert_eq!(world.locks.list("").await.unwrap().len(), 1);

    let tasks = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
    let before = tasks();
    world.server.next(Op::List, [Fate::Hang; 2]);
    assert!(tokio::time::timeout(OP_TIMEOUT, world.locks.list("")).await.is_err());
    world.settle().await;
    assert_eq!(tasks(), before, "it goes on");

    let locks = world.locks.clone();
    let listing = tokio::spawn(async move { locks.list("").await });
    world.settle().await;
    let started = world.now();
    world.locks.shutdown().await.unwrap();
    assert!(world.now().since(started) < OP_TIMEOUT);
    assert!(matches!(listing.await.unwrap(), Err(LockError::Closed { .. })));
}

#[tokio::test(start_paused = true)]
async fn a_drain_waits_for_a_request_that_was_dropped_just_before() {
    let world = World::new();
    world.server.next(Op::Try, [Fate::AnswerAfter(SECOND)]);
    let request = tokio::time::timeout(Duration::ZERO, world.locks.lock("a").into_future());
    assert!(request.await.is_err());
    world.locks.drain().await;
    assert_eq!((world.server.keeps("a"), world.server.count(Op::Release)), (false, 1));
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_of_many_locks_ends_soon_if_the_server_answers_nothing() {
    const LOCKS: usize = 1_000;
    let world = World::new();
    let mut guards = Vec::new();
    for lock in 0..LOCKS {
        guards.push(world.locks.lock(lock.to_string()).await.unwrap());
    }
    world.server.next(Op::Release, vec![Fate::Hang; 10 * LOCKS]);
    world.server.next(Op::Close, [Fate::Hang]);
    let started = Instant::now();
    let error = world.locks.shutdown().await.unwrap_err().to_string();
    assert!(error.contains("1000 locks"), "{error}");
    assert!(started.elapsed() < 4 * OP_TIMEOUT, "{:?}", started.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_drain_ends_under_steady_releases() {
    let world = World::new();
    world.server.next(Op::Release, [Fate::AnswerAfter(SECOND); 1_000]);
    drop(world.locks.lock("first").await.unwrap());
    let steady = tokio::spawn({
        let locks = world.locks.clone();
        async move {
            for n in 0.. {
                drop(locks.lock(format!("n{n}")).await.unwrap());
                tokio::time::sleep(SECOND / 10).await;
            }
        }
    });
    tokio::time::sleep(SECOND / 2).await;
    // Both wait for what is under way, and for nothing after it.
    tokio::join!(world.locks.drain(), world.locks.drain());
    assert!(!world.server.keeps("first") && world.locks.stats().releasing > 0);
    steady.abort();
}
