//! The write-ahead log stays short, whoever writes it.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod file;

use std::thread;

use file::{File, LONG, claim, granted};
use lock_core::DistributedLock;
use lock_sqlite::SqliteLock;

/// What the log may have grown to: it is brought into the database from 4 MiB on, and may miss its new beginning a few times.
const BOUND: u64 = 8 << 20;

fn length(file: &File) -> u64 {
    std::fs::metadata(file.beside("locks.db-wal")).unwrap().len()
}

async fn take_and_release(lock: &SqliteLock, name: &str, times: usize) {
    for _ in 0..times {
        let claim = claim(name, LONG);
        granted(lock, &claim).await;
        lock.release(&claim).await.unwrap();
    }
}

#[tokio::test]
async fn the_log_stays_short_over_thousands_of_locks_beside_a_second_client() {
    let file = File::new();
    let (busy, idle) = (file.client().await, file.client().await);
    granted(&idle, &claim("held", LONG)).await;
    take_and_release(&busy, "n", 5_000).await;
    assert!(length(&file) < BOUND, "{}", length(&file));
    assert!(idle.holder(&file::name("held")).await.unwrap().is_some());
}

#[tokio::test]
async fn the_log_stays_short_over_many_short_clients_beside_one_that_stays() {
    let file = File::new();
    let staying = file.client().await;
    let held = claim("held", LONG);
    granted(&staying, &held).await;
    for _ in 0..120 {
        let short = file.client().await;
        take_and_release(&short, "n", 40).await;
        short.close().await.unwrap();
    }
    assert!(length(&file) < BOUND, "{}", length(&file));
    assert!(staying.holder(held.name()).await.unwrap().is_some());
}

#[tokio::test]
async fn a_client_that_only_opens_the_file_brings_in_a_long_log() {
    let file = File::new();
    file.client().await;
    let other = rusqlite::Connection::open(file.path()).unwrap();
    other
        .query_row("PRAGMA wal_autocheckpoint = 0", [], |_| Ok(()))
        .unwrap();
    other
        .execute_batch("CREATE TABLE other (filler BLOB); INSERT INTO other VALUES (zeroblob(10000000))")
        .unwrap();
    assert!(length(&file) > BOUND);
    // The first one brings it in, the second one begins the log anew.
    for _ in 0..2 {
        file.client().await.close().await.unwrap();
    }
    assert!(length(&file) < BOUND, "{}", length(&file));
}

#[tokio::test]
async fn the_log_stays_short_while_many_clients_write_and_wait_at_once() {
    let file = File::new();
    file.client().await;
    let clients: Vec<_> = (0..4)
        .map(|_| {
            let path = file.path();
            thread::spawn(move || {
                let runtime = tokio::runtime::Builder::new_current_thread()
                    .enable_all()
                    .build()
                    .unwrap();
                runtime.block_on(async {
                    let lock = SqliteLock::open(path).await.unwrap();
                    for _ in 0..700 {
                        let claim = claim("n", LONG);
                        lock.acquire(&claim, None).await.unwrap().granted().unwrap();
                        lock.release(&claim).await.unwrap();
                    }
                });
            })
        })
        .collect();
    let observer = file.client().await;
    let mut longest = 0;
    while !clients.iter().all(thread::JoinHandle::is_finished) {
        longest = longest.max(length(&file));
        tokio::task::yield_now().await;
    }
    for client in clients {
        client.join().unwrap();
    }
    assert!(longest > 0 && longest < BOUND, "{longest}");
    drop(observer);
}
