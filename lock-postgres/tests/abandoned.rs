//! Whatever was given up, wherever it was, leaves no lock on the server.

#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a test may fail")]

mod server;

use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use lock_core::{DistributedLock, LockError, Locks, Options};
use lock_postgres::{PostgresConfig, PostgresLock, Tls};
use server::proxy::Proxy;
use server::{PATIENCE, Server, claim, granted, soon};

const TTL: Duration = Duration::from_secs(5);

fn through(server: &Server, proxy: &Proxy) -> PostgresConfig {
    PostgresConfig::new(server.login_at(proxy.port()))
        .tls(Tls::Disable)
        .op_timeout(Duration::from_secs(1))
}

/// The outcome of the future, unless it is dropped after that many polls.
async fn polled<T>(future: impl Future<Output = T>, polls: usize) -> Option<T> {
    let mut future = pin!(future);
    let mut left = polls;
    poll_fn(|cx| {
        if left == 0 {
            return Poll::Ready(None);
        }
        left -= 1;
        future.as_mut().poll(cx).map(Some)
    })
    .await
}

/// Drops what `call` makes after each number of polls, and releases as the core does.
async fn dropped_at_every_poll<T>(
    lock: &PostgresLock,
    call: impl AsyncFn(&lock_core::Claim) -> Result<T, LockError>,
) -> usize {
    for polls in 0..100 {
        let claim = claim("a", TTL);
        let done = polled(call(&claim), polls).await.is_some();
        lock.release(&claim).await.unwrap();
        if done {
            return polls;
        }
    }
    panic!("it never ends");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_future_dropped_at_any_poll_leaves_nothing_beside_another_lock_that_is_held() {
    let server = Server::start();
    let lock = server.client().await;
    let locks = Locks::with_options(lock.clone(), Options::new().ttl(TTL));
    let kept = locks.lock("kept").await.unwrap();
    let tried = dropped_at_every_poll(&lock, async |claim| lock.try_acquire(claim).await).await;
    server.until_locks(1, PATIENCE).await;
    let waited = dropped_at_every_poll(&lock, async |claim| lock.acquire(claim, soon()).await).await;
    server.until_locks(1, PATIENCE).await;
    let mut handed = 0;
    for polls in 0..100 {
        let (from, to) = (claim("a", TTL), claim("a", TTL));
        granted(&lock, &from).await;
        let done = polled(lock.hand_over(&from, &to), polls).await.is_some();
        lock.release(&from).await.unwrap();
        lock.release(&to).await.unwrap();
        if done {
            handed = polls;
            break;
        }
    }
    server.until_locks(1, PATIENCE).await;
    // A wait for what another has.
    let other = server.client().await;
    let theirs = claim("a", TTL);
    for wait in [0, 1, 5, 20, 100, 300] {
        granted(&other, &theirs).await;
        let mine = claim("a", TTL);
        let waiting = tokio::time::timeout(Duration::from_millis(wait), lock.acquire(&mine, soon())).await;
        assert!(waiting.is_err());
        other.release(&theirs).await.unwrap();
        lock.release(&mine).await.unwrap();
        server.until_locks(1, PATIENCE).await;
    }
    assert!(kept.is_held());
    println!("dropped at each of up to {tried}, {waited} and {handed} polls");
    assert!(tried >= 2 && waited >= 2 && handed >= 2);
    kept.release().await.unwrap();
    server.until_locks(0, PATIENCE).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_that_is_lost_after_the_grant_leaves_nothing_beside_another_lock_that_is_held() {
    let server = Server::start();
    let proxy = Proxy::to(server.port()).await;
    let lock = through(&server, &proxy).connect().await.unwrap();
    let other = server.client().await;
    let locks = Locks::with_options(lock.clone(), Options::new().ttl(TTL));
    let kept = locks.lock("kept").await.unwrap();
    let mine = claim("a", TTL);
    proxy.hold_answers();
    let error = lock.try_acquire(&mine).await.unwrap_err();
    assert!(error.is_retryable(), "{error}");
    // It was granted: nobody has heard of it.
    server.until_locks(2, PATIENCE).await;
    let releasing = lock.release(&mine);
    assert!(releasing.await.is_err());
    proxy.pass();
    server.until_locks(1, PATIENCE).await;
    assert!(kept.is_held(), "a lost answer costs only what it was about");
    granted(&other, &claim("a", TTL)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_arrives_after_its_clean_up_leaves_nothing_beside_another_lock_that_is_held() {
    let server = Server::start();
    let proxy = Proxy::to(server.port()).await;
    let lock = through(&server, &proxy).connect().await.unwrap();
    let locks = Locks::with_options(lock.clone(), Options::new().ttl(TTL));
    let kept = locks.lock("kept").await.unwrap();
    for name in ["a", "b", "c"] {
        let mine = claim(name, TTL);
        proxy.hold_requests_after(0);
        assert!(lock.try_acquire(&mine).await.is_err());
        // The client has done what it can, and goes on.
        assert!(lock.release(&mine).await.is_err());
        proxy.pass();
        server.until_locks(1, PATIENCE).await;
        let mut looks = 0;
        while looks < 20 {
            assert!(server.locks().await <= 2);
            looks += 1;
        }
        server.until_locks(1, PATIENCE).await;
        assert!(kept.is_held());
    }
    // Of a claim that wants a session to itself, while its connection is given up for good.
    let own = claim("own", TTL).with_own_lease();
    proxy.hold_requests_after(0);
    assert!(lock.try_acquire(&own).await.is_err());
    drop((kept, locks));
    lock.close().await.unwrap();
    drop(lock);
    proxy.pass();
    server.until_locks(0, PATIENCE).await;
}
