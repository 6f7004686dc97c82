//! Who gets the lock, and what a failure on the way comes to.

use std::time::Duration;

use lock_core::{LockError, LockGuard, Locks};
use tokio::task::JoinHandle;

use super::scripted::{Fate, OP_TIMEOUT, Op, SECOND, TTL, World};

fn ask(locks: &Locks, name: &'static str) -> JoinHandle<Result<LockGuard, LockError>> {
    let locks = locks.clone();
    tokio::spawn(async move { locks.lock(name).await })
}

#[tokio::test(start_paused = true)]
async fn a_request_counts_as_waiting_from_its_first_step_to_its_end() {
    let world = World::new();
    world.server.client.set(world.locks.clone()).unwrap();
    let guard = world.locks.lock("a").await.unwrap();
    assert_eq!(
        (world.server.state().waiting.clone(), world.locks.stats().waiting),
        (vec![1], 0)
    );
    let waits = ask(&world.locks, "a");
    world.settle().await;
    assert_eq!(world.locks.stats().waiting, 1);
    guard.release().await.unwrap();
    waits.await.unwrap().unwrap().release().await.unwrap();
    assert_eq!(
        (world.server.state().waiting.clone(), world.locks.stats().waiting),
        (vec![1, 1], 0)
    );
}

#[tokio::test(start_paused = true)]
async fn a_try_that_meets_a_siblings_request_awaits_its_answer() {
    let world = World::new();
    world.server.next(Op::Try, [Fate::AnswerAfter(SECOND)]);
    let first = ask(&world.locks, "a");
    world.settle().await;
    let started = world.now();
    assert!(world.locks.try_lock("a").await.unwrap().is_none(), "the sibling got it");
    let waited = world.now().since(started);
    assert!(waited >= SECOND && waited < 2 * SECOND, "{waited:?}");
    assert!(first.await.unwrap().is_ok());
    assert_eq!(world.server.count(Op::Try), 1);
}

#[tokio::test(start_paused = true)]
async fn a_try_after_a_drop_awaits_the_release() {
    let world = World::new();
    world.server.next(Op::Release, [Fate::AnswerAfter(SECOND)]);
    drop(world.locks.lock("a").await.unwrap());
    assert!(world.locks.try_lock("a").await.unwrap().is_some());
}

#[tokio::test(start_paused = true)]
async fn a_held_name_is_refused_to_a_sibling_without_asking() {
    let world = World::new();
    let guard = world.locks.lock("a").label("nightly").await.unwrap();
    let error = world.locks.lock("a").no_wait().await.unwrap_err();
    let LockError::TimedOut {
        holder: Some(holder), ..
    } = error
    else {
        panic!("{error}")
    };
    assert_eq!(
        (holder.label.as_deref(), holder.token),
        (Some("nightly"), Some(guard.token()))
    );
    assert_eq!(world.server.count(Op::Try), 1);
}

#[tokio::test(start_paused = true)]
async fn a_first_failure_that_may_pass_is_waited_out() {
    for fate in [Fate::Fail, Fate::Refuse] {
        let world = World::new();
        let request = || world.locks.lock("a");
        for request in [request(), request().wait_for(30 * SECOND)] {
            world.server.next(Op::Try, [fate; 3]);
            assert!(request.await.unwrap().is_held());
            world.settle().await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_server_that_fails_or_is_silent_to_the_end_of_the_wait_is_unavailable_then() {
    for (fate, wait, end) in [
        (Fate::Fail, None, OP_TIMEOUT),
        (Fate::Fail, Some(Duration::ZERO), Duration::ZERO),
        (Fate::Fail, Some(SECOND / 2), SECOND / 2),
        (Fate::Fail, Some(12 * SECOND), 12 * SECOND),
        (Fate::Hang, None, OP_TIMEOUT),
        (Fate::Hang, Some(Duration::ZERO), OP_TIMEOUT),
        // A first response has a second.
        (Fate::Hang, Some(SECOND / 10), SECOND),
    ] {
        let world = World::new();
        world.server.next(Op::Try, [fate; 1_000]);
        let is_silent = matches!(fate, Fate::Hang);
        if is_silent {
            world.server.next(Op::Release, [fate; 1_000]);
        }
        let request = world.locks.lock("a");
        let request = match wait {
            Some(limit) => request.wait_for(limit),
            None => request,
        };
        let started = world.now();
        // Others that wait for the same answer.
        let waits: Vec<_> = (0..4).map(|_| tokio::spawn(request.clone().into_future())).collect();
        for wait in waits {
            let error = wait.await.unwrap().unwrap_err();
            assert!(matches!(error, LockError::Unavailable { .. }), "{error}");
            assert_eq!(std::error::Error::source(&error).is_none(), is_silent);
        }
        let waited = world.now().since(started);
        assert!(
            waited + SECOND / 20 >= end && waited < end + SECOND + SECOND / 2,
            "{waited:?} for {end:?}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn what_was_not_sent_needs_no_release() {
    let world = World::new();
    world.server.next(Op::Try, [Fate::Refuse; 1_000]);
    for _ in 0..10 {
        assert!(world.locks.try_lock("a").await.is_err());
    }
    world.settle().await;
    assert_eq!(world.server.count(Op::Release), 0);
    assert_eq!(world.locks.stats().releasing, 0);
    world.server.heal();
    // What may have been sent before does.
    world.server.next(Op::Try, [Fate::Fail]);
    world.server.next(Op::Try, [Fate::Refuse; 1_000]);
    assert!(world.locks.try_lock("b").await.is_err());
    world.settle().await;
    assert_eq!(world.server.count(Op::Release), 1);
}

#[tokio::test(start_paused = true)]
async fn credentials_that_are_refused_end_a_new_client_and_not_one_that_was_connected() {
    let world = World::new();
    world.server.next(Op::Try, [Fate::Deny]);
    let error = world.locks.lock("a").wait_for(30 * SECOND).await.unwrap_err();
    assert!(matches!(error, LockError::Configuration { .. }), "{error}");

    drop(world.locks.lock("b").await.unwrap());
    world.server.next(Op::Try, [Fate::Deny; 3]);
    let waits: Vec<_> = (0..3).map(|_| ask(&world.locks, "a")).collect();
    for wait in waits {
        wait.await.unwrap().unwrap().release().await.unwrap();
    }
    // Leaders go on, too, for as long as it takes.
    let led = tokio::spawn(world.locks.lock("c").lead(|term| async move { term.token() }));
    world.server.next(Op::Try, [Fate::Deny; 40]);
    led.await.unwrap().unwrap();

    world.server.next(Op::Try, [Fate::Deny; 1_000]);
    let error = world.locks.lock("a").wait_for(3 * SECOND).await.unwrap_err();
    assert!(
        error.is_retryable() && error.to_string().contains("password"),
        "{error}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_grant_that_arrives_after_its_lease_ran_out_does_not_count() {
    let world = World::new();
    world.server.next(Op::Try, [Fate::AnswerAfter(2 * SECOND); 9]);
    let error = world.locks.lock("a").ttl(SECOND).await.unwrap_err();
    assert!(matches!(error, LockError::Unavailable { .. }), "{error}");
    assert!(error.to_string().contains("raise the ttl"), "{error}");
    // The last request is not cut off.
    world.pass(2 * SECOND).await;
    assert_eq!(world.server.count(Op::Release), 1);
    assert_eq!(world.locks.stats().held, 0);
}

#[tokio::test(start_paused = true)]
async fn a_wait_goes_on_after_failures_and_answers_those_that_do_not_wait() {
    let world = World::new();
    world.server.occupy("a", 100 * TTL);
    world.server.next(Op::Acquire, [Fate::Fail, Fate::Panic, Fate::Fail]);
    let waiting = [ask(&world.locks, "a"), ask(&world.locks, "a")];
    world.settle().await;
    // Also while the last request has failed: the server is asked then.
    assert!(world.locks.try_lock("a").await.unwrap().is_none());
    // Far longer than a first answer may take.
    world.pass(2 * OP_TIMEOUT).await;
    let asked = world.server.count(Op::Try);
    assert!(world.locks.try_lock("a").await.unwrap().is_none());
    assert_eq!(world.server.count(Op::Try), asked, "another task waits there");
    world.server.take_away("a");
    for task in waiting {
        assert!(task.await.unwrap().unwrap().is_held());
    }
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_failed_at_the_end_of_its_wait_is_released_and_not_asked_for_again() {
    for limit in [Duration::ZERO, 2 * SECOND] {
        let world = World::new();
        world.server.occupy("a", 100 * TTL);
        let failing = if limit.is_zero() { Op::Try } else { Op::Acquire };
        if failing == Op::Try {
            world.server.next(failing, [Fate::FailAfter(SECOND)]);
        }
        let first = tokio::spawn(world.locks.lock("a").wait_for(limit).into_future());
        world.settle().await;
        // For a claim of its own: another one would put off the end of the wait.
        let second = tokio::spawn(world.locks.lock("a").ttl(2 * TTL).into_future());
        if failing == Op::Acquire {
            world.pass(limit - SECOND / 2).await;
            world.server.next(failing, [Fate::FailAfter(SECOND)]);
        }
        let error = first.await.unwrap().unwrap_err();
        assert!(matches!(error, LockError::Unavailable { .. }), "{error}");
        // The backend may have begun to release the claim, and that may arrive late.
        world.pass(2 * SECOND).await;
        let asked = world.server.state().asked.clone();
        assert!(
            asked.len() > 1 && asked[1..].iter().all(|owner| *owner != asked[0]),
            "{asked:?}"
        );
        assert_eq!(world.server.count(Op::Release), 1);
        assert!(!second.is_finished());
    }
}
