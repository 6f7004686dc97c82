//! Reservations and time.

use std::time::{Duration, Instant};

use lock_core::{DistributedLock, Released};

use crate::reservations::{HOUR, by_proxy, deliver, left, reserving};
use crate::server::{LONG, Server, claim, granted, name, scripts, until, until_queued, waiting};

/// A request that took longer than that by the server's clock does nothing.
const LIMIT: Duration = Duration::from_secs(4);

#[tokio::test]
async fn a_reservation_that_arrives_after_its_time_limit_does_nothing() {
    let server = Server::start();
    let mine = reserving(HOUR);
    let (lock, proxy) = by_proxy(&server, &mine, LIMIT).await;
    proxy.hold_requests();
    let sent = Instant::now();
    assert!(lock.reserve(&mine, HOUR).await.is_err());
    tokio::time::sleep((LIMIT * 3 / 2).saturating_sub(sent.elapsed())).await;
    deliver(&server, &proxy).await;
    assert!(
        left(&server).await.unwrap() <= LONG,
        "its claim holds and is not reserved"
    );
}

#[tokio::test]
async fn a_waiter_that_expects_a_longer_lease_is_served_when_the_reservation_ends() {
    let rest = Duration::from_millis(700);
    let server = Server::start();
    let (lock, other) = (server.client().await, server.client().await);
    let mine = reserving(rest);
    let first = granted(&lock, &mine).await;
    lock.reserve(&mine, rest).await.unwrap();
    let wait = waiting(&other, &claim("n", LONG));
    until_queued(&server, "n", 1).await;
    let began = Instant::now();
    assert_eq!(lock.release(&mine, Some(rest)).await.unwrap(), Released::Released);
    assert!(wait.await.unwrap().token > first.token);
    let took = began.elapsed();
    assert!(took >= rest, "{took:?}");
}

#[tokio::test]
async fn a_waiter_keeps_its_place_through_a_reservation_that_is_longer_than_its_ttl() {
    let (ttl, length) = (Duration::from_millis(1500), HOUR);
    let server = Server::start();
    let (lock, other) = (server.client().await, server.client().await);
    let mine = reserving(length);
    granted(&lock, &mine).await;
    lock.reserve(&mine, length).await.unwrap();
    lock.release(&mine, Some(length)).await.unwrap();
    let wait = waiting(&other, &claim("n", ttl));
    until_queued(&server, "n", 1).await;
    let (before, began) = (scripts(&server).await, Instant::now());
    until("its place has lasted for longer than its ttl", async || {
        scripts(&server).await >= before + 4 && began.elapsed() > ttl
    })
    .await;
    until_queued(&server, "n", 1).await;
    assert!(left(&server).await.unwrap() > length - LONG);
    assert!(lock.force_release(&name("n")).await.unwrap().pop().is_some());
    wait.await.unwrap();
}
