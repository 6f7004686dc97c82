//! A server that is out of memory: what it still does.

use std::time::Duration;

use lock_core::{DistributedLock, Grant, LockError, Mode, Released, Renewal, Wait};
use lock_redis::RedisLock;
use tokio::task::JoinHandle;

use crate::server::{LONG, Proxy, Server, busy, by_proxy, claim, granted, soon, until, until_queued, waiting};

/// Much longer than what is done within it, on a machine that is busy: the server's clock makes it pass.
const TTL: Duration = Duration::from_secs(20);

/// By how many seconds the server's clock is set ahead between two refreshes: a third of the ttl and a little more.
const STEP: i32 = 8;

/// Waits for `n`, and releases it. Cutting the connection makes it refresh its place.
async fn waiter(server: &Server) -> (JoinHandle<Result<Option<Grant>, LockError>>, Proxy) {
    let (lock, proxy) = by_proxy(server, LONG).await;
    let wait = tokio::spawn(async move {
        let attempt = lock.acquire(&claim("n", TTL), Wait::until(soon())).await?;
        let grant = attempt.granted();
        if let Some(grant) = &grant {
            assert_eq!(lock.release(&grant.claim, None).await?, Released::Released);
        }
        Ok(grant)
    });
    until_queued(server, "n", 1).await;
    (wait, proxy)
}

/// When the place of the waiter ends, by the server's clock, in milliseconds.
async fn end_of_place(server: &Server) -> Option<u64> {
    let entries: Vec<String> = server.command("HVALS {fencelock:n}:waiters").await;
    let end = entries.first()?.split(' ').nth(1);
    Some(end.unwrap().parse().unwrap())
}

async fn fill(server: &Server) {
    server.command::<()>("CONFIG SET maxmemory 1").await;
}

async fn refused(lock: &RedisLock, name: &str) {
    let error = lock.acquire(&claim(name, LONG), Wait::until(soon())).await.unwrap_err();
    assert!(format!("{error:#}").contains("out of memory"), "{error}");
}

#[tokio::test]
async fn a_waiter_outlives_its_ttl_in_the_queue_and_is_granted_what_is_released() {
    let server = Server::with_wall_clock();
    let lock = server.client().await;
    let held = claim("n", LONG);
    granted(&lock, &held).await;
    let (wait, proxy) = waiter(&server).await;
    fill(&server).await;
    for step in 1..=3 {
        let before = end_of_place(&server).await;
        server.set_clock(step * STEP);
        proxy.cut();
        until("the place is refreshed", async || {
            assert!(!wait.is_finished(), "the wait has failed");
            end_of_place(&server).await > before
        })
        .await;
    }
    assert_eq!(server.command::<usize>("ZCARD {fencelock:n}:order").await, 1);
    // Whoever comes now has no place.
    refused(&lock, "n").await;
    refused(&lock, "other").await;
    assert_eq!(lock.release(&held, None).await.unwrap(), Released::Released);
    assert!(wait.await.unwrap().unwrap().is_some());
    assert_eq!(server.leftovers().await, Vec::<String>::new());
}

#[tokio::test]
async fn a_waiter_is_granted_what_somebody_else_finds_free() {
    let server = Server::start();
    let lock = server.client().await;
    granted(&lock, &claim("n", LONG)).await;
    let lives = server.client().await;
    let wait = waiting(&lives, &claim("n", LONG));
    until_queued(&server, "n", 1).await;
    fill(&server).await;
    let _: () = server.command("DEL {fencelock:n}:lock").await;
    busy(&lock, &claim("n", LONG)).await;
    wait.await.unwrap();
}

#[tokio::test]
async fn a_shared_lock_is_renewed_and_released_to_a_waiter() {
    let server = Server::start();
    let (lock, lives) = (server.client().await, server.client().await);
    let held = granted(&lock, &claim("n", LONG).with_mode(Mode::Shared)).await;
    let wait = waiting(&lives, &claim("n", LONG));
    until_queued(&server, "n", 1).await;
    fill(&server).await;
    assert_eq!(lock.renew(&held.lease).await.unwrap(), Renewal::Renewed);
    assert_eq!(lock.release(&held.claim, None).await.unwrap(), Released::Released);
    wait.await.unwrap();
}

#[tokio::test]
async fn a_name_is_reserved_and_its_claim_released() {
    let server = Server::start();
    let lock = server.client().await;
    let held = claim("n", TTL).with_at_least(LONG);
    granted(&lock, &held).await;
    fill(&server).await;
    assert_eq!(lock.reserve(&held, LONG).await.unwrap(), Renewal::Renewed);
    assert_eq!(lock.release(&held, Some(LONG)).await.unwrap(), Released::Released);
    let shown = lock.holders(held.name()).await.unwrap().pop().unwrap();
    assert!(shown.is_reserved && shown.remaining.unwrap() > TTL);
}
