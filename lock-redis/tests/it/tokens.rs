//! Tokens rise, whatever happens to the server and its data.

use std::num::NonZeroU32;
use std::pin::pin;
use std::time::Duration;

use lock_core::{Claim, DistributedLock, FencingToken, Grant, LockError, Wait};
use lock_redis::RedisLock;

use crate::server::{self, LONG, Server, claim, granted, until};

/// Takes and releases the lock, and tells its token.
pub(crate) async fn token(lock: &RedisLock) -> FencingToken {
    let claim = claim("n", LONG);
    let mut grant = None;
    until("the lock is granted", async || {
        grant = match lock.try_acquire(&claim).await {
            // A connection that has just broken.
            Err(LockError::Unavailable { .. }) => None,
            attempt => Some(attempt.unwrap().granted().expect("the lock is free")),
        };
        grant.is_some()
    })
    .await;
    lock.release(&claim, None).await.unwrap();
    grant.unwrap().token
}

#[tokio::test]
async fn a_counter_that_follows_the_clock_is_kept_for_as_long_as_is_configured() {
    let server = Server::start();
    let usual = server.client().await;
    let longer = server
        .config()
        .counter_retention(Duration::from_secs(2 * 60 * 60))
        .connect()
        .await
        .unwrap();
    for (lock, time) in [
        (usual, Duration::from_secs(10 * 60)),
        (longer, Duration::from_secs(2 * 60 * 60)),
    ] {
        token(&lock).await;
        let kept: u64 = server.command("PTTL {fencelock:n}:fence").await;
        let all = time.as_millis() as u64;
        assert!(kept <= all && kept > all - 60_000, "{kept}");
    }
}

#[tokio::test]
async fn an_exhausted_counter_grants_nothing() {
    let server = Server::start();
    let lock = server.client().await;
    let _: () = server
        .command(&format!("SET {{fencelock:n}}:fence {}", FencingToken::MAX))
        .await;
    assert!(lock.try_acquire(&claim("n", LONG)).await.is_err());
    assert_eq!(server.leftovers().await, Vec::<String>::new());
}

fn wants(tokens: u32) -> Claim {
    claim("n", LONG).with_tokens_wanted(NonZeroU32::new(tokens).unwrap())
}

fn block(grant: &Grant) -> (u64, u64) {
    (grant.first_token().get(), grant.token.get())
}

#[tokio::test]
async fn a_block_has_the_tokens_since_the_last_one_for_which_the_time_has_passed() {
    let server = Server::start();
    let lock = server.client().await;
    let mut last = 0;
    for (before, wanted, tokens) in [
        ("PING", 8, 1),
        ("PING", 8, 8),
        ("PING", u32::MAX, 64),
        ("DEL {fencelock:n}:fence", 8, 1),
        ("PING", 1, 1),
        ("SET {fencelock:n}:fence 4000000000000000", 8, 1),
        ("PING", 8, 1),
    ] {
        tokio::time::sleep(Duration::from_millis(1)).await;
        let _: lock_redis::redis::Value = server.command(before).await;
        let claim = wants(wanted);
        let (first, next) = block(&granted(&lock, &claim).await);
        assert!(
            first > last && next - first + 1 == tokens,
            "{first}..={next}: {before}, {wanted}"
        );
        let again = granted(&lock, &claim).await;
        assert_eq!(block(&again), (next, next), "asked again");
        lock.release(&claim, None).await.unwrap();
        last = next;
    }
    assert_eq!(last, 4_000_000_000_000_002);
}

#[tokio::test]
async fn a_waiter_is_given_its_block_with_the_push() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let (held, wanted) = (claim("n", LONG), wants(8));
    let token = granted(&a, &held).await.token.get();
    let mut wait = pin!(b.acquire(&wanted, Wait::until(None)));
    tokio::select! {
        _ = &mut wait => panic!("the lock is held"),
        () = server::until_queued(&server, "n", 1) => {}
    }
    a.release(&held, None).await.unwrap();
    let (first, last) = block(&wait.await.unwrap().granted().unwrap());
    assert!(first > token && last - first + 1 == 8, "{first}..={last}");
}
