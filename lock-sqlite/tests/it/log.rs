//! The write-ahead log stays short, whoever writes it.

use crate::file::{File, LONG, claim, granted, name};
use lock_core::DistributedLock;
use lock_sqlite::SqliteLock;

/// What the log may have grown to: it is brought into the database from 4 MiB on, and may miss its new beginning a few times.
pub(crate) const BOUND: u64 = 8 << 20;

pub(crate) fn length(file: &File) -> u64 {
    std::fs::metadata(file.beside("locks.db-wal")).unwrap().len()
}

pub(crate) async fn take_and_release(lock: &SqliteLock, name: &str, times: usize) {
    for _ in 0..times {
        let claim = claim(name, LONG);
        granted(lock, &claim).await;
        lock.release(&claim, None).await.unwrap();
    }
}

#[tokio::test]
async fn the_log_stays_short_over_thousands_of_locks_beside_a_second_client() {
    let file = File::new();
    let (busy, idle) = (file.client().await, file.client().await);
    granted(&idle, &claim("held", LONG)).await;
    take_and_release(&busy, "n", 5_000).await;
    assert!(length(&file) < BOUND, "{}", length(&file));
    assert!(idle.holders(&name("held")).await.unwrap().pop().is_some());
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
