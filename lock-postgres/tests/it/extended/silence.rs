//! A holder that falls silent is freed by the server in time, wherever it was cut off, and knows before.

use std::sync::Arc;
use std::time::{Duration, Instant};

use lock_core::{DistributedLock, FencingToken};
use lock_postgres::PostgresLock;

use crate::server::proxy::Proxy;
use crate::server::{self, HANG_LIMIT, Server, claim};

const TTL: Duration = Duration::from_millis(600);

async fn next_of(lock: &PostgresLock, name: &str) -> FencingToken {
    let start = Instant::now();
    let claim = claim(name, Duration::from_secs(600));
    loop {
        if let Some(grant) = lock.try_acquire(&claim).await.unwrap().granted() {
            lock.release(&claim, None).await.unwrap();
            return grant.token;
        }
        assert!(start.elapsed() < HANG_LIMIT, "the lock is not freed");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// How many are cut off at the same time; most of it is waiting.
const LANES: usize = 8;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_cut_off_after_every_byte_keeps_no_lock_beyond_the_ttl() {
    let server = Arc::new(Server::start());
    drop(server.client().await);
    let lanes = (0..LANES).map(|lane| tokio::spawn(cut_every_eighth(Arc::clone(&server), lane)));
    let (mut cut, mut longest) = (0, Duration::ZERO);
    for lane in lanes.collect::<Vec<_>>() {
        let (bytes, took) = lane.await.unwrap();
        (cut, longest) = (cut + bytes, longest.max(took));
    }
    server.until_locks(0).await;
    assert!(cut > 60, "a request has more bytes than {cut}");
    println!("cut after each of {cut} bytes; free after {longest:?} at the latest, with a ttl of {TTL:?}");
}

/// How many times it was cut off, and how long it took at most until the next one was granted.
async fn cut_every_eighth(server: Arc<Server>, lane: usize) -> (usize, Duration) {
    let proxy = Proxy::to(server.port()).await;
    let other = server.client().await;
    let config = server.config_at(proxy.port()).op_timeout(Duration::from_secs(2));
    let lock = config.connect().await.unwrap();
    let (mut cut, mut longest) = (0, Duration::ZERO);
    for bytes in (lane..).step_by(LANES) {
        let held = claim(&format!("n {lane}"), TTL);
        // The client makes a new session when it has noticed that the last one ended.
        let taking = async {
            loop {
                match lock.try_acquire(&held).await {
                    Ok(attempt) => break attempt.granted().expect("the lock is free"),
                    Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
                }
            }
        };
        let first = server::in_time(taking).await;
        let sent = Instant::now();
        proxy.hold_requests_after(bytes);
        // The longest request there is while a lock is held. A heartbeat beside it is cut, too.
        let claim = claim(&format!("another name {lane}"), TTL);
        let asking = tokio::time::timeout(TTL / 4, lock.try_acquire(&claim)).await;
        if matches!(asking, Ok(Ok(_))) {
            // All of it passed, so there is nothing more to cut.
            proxy.cut();
            break;
        }
        cut += 1;
        let token = next_of(&other, held.name().as_str()).await;
        longest = longest.max(sent.elapsed());
        assert!(token > first.token);
        assert!(
            !first.lease.is_valid(lock_core::Clock::system().now()),
            "it still believes, cut after {bytes} bytes"
        );
        proxy.cut();
        proxy.pass();
    }
    (cut, longest)
}
