//! Several locks at once, leading, and the cancellation token.

use std::future::pending;
use std::time::Duration;

use lock_core::{LockError, Locks, LossReason, MemoryLock};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::{paused, until};

const SECOND: Duration = Duration::from_secs(1);
/// Of paused time, which timers round to milliseconds.
const PRECISION: Duration = Duration::from_millis(20);

fn locks() -> (MemoryLock, Locks) {
    let memory = paused::memory();
    let locks = paused::client(memory.client());
    (memory, locks)
}

#[tokio::test(start_paused = true)]
async fn all_locks_are_held_together_and_released_together() {
    let (_, locks) = locks();
    let shop = locks.scoped("shop");
    let all = shop.lock_all(["b", "a", "b"]).label("both").await.unwrap();
    let names: Vec<_> = all.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["shop/a", "shop/b"]);
    let token = all.token("a").unwrap();
    assert!(all.token("c").is_none() && all.token("shop/a").is_none());
    assert!(all.is_held() && all.remaining() > 20 * SECOND);
    for name in ["a", "b"] {
        assert!(shop.try_lock(name).await.unwrap().is_none());
        assert_eq!(shop.holder(name).await.unwrap().unwrap().label.as_deref(), Some("both"));
    }
    all.release().await.unwrap();
    let again = shop.lock_all(["a"]).await.unwrap();
    assert!(again.token("a").unwrap() > token);
    drop(again);
    // None at all is held for ever.
    let none = locks.lock_all([""; 0]).await.unwrap();
    assert_eq!(none.run(async { 7 }).await.unwrap(), 7);
    none.release().await.unwrap();
    locks.drain().await;
    assert_eq!(locks.list("").await.unwrap(), []);
}

/// One limit for all of them together: each next lock has what the ones before have left.
#[tokio::test(start_paused = true)]
async fn the_wait_for_all_is_one_wait() {
    let (_, locks) = locks();
    let limit = 6 * SECOND;
    let (first, _second) = (locks.lock("a").await.unwrap(), locks.lock("b").await.unwrap());
    let began = Instant::now();
    let waits = tokio::spawn(locks.lock_all(["a", "b"]).wait_for(limit).into_future());
    sleep(limit / 2).await;
    first.release().await.unwrap();
    let busy = waits.await.unwrap().unwrap_err();
    assert!(busy.is_busy() && busy.name().unwrap().as_str() == "b", "{busy}");
    // With a wait of its own for each it would take half of the limit more.
    let waited = began.elapsed();
    assert!((limit..limit + PRECISION).contains(&waited), "{waited:?}");
}

#[tokio::test(start_paused = true)]
async fn of_all_or_none_none_is_left_when_one_is_lost_or_busy_or_unusable() {
    let (_, locks) = locks();
    let held = locks.lock("b").await.unwrap();
    let waits = tokio::spawn(locks.lock_all(["a", "b"]).into_future());
    // "a" is held, and "b" waited for.
    until(|| locks.stats().held == 2 && locks.stats().waiting > 0).await;
    locks.force_release("a").await.unwrap();
    fails!(waits.await.unwrap(), LockError::Lost { name, .. } if name.as_str() == "a");

    let busy = locks.lock_all(["a", "b", "c"]).no_wait().await.unwrap_err();
    assert_eq!(busy.to_string(), "lock \"b\" is already held");
    fails!(
        locks.lock_all(["a", "b"]).wait_for(PRECISION).await,
        LockError::TimedOut { .. }
    );
    fails!(locks.lock_all(["a", "two\nlines"]).await, LockError::InvalidName { .. });
    fails!(
        locks.lock_all(["a"]).ttl(Duration::ZERO).await,
        LockError::InvalidTtl { .. }
    );
    let given_up = timeout(PRECISION, locks.lock_all(["a", "b"]).into_future()).await;
    assert!(given_up.is_err());
    locks.drain().await;
    let left = locks.list("").await.unwrap();
    assert_eq!(left.len(), 1);
    assert_eq!(left[0].token, Some(held.token()));
}

#[tokio::test(start_paused = true)]
async fn a_loss_ends_the_whole_and_a_release_tells_it() {
    let (_, locks) = locks();
    let all = locks.lock_all(["a", "b"]).await.unwrap();
    locks.force_release("b").await.unwrap();
    let (name, reason) = all.lost().await;
    assert_eq!((name.as_str(), reason), ("b", LossReason::NotHeld));
    assert!(!all.is_held() && all.remaining().is_zero());
    fails!(all.release().await, LockError::Lost { name, .. } if name.as_str() == "b");
}

#[tokio::test(start_paused = true)]
async fn a_stop_lets_a_leader_finish_its_step_and_a_candidate_leave() {
    let (memory, locks) = locks();
    let other = paused::client(memory.client());
    let stop = CancellationToken::new();
    let lead = |locks: &Locks| {
        let stop = stop.clone().cancelled_owned();
        tokio::spawn(locks.lock("leader").lead_until(stop, |term| async move {
            let mut steps = 0;
            while !term.is_stopping() {
                sleep(SECOND).await;
                steps += 1;
            }
            term.stopping().await;
            steps
        }))
    };
    let leader = lead(&locks);
    until(|| locks.stats().held == 1).await;
    let candidate = lead(&other);
    until(|| other.stats().waiting == 1).await;
    sleep(SECOND * 5 / 2).await;
    stop.cancel();
    assert_eq!(candidate.await.unwrap().unwrap(), None);
    assert_eq!(leader.await.unwrap().unwrap(), Some(3));
    until(|| locks.stats().held + other.stats().waiting == 0).await;
    assert_eq!(locks.list("").await.unwrap(), []);
    // One that loses its lock while it stops does not begin again.
    let stop = CancellationToken::new();
    let stopped = stop.clone().cancelled_owned();
    let leader = tokio::spawn(locks.lock("leader").lead_until(stopped, |_| pending::<()>()));
    until(|| locks.stats().held == 1).await;
    stop.cancel();
    memory.expire(&"leader".parse().unwrap());
    assert_eq!(leader.await.unwrap().unwrap(), None);
}

#[tokio::test(start_paused = true)]
async fn terms_that_end_at_once_follow_each_other_with_growing_pauses() {
    let (memory, locks) = locks();
    let name = "leader".parse().unwrap();
    let mut terms = 0;
    let leads = locks.lock("leader").lead(|_| {
        terms += 1;
        memory.expire(&name);
        pending::<()>()
    });
    assert!(timeout(60 * SECOND, leads).await.is_err());
    assert!((40..140).contains(&terms), "{terms} terms in a minute");
}

#[tokio::test(start_paused = true)]
async fn a_campaign_waits_out_what_may_pass_and_not_what_will_not() {
    let (memory, locks) = locks();
    memory.set_reachable(false);
    let leads = tokio::spawn(locks.lock("leader").lead(|_| async { 7 }));
    // Each attempt waits for an op_timeout by itself.
    until(|| locks.stats().failed == 3).await;
    memory.set_reachable(true);
    assert_eq!(leads.await.unwrap().unwrap(), 7);
    memory.set_reachable(false);
    fails!(
        locks.lock("leader").no_wait().lead(|_| async { 7 }).await,
        LockError::Unavailable { .. }
    );
    fails!(
        locks.lock("two\nlines").lead(|_| async { 7 }).await,
        LockError::InvalidName { .. }
    );
}

#[tokio::test(start_paused = true)]
async fn a_cancellation_token_is_cancelled_with_the_hold() {
    let (_, locks) = locks();
    let guard = locks.lock("a").await.unwrap();
    let token = guard.cancellation_token();
    assert!(!token.is_cancelled());
    locks.force_release("a").await.unwrap();
    token.cancelled().await;
    assert!(!guard.is_held());

    let guard = locks.lock("b").await.unwrap();
    let token = guard.cancellation_token();
    guard.release().await.unwrap();
    token.cancelled().await;
}
