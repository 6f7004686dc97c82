//! Who gets the lock, and what a failure on the way comes to.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use lock_core::{LockError, LossReason};

use super::scripted::{Fate, OP_TIMEOUT, Op, SECOND, TTL, World, ask, granted, limited};

#[tokio::test(start_paused = true)]
async fn a_try_awaits_the_answer_of_a_siblings_request_and_of_a_release() {
    let world = World::new();
    world.server.next(Op::Try, [Fate::AnswerAfter(SECOND)]);
    let first = ask(world.lock("a").label("nightly"));
    world.settle().await;
    assert_eq!(world.locks.stats().waiting, 1);
    let started = world.now();
    assert!(world.locks.try_lock("a").await.unwrap().is_none(), "the sibling got it");
    let waited = world.now().since(started);
    assert!((SECOND..2 * SECOND).contains(&waited), "{waited:?}");
    let guard = granted(first).await;
    // What is held here needs no request.
    let busy = fails!(world.lock("a").no_wait().await, LockError::TimedOut { .. });
    let holder = busy.holder().unwrap();
    assert_eq!(
        (holder.label.as_deref(), holder.token),
        (Some("nightly"), Some(guard.token()))
    );
    assert_eq!((world.server.count(Op::Try), world.locks.stats().waiting), (1, 0));
    world.server.next(Op::Release, [Fate::AnswerAfter(SECOND)]);
    drop(guard);
    assert!(world.locks.try_lock("a").await.unwrap().is_some());
}

#[tokio::test(start_paused = true)]
async fn a_first_failure_that_may_pass_is_waited_out() {
    for fate in [Fate::Fail, Fate::Refuse] {
        let world = World::new();
        for request in [world.lock("a"), world.lock("a").wait_for(30 * SECOND)] {
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
        let request = limited(world.lock("a"), wait);
        let started = world.now();
        // Others wait for the same answer.
        let waits: Vec<_> = (0..4).map(|_| ask(request.clone())).collect();
        for wait in waits {
            let error = fails!(wait.await.unwrap(), LockError::Unavailable { .. });
            let text = format!("{error:#}");
            let silence = format!("lock \"a\": acquire failed: no answer within {end:?}");
            assert_eq!(text == silence, is_silent, "{text}");
        }
        let waited = world.now().since(started) + SECOND / 20;
        assert!((end..end + SECOND * 3 / 2).contains(&waited), "{waited:?} for {end:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn what_fails_after_it_was_busy_does_not_lengthen_the_wait() {
    for (fate, tenths, longer) in [(Fate::Hang, 1..2, SECOND * 3 / 2), (Fate::Fail, 20..40, SECOND / 10)] {
        let world = World::new();
        world.server.occupy("a", 100 * TTL);
        for tenths in tenths {
            world.server.heal();
            world.server.next(Op::Acquire, [fate; 1_000]);
            let (limit, started) = (tenths * SECOND / 10, world.now());
            let error = world.lock("a").wait_for(limit).await.unwrap_err();
            assert!(!error.is_busy() || matches!(fate, Fate::Fail), "{error}");
            let over = world.now().since(started + limit);
            assert!(over <= longer, "{over:?} beyond {limit:?}");
        }
        world.locks.drain().await;
        assert!(world.server.count(Op::Release) > 0);
    }
}

#[tokio::test(start_paused = true)]
async fn what_was_not_sent_needs_no_release() {
    let world = World::new();
    world.server.next(Op::Try, [Fate::Refuse; 1_000]);
    for _ in 0..10 {
        assert!(world.locks.try_lock("a").await.is_err());
    }
    world.locks.drain().await;
    assert_eq!(world.server.count(Op::Release), 0);
    // What may have been sent before does, and what was told that the lock is busy.
    world.server.heal();
    world.server.next(Op::Try, [Fate::Fail, Fate::Refuse, Fate::Refuse]);
    assert!(world.locks.try_lock("b").await.is_err());
    world.locks.drain().await;
    assert_eq!(world.server.count(Op::Release), 1);
    world.server.heal();
    world.server.occupy("a", 10 * TTL);
    world.server.next(Op::Acquire, [Fate::Refuse]);
    world.server.next(Op::Try, [Fate::AnswerAfter(SECOND / 1_000)]);
    let waits = ask(world.lock("a"));
    crate::until(|| world.server.count(Op::Acquire) == 1).await;
    world.settle().await;
    waits.abort();
    world.settle().await;
    world.locks.drain().await;
    assert_eq!(world.server.count(Op::Release), 2);
}

#[tokio::test(start_paused = true)]
async fn credentials_that_are_refused_end_a_new_client_and_not_one_that_was_connected() {
    let world = World::new();
    world.server.next(Op::Try, [Fate::Deny]);
    fails!(
        world.lock("a").wait_for(30 * SECOND).await,
        LockError::Configuration { .. }
    );
    drop(world.held("b").await);
    world.server.next(Op::Try, [Fate::Deny; 3]);
    let waits: Vec<_> = (0..3).map(|_| ask(world.lock("a"))).collect();
    for wait in waits {
        // Nor does a release that is refused end a wait.
        world.server.next(Op::Release, [Fate::Deny; 4]);
        drop(granted(wait).await);
    }
    // Leaders go on, too, for as long as it takes.
    let led = tokio::spawn(world.lock("c").lead(|term| async move { term.token() }));
    world.server.next(Op::Try, [Fate::Deny; 40]);
    led.await.unwrap().unwrap();
    world.server.next(Op::Try, [Fate::Deny; 1_000]);
    let error = world.lock("a").wait_for(3 * SECOND).await.unwrap_err();
    assert!(
        error.is_retryable() && error.to_string().contains("password"),
        "{error}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_grant_that_is_late_or_of_another_claim_does_not_count_and_is_released() {
    for (fates, grants_another_claim, says) in [(9, false, "raise the ttl"), (0, true, "another claim")] {
        let world = World::with(|kind| kind.grants_another_claim = grants_another_claim);
        world.server.next(Op::Try, vec![Fate::AnswerAfter(2 * SECOND); fates]);
        let error = fails!(world.lock("a").ttl(SECOND).await, LockError::Unavailable { .. });
        assert!(error.to_string().contains(says), "{error}");
        // The last request is not cut off.
        world.pass(2 * SECOND).await;
        world.locks.drain().await;
        assert!(world.server.count(Op::Release) > 0 && !world.server.keeps("a"));
        assert_eq!(world.locks.stats().held, 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_wait_goes_on_after_failures_and_answers_those_that_do_not_wait() {
    let world = World::new();
    world.server.occupy("a", 100 * TTL);
    world.server.next(Op::Acquire, [Fate::Fail, Fate::Panic, Fate::Fail]);
    let waiting = [ask(world.lock("a")), ask(world.lock("a"))];
    world.settle().await;
    // Also while the last request has failed: the server is asked then.
    assert!(world.locks.try_lock("a").await.unwrap().is_none());
    // Far longer than a first answer may take.
    world.pass(2 * OP_TIMEOUT).await;
    let asked = world.server.count(Op::Try);
    assert!(world.locks.try_lock("a").await.unwrap().is_none());
    assert_eq!(world.server.count(Op::Try), asked, "another task waits there");
    // A server that went down is not called busy.
    world.server.next(Op::Acquire, [Fate::Fail; 1_000]);
    world.settle().await;
    world.server.next(Op::Try, [Fate::Fail; 1_000]);
    world.pass(2 * TTL).await;
    for wait in [Duration::ZERO, SECOND] {
        fails!(world.lock("a").wait_for(wait).await, LockError::Unavailable { .. });
    }
    world.server.heal();
    world.server.take_away("a");
    for asked in waiting {
        assert!(granted(asked).await.is_held());
    }
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_failed_at_the_end_of_its_wait_is_released_and_not_asked_for_again() {
    for limit in [Duration::ZERO, 2 * SECOND] {
        let world = World::new();
        world.server.occupy("a", 100 * TTL);
        let failure = [Fate::FailAfter(SECOND)];
        if limit.is_zero() {
            world.server.next(Op::Try, failure);
        }
        let first = ask(world.lock("a").wait_for(limit));
        world.settle().await;
        // For a claim of its own: another one would put off the end of the wait.
        let second = ask(world.lock("a").ttl(2 * TTL));
        if !limit.is_zero() {
            world.pass(limit - SECOND / 2).await;
            world.server.next(Op::Acquire, failure);
        }
        fails!(first.await.unwrap(), LockError::Unavailable { .. });
        // The backend may have begun to release the claim, and that may arrive late.
        world.pass(2 * SECOND).await;
        let asked = world.server.script().asked.clone();
        assert!(asked.len() > 1 && !asked[1..].contains(&asked[0]), "{asked:?}");
        assert_eq!(world.server.count(Op::Release), 1);
        assert!(!second.is_finished());
    }
}

#[tokio::test(start_paused = true)]
async fn a_sleep_of_the_machine_past_the_ttl_ends_the_work_at_once_and_is_told_within_a_second() {
    let world = World::new();
    let guard = world.held("a").await;
    let steps = AtomicUsize::new(0);
    let work = async {
        world.hand.advance(TTL);
        loop {
            tokio::task::yield_now().await;
            steps.fetch_add(1, Ordering::SeqCst);
        }
    };
    let lost: Result<(), _> = guard.run(work).await;
    fails!(
        lost,
        LockError::Lost {
            reason: LossReason::Expired,
            ..
        }
    );
    assert_eq!(steps.into_inner(), 0);
    let guard = world.held("b").await;
    world.pass(SECOND).await;
    world.hand.advance(TTL);
    let woken = world.now();
    assert_eq!(guard.lost().await, LossReason::Expired);
    assert!(world.now().since(woken) <= SECOND + SECOND / 10);
}
