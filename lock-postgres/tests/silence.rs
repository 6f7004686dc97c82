//! A holder that falls silent is freed by the server in time, wherever it was cut off, and knows before.

#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a test may fail")]

mod server;

use std::time::{Duration, Instant};

use lock_core::{DistributedLock, FencingToken, Locks, Options};
use lock_postgres::{PostgresConfig, PostgresLock, Tls};
use server::proxy::Proxy;
use server::{PATIENCE, Server, claim, granted};

const TTL: Duration = Duration::from_millis(600);
/// What the server may take beyond the ttl.
const SLACK: Duration = Duration::from_millis(500);

fn through(server: &Server, proxy: &Proxy) -> PostgresConfig {
    PostgresConfig::new(server.login_at(proxy.port()))
        .tls(Tls::Disable)
        .op_timeout(Duration::from_secs(2))
}

/// The token of the next holder, and how long it took to become free.
async fn next(lock: &PostgresLock) -> (FencingToken, Duration) {
    let start = Instant::now();
    let claim = claim("a", Duration::from_secs(20));
    loop {
        if let Some(grant) = lock.try_acquire(&claim).await.unwrap().granted() {
            let took = start.elapsed();
            lock.release(&claim).await.unwrap();
            return (grant.token, took);
        }
        assert!(start.elapsed() < PATIENCE, "the lock is not freed");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_cut_off_after_every_byte_keeps_no_lock_beyond_the_ttl() {
    let server = Server::start();
    let proxy = Proxy::to(server.port()).await;
    let other = server.client().await;
    // The longest request there is while a lock is held, and its heartbeat: what is sent beside it is cut, too.
    const BYTES: usize = 120;
    let mut longest = Duration::ZERO;
    // Side by side, as each takes a ttl and more.
    let lock = through(&server, &proxy).connect().await.unwrap();
    let held = claim("a", TTL);
    let mut cut = 0;
    for bytes in 0..BYTES {
        let first = granted(&lock, &held).await;
        let sent = Instant::now();
        proxy.hold_requests_after(bytes);
        let claim = claim("another name", TTL);
        let asking = tokio::time::timeout(TTL / 4, lock.try_acquire(&claim)).await;
        let answered = matches!(asking, Ok(Ok(_)));
        cut += usize::from(!answered);
        if answered {
            // All of it passed, so there is nothing more to cut.
            proxy.hold_requests_after(0);
        }
        let (token, _) = next(&other).await;
        longest = longest.max(sent.elapsed());
        assert!(token > first.token);
        assert!(
            !first.lease.is_valid(lock_core::Clock::system().now()),
            "it still believes, cut after {bytes} bytes"
        );
        server.until_locks(0, TTL + SLACK).await;
        proxy.cut();
        proxy.pass();
        if answered {
            break;
        }
        // The client makes a new session when it has noticed.
        while lock.try_acquire(&held).await.is_err() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        lock.release(&held).await.unwrap();
    }
    assert!(cut > 60, "a request has more bytes than {cut}");
    // Answers to what did pass count as signs of life: they came within a quarter of the ttl.
    let limit = TTL + TTL / 4 + SLACK;
    assert!(longest < limit, "it took {longest:?}");
    println!("cut after each of {cut} bytes; free after {longest:?} at the latest, with a ttl of {TTL:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_whose_network_forgets_it_stops_to_believe_before_the_server_frees() {
    let server = Server::start();
    let proxy = Proxy::to(server.port()).await;
    let other = server.client().await;
    let locks = Locks::with_options(
        through(&server, &proxy).connect().await.unwrap(),
        Options::new().ttl(TTL),
    );
    for _ in 0..5 {
        let guard = locks.lock("a").wait_for(PATIENCE).await.unwrap();
        proxy.hold_everything();
        let (token, took) = next(&other).await;
        assert!(!guard.is_held());
        assert!(token > guard.token());
        assert!(took <= TTL + SLACK, "{took:?}");
        drop(guard);
        proxy.cut();
        proxy.pass();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_whose_connection_ends_is_freed_at_once() {
    let server = Server::start();
    let proxy = Proxy::to(server.port()).await;
    let other = server.client().await;
    let lock = through(&server, &proxy).connect().await.unwrap();
    let first = granted(&lock, &claim("a", Duration::from_secs(60))).await;
    proxy.cut();
    let (token, took) = next(&other).await;
    assert!(token > first.token);
    assert!(took < Duration::from_secs(2), "{took:?}");
}
