//! What is let go of is let go of, whatever happens on the way.

use std::time::Duration;

use lock_core::{LockError, ReleaseOutcome};
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep, timeout};

use super::scripted::{Fate, HANGING, OP_TIMEOUT, Op, SECOND, TTL, World, ask, granted};

#[tokio::test(start_paused = true)]
async fn a_failed_release_is_told_and_repeated_until_its_lease_must_be_over_or_while_other_locks_keep_it() {
    for (shares, fate) in [(false, Fate::Panic), (true, Fate::Fail)] {
        let world = World::with(|kind| kind.shares = shares);
        let kept = world.held("kept").await;
        let guard = world.held("a").await;
        world.server.next(Op::Release, [fate; 1_000]);
        fails!(guard.release().await, LockError::Unavailable { .. });
        world.pass(3 * TTL).await;
        let tries = world.server.count(Op::Release);
        world.pass(TTL).await;
        assert_eq!(world.server.count(Op::Release) > tries, shares);
        assert!(kept.is_held());
        world.server.heal();
        world.locks.drain().await;
        assert!(!world.server.keeps("a"));
    }
}

#[tokio::test(start_paused = true)]
async fn a_failed_release_fails_no_wait_that_has_time_left() {
    let world = World::new();
    let guard = world.held("a").await;
    let wait = || {
        let request = world.lock("a").wait_for(30 * SECOND);
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
    let cannot_wait = ask(world.lock("a").no_wait());
    for wait in waits {
        assert_eq!(wait.await.unwrap().unwrap(), ReleaseOutcome::Released);
    }
    fails!(cannot_wait.await.unwrap(), LockError::Unavailable { .. });
}

#[tokio::test(start_paused = true)]
async fn releases_that_hang_again_and_again_and_a_long_hold_delay_no_other_lock() {
    let world = World::with(|kind| kind.unfair = true);
    let mut hanging = Vec::new();
    for lock in 0..500 {
        hanging.push(world.held(&format!("{HANGING}{lock}")).await);
    }
    drop(hanging);
    // By then each has been tried once.
    world.pass(5 * OP_TIMEOUT).await;
    for lock in 0..10 {
        let guard = world.held(&lock.to_string()).await;
        world.pass(SECOND).await;
        let started = world.now();
        guard.release().await.unwrap();
        drop(world.held(&lock.to_string()).await);
        let took = world.now().since(started);
        assert!(took < SECOND / 100, "{took:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_returns_what_is_granted_meanwhile_and_a_client_that_ends_leaves_no_task() {
    let world = World::new();
    drop(world.held("b").await);
    world.settle().await;
    let before = Handle::current().metrics().num_alive_tasks();
    drop(world.locks);
    for _ in 0..50 {
        tokio::task::yield_now().await;
    }
    let after = Handle::current().metrics().num_alive_tasks();
    assert_eq!(after, before - 1, "the watchdog has ended");

    let world = World::new();
    world.server.next(Op::Try, [Fate::AnswerAfter(SECOND)]);
    let request = ask(world.lock("a"));
    world.settle().await;
    world.locks.shutdown().await.unwrap();
    fails!(request.await.unwrap(), LockError::Closed { .. });
    assert!(!world.server.keeps("a"));
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_of_many_locks_takes_as_long_as_the_server_responds() {
    const LOCKS: usize = 2_000;
    let world = World::new();
    let _guards = world.held_by_number(LOCKS).await;
    // At most 128 are under way at once.
    world.server.next(Op::Release, vec![Fate::AnswerAfter(SECOND); LOCKS]);
    let started = world.now();
    world.locks.shutdown().await.unwrap();
    let took = world.now().since(started);
    assert!(took > 3 * OP_TIMEOUT, "{took:?}");
    assert!((0..LOCKS).all(|lock| !world.server.keeps(&lock.to_string())));

    let world = World::new();
    let _guards = world.held_by_number(LOCKS).await;
    world.server.next(Op::Release, vec![Fate::Hang; 10 * LOCKS]);
    world.server.next(Op::Close, [Fate::Hang]);
    let started = Instant::now();
    let error = world.locks.shutdown().await.unwrap_err().to_string();
    assert!(error.contains("2000 locks"), "{error}");
    assert!(started.elapsed() < 4 * OP_TIMEOUT, "{:?}", started.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_list_may_take_longer_than_one_request_and_ends_with_its_caller_or_client() {
    let world = World::new();
    let _guard = world.held("a").await;
    world.server.next(Op::List, [Fate::AnswerAfter(3 * OP_TIMEOUT)]);
    assert_eq!(world.locks.list("").await.unwrap().len(), 1);

    let tasks = || Handle::current().metrics().num_alive_tasks();
    let before = tasks();
    world.server.next(Op::List, [Fate::Hang; 2]);
    assert!(timeout(OP_TIMEOUT, world.locks.list("")).await.is_err());
    world.settle().await;
    assert_eq!(tasks(), before, "it goes on");

    let locks = world.locks.clone();
    let listing = tokio::spawn(async move { locks.list("").await });
    world.settle().await;
    let started = world.now();
    world.locks.shutdown().await.unwrap();
    assert!(world.now().since(started) < OP_TIMEOUT);
    fails!(listing.await.unwrap(), LockError::Closed { .. });
}

#[tokio::test(start_paused = true)]
async fn a_drain_waits_for_requests_that_were_dropped_also_with_others_behind_them() {
    for has_another in [false, true] {
        let world = World::new();
        world.server.next(Op::Try, [Fate::AnswerAfter(SECOND)]);
        let mut first = world.lock("a").label("first").into_future();
        assert!(timeout(Duration::ZERO, &mut first).await.is_err());
        let second = has_another.then(|| ask(world.lock("a").label("second")));
        world.settle().await;
        drop(first);
        let started = world.now();
        world.locks.drain().await;
        assert!(world.now().since(started) >= SECOND - SECOND / 10);
        assert_eq!(world.server.count(Op::Release), 1);
        if let Some(second) = second {
            assert!(granted(second).await.is_held());
        } else {
            assert!(!world.server.keeps("a"));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_drain_ends_under_steady_releases() {
    let world = World::new();
    world.server.next(Op::Release, [Fate::AnswerAfter(SECOND); 1_000]);
    drop(world.held("first").await);
    let locks = world.locks.clone();
    let steady = tokio::spawn(async move {
        for n in 0.. {
            drop(locks.lock(format!("n{n}")).await.unwrap());
            sleep(SECOND / 10).await;
        }
    });
    sleep(SECOND / 2).await;
    // Both wait for what is under way, and for nothing after it.
    tokio::join!(world.locks.drain(), world.locks.drain());
    assert!(!world.server.keeps("first") && world.locks.stats().releasing > 0);
    steady.abort();
}

#[tokio::test(start_paused = true)]
async fn who_waits_for_a_release_of_the_same_client_is_not_refused_by_what_it_releases() {
    let world = World::new();
    let guard = world.held("a").await;
    let slow = Fate::AnswerAfter(Duration::from_millis(250));
    world.server.next(Op::Release, [slow]);
    world.server.next(Op::Try, [slow]);
    drop(guard);
    world.settle().await;
    assert!(world.lock("a").wait_for(SECOND * 3 / 10).await.unwrap().is_held());
}
