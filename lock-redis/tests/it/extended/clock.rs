//! The wall clock of the server steps while it runs.

use std::time::Duration;

use lock_core::{DistributedLock, Locks, LossReason};
use lock_redis::RedisLock;

use crate::server::{Ask, HANG_LIMIT, LONG, claim, granted, name, start_clocked, until, waited, waiting};

const HOUR: i32 = 3600;

async fn left(lock: &RedisLock) -> Duration {
    let holder = lock.holders(&name("n")).await.unwrap().pop();
    holder.unwrap().remaining.unwrap()
}

#[tokio::test]
async fn set_forward_a_lease_ends_early_which_is_told_at_the_next_renewal() {
    let server = start_clocked().await;
    let (locks, other) = (Locks::new(server.client().await), server.client().await);
    let guard = locks.lock("n").ttl(LONG).await.unwrap();
    server.set_clock(HOUR).await.unwrap();
    let next = claim("n", LONG);
    let grant = waited(&other, &next).await;
    assert!(grant.token > guard.token());
    guard.renew_now().await.unwrap_err();
    let told = tokio::time::timeout(HANG_LIMIT, guard.lost()).await;
    assert_eq!(told.unwrap(), LossReason::NotHeld, "told before the end of the ttl");
    // And back again: the token that ran ahead is still counted up.
    server.set_clock(0).await.unwrap();
    other.release(&next, None).await.unwrap();
    assert!(granted(&other, &claim("n", LONG)).await.token > grant.token);
}

#[tokio::test]
async fn set_back_a_lease_lasts_longer_until_it_is_renewed_and_tokens_rise() {
    let server = start_clocked().await;
    let (lock, other) = (server.client().await, server.client().await);
    let (held, wanted) = (claim("n", LONG), claim("n", LONG / 2));
    let grant = granted(&lock, &held).await;
    let wait = waiting(&other, &wanted);
    server.until_queued("n", 1).await;
    server.set_clock(-HOUR).await.unwrap();
    assert!(left(&lock).await > LONG);
    lock.renew(&grant.lease).await.unwrap();
    assert!(left(&lock).await <= LONG);
    lock.release(&held, None).await.unwrap();
    let next = wait.await.unwrap();
    assert!(next.token > grant.token);
    // Also if its place was taken before the step.
    assert!(left(&lock).await <= LONG / 2);
    other.release(&wanted, None).await.unwrap();
    assert!(granted(&lock, &claim("n", LONG)).await.token > next.token);
}

/// The limit that the documentation states.
#[tokio::test]
async fn only_set_back_by_more_than_counters_are_kept_tokens_fall() {
    let server = start_clocked().await;
    let kept = Duration::from_secs(60);
    let lock = server.config().counter_retention(kept).connect().await.unwrap();
    let mut tokens = Vec::new();
    for ahead in [0, -HOUR, -2 * HOUR] {
        server.set_clock(ahead).await.unwrap();
        let claim = claim("n", LONG);
        tokens.push(granted(&lock, &claim).await.token);
        lock.release(&claim, None).await.unwrap();
        // After the first step the counter is kept until the clock has passed it once more.
        if tokens.len() == 2 {
            server.set_clock(120).await.unwrap();
            until("the counter has ended", async || {
                !server.command::<bool>("EXISTS {fencelock:n}:fence").await
            })
            .await;
        }
    }
    assert!(tokens[1] > tokens[0] && tokens[2] < tokens[1], "{tokens:?}");
}
