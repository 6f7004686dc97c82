//! Connections that the server ends, again and again.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use lock_core::{LockError, Locks};

use crate::server::{HANG_LIMIT, LONG, Server, until};

const WAITERS: usize = 40;

/// How many connections are ended, and how many waiters served meanwhile, at least.
const KILLS: usize = 60;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_wait_with_time_left_fails_while_connections_are_killed() {
    let server = Server::start();
    // A first request fails if it gets no answer for that long, and there is none while connections are ended.
    let config = server.config().op_timeout(LONG);
    let clients = [config.clone().connect().await.unwrap(), config.connect().await.unwrap()].map(Locks::new);
    let over = Arc::new(AtomicBool::new(false));
    let served = Arc::new(AtomicUsize::new(0));
    let waits: Vec<_> = (0..WAITERS)
        .map(|task| {
            let locks = clients[task % 2].clone();
            let (over, served) = (Arc::clone(&over), Arc::clone(&served));
            tokio::spawn(async move {
                let mut failed = Vec::new();
                while !over.load(Ordering::SeqCst) {
                    match locks.lock("n").wait_for(HANG_LIMIT).await {
                        Ok(guard) => {
                            served.fetch_add(1, Ordering::SeqCst);
                            // Its failure is told to the holder, and repeated in the background.
                            let _ = guard.release().await;
                        }
                        Err(error) => failed.push(error),
                    }
                    // So that some arrive during a hand-over.
                    tokio::time::sleep(Duration::from_micros(fastrand::u64(0..5000))).await;
                }
                failed
            })
        })
        .collect();
    until("as many are served as there are", async || {
        served.load(Ordering::SeqCst) >= waits.len()
    })
    .await;
    let (mut kills, before) = (0, served.load(Ordering::SeqCst));
    until("as many are served while connections are ended", async || {
        kills += server.command::<usize>("CLIENT KILL TYPE pubsub").await;
        tokio::time::sleep(Duration::from_millis(fastrand::u64(5..60))).await;
        kills >= KILLS && served.load(Ordering::SeqCst) >= before + KILLS
    })
    .await;
    over.store(true, Ordering::SeqCst);
    let mut failed: Vec<LockError> = Vec::new();
    for wait in waits {
        failed.extend(wait.await.unwrap());
    }
    let served = served.load(Ordering::SeqCst);
    println!("{kills} connections killed, {served} served, {} failed", failed.len());
    let first = failed.first().map(ToString::to_string);
    assert!(failed.is_empty(), "{} failed waits, such as: {first:?}", failed.len());
}
