//! Several locks at once, leading, repeated attempts, and the token of cancellation, on the backend in memory.

use std::time::Duration;

use lock_core::{LockError, Locks, LossReason};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::{paused, until};

/// Of paused time, which timers round to milliseconds.
const PRECISION: Duration = Duration::from_millis(20);

fn locks() -> Locks {
    paused::client(paused::memory())
}

#[tokio::test(start_paused = true)]
async fn all_locks_are_held_together_and_released_together() {
    let locks = locks();
    let shop = locks.scoped("shop");
    let all = shop.lock_all(["b", "a", "b"]).label("both").await.unwrap();
    let names: Vec<_> = all.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["shop/a", "shop/b"]);
    let token = all.token("a").unwrap();
    assert!(
        all.token("c").is_none()
            && all.token("shop/a").is_none()
            && all.is_held()
            && all.remaining() > Duration::from_secs(20)
    );
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
    let locks = locks();
    let limit = Duration::from_secs(6);
    let (first, second) = (locks.lock("a").await.unwrap(), locks.lock("b").await.unwrap());
    let began = Instant::now();
    let waits = tokio::spawn(locks.lock_all(["a", "b"]).wait_for(limit).into_future());
    tokio::time::sleep(limit / 2).await;
    first.release().await.unwrap();
    let busy = waits.await.unwrap().unwrap_err();
    assert!(busy.is_busy() && busy.name().unwrap().as_str() == "b", "{busy}");
    // With a wait of its own for each it would take half of the limit more.
    let waited = began.elapsed();
    assert!((limit..limit + PRECISION).contains(&waited), "{waited:?}");
    drop(second);
}

#[tokio::test(start_paused = true)]
async fn a_lock_that_is_lost_while_the_next_one_is_waited_for_ends_the_request() {
    let locks = locks();
    let held = locks.lock("b").await.unwrap();
    let request = locks.lock_all(["a", "b"]);
    let waits = tokio::spawn(request.into_future());
    // "a" is held, and "b" waited for.
    until(|| locks.stats().held == 2 && locks.stats().waiting > 0).await;
    locks.force_release("a").await.unwrap();
    let lost = waits.await.unwrap().unwrap_err();
    assert!(
        matches!(&lost, LockError::Lost { name, .. } if name.as_str() == "a"),
        "{lost}"
    );
    held.release().await.unwrap();
    locks.drain().await;
    assert_eq!(locks.list("").await.unwrap(), []);
}

#[tokio::test(start_paused = true)]
async fn a_stop_lets_a_leader_finish_its_step_and_a_candidate_leave() {
    let memory = paused::memory();
    let (locks, other) = (paused::client(memory.client()), paused::client(memory.client()));
    let stop = CancellationToken::new();
    let lead = |locks: &Locks| {
        let stop = stop.clone();
        let request = locks.lock("leader");
        tokio::spawn(
            request.lead_until(async move { stop.cancelled().await }, |term| async move {
                let mut steps = 0;
                while !term.is_stopping() {
                    tokio::time::sleep(Duration::from_secs(1)).await;
                    steps += 1;
                }
                term.stopping().await;
                steps
            }),
        )
    };
    let leader = lead(&locks);
    until(|| locks.stats().held == 1).await;
    let candidate = lead(&other);
    until(|| other.stats().waiting == 1).await;
    tokio::time::sleep(Duration::from_millis(2_500)).await;
    stop.cancel();
    assert_eq!(candidate.await.unwrap().unwrap(), None);
    assert_eq!(leader.await.unwrap().unwrap(), Some(3));
    until(|| locks.stats().held + other.stats().waiting == 0).await;
    assert_eq!(locks.list("").await.unwrap(), []);
}

#[tokio::test(start_paused = true)]
async fn a_leader_that_loses_its_lock_while_it_stops_does_not_begin_again() {
    let memory = paused::memory();
    let locks = paused::client(memory.client());
    let stop = CancellationToken::new();
    let leader = {
        let stop = stop.clone();
        let request = locks.lock("leader");
        tokio::spawn(request.lead_until(async move { stop.cancelled().await }, |_| std::future::pending::<()>()))
    };
    until(|| locks.stats().held == 1).await;
    stop.cancel();
    memory.expire(&"leader".parse().unwrap());
    assert_eq!(leader.await.unwrap().unwrap(), None);
}

#[tokio::test(start_paused = true)]
async fn terms_that_end_at_once_follow_each_other_with_growing_pauses() {
    let memory = paused::memory();
    let locks = paused::client(memory.client());
    let name = "leader".parse().unwrap();
    let mut terms = 0;
    let leads = locks.lock("leader").lead(|_| {
        terms += 1;
        memory.expire(&name);
        std::future::pending::<()>()
    });
    assert!(tokio::time::timeout(Duration::from_secs(60), leads).await.is_err());
    assert!((40..140).contains(&terms), "{terms} terms in a minute");
}

#[tokio::test(start_paused = true)]
async fn a_campaign_waits_out_what_may_pass_and_not_what_will_not() {
    let memory = paused::memory();
    let locks = paused::client(memory.client());
    memory.set_reachable(false);
    let leads = tokio::spawn(locks.lock("leader").lead(|_| async { 7 }));
    // Each attempt waits for an op_timeout by itself.
    until(|| locks.stats().failed == 3).await;
    memory.set_reachable(true);
    assert_eq!(leads.await.unwrap().unwrap(), 7);
    memory.set_reachable(false);
    let at_once = locks.lock("leader").no_wait().lead(|_| async { 7 }).await.unwrap_err();
    assert!(matches!(at_once, LockError::Unavailable { .. }), "{at_once}");
    let wrong = locks.lock("two\nlines").lead(|_| async { 7 }).await.unwrap_err();
    assert!(matches!(wrong, LockError::InvalidName { .. }), "{wrong}");
}

#[tokio::test(start_paused = true)]
async fn a_cancellation_token_is_cancelled_with_the_hold() {
    let locks = locks();
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

#[tokio::test(start_paused = true)]
async fn of_all_or_none_none_is_left_when_one_is_busy_or_unusable() {
    let locks = locks();
    let held = locks.lock("b").await.unwrap();
    let busy = locks.lock_all(["a", "b", "c"]).no_wait().await.unwrap_err();
    assert_eq!(busy.to_string(), "lock \"b\" is already held");
    let limit = Duration::from_millis(20);
    let busy = locks.lock_all(["a", "b"]).wait_for(limit).await.unwrap_err();
    assert!(busy.is_busy(), "{busy}");
    let unusable = locks.lock_all(["a", "two\nlines"]).await.unwrap_err();
    assert!(matches!(unusable, LockError::InvalidName { .. }), "{unusable}");
    let short = locks.lock_all(["a"]).ttl(Duration::ZERO).await.unwrap_err();
    assert!(matches!(short, LockError::InvalidTtl { .. }), "{short}");
    let given_up = tokio::time::timeout(limit, locks.lock_all(["a", "b"]).into_future()).await;
    assert!(given_up.is_err());
    locks.drain().await;
    let names: Vec<_> = locks
        .list("")
        .await
        .unwrap()
        .into_iter()
        .filter_map(|h| h.name)
        .collect();
    assert_eq!(names, [held.name().clone()]);
}

#[tokio::test(start_paused = true)]
async fn a_loss_ends_the_whole_and_a_release_tells_it() {
    let locks = locks();
    let all = locks.lock_all(["a", "b"]).await.unwrap();
    locks.force_release("b").await.unwrap();
    let (name, reason) = all.lost().await;
    assert_eq!((name.as_str(), reason), ("b", LossReason::NotHeld));
    assert!(!all.is_held() && all.remaining().is_zero());
    let lost = all.release().await.unwrap_err();
    assert!(
        matches!(&lost, LockError::Lost { name, .. } if name.as_str() == "b"),
        "{lost}"
    );
}
