//! Tests that take longer, or need what not every machine has.

use std::path::PathBuf;
use std::process::Command;
use std::thread;

use lock_core::{DistributedLock, Wait};
use lock_sqlite::SqliteLock;

use crate::file::{File, claim, granted, in_time, runtime};
use crate::tokens::{draw, far_ahead};

/// What is on the disk is at least everything up to the last raise of the ceiling.
#[tokio::test]
async fn grants_lost_with_the_power_are_not_granted_again() {
    // By another process: closing the file in this one would drop SQLite's locks on it.
    let copy = |from: PathBuf, to: PathBuf| {
        assert!(Command::new("cp").args([from, to]).status().unwrap().success());
    };
    let with = |file: &File, suffix: &str| file.beside(&format!("locks.db{suffix}"));
    for before in [0, 1, 1000, 1024, 1030] {
        let file = File::new();
        let lock = file.client().await;
        far_ahead(&file);
        lock.close().await.unwrap();
        let lock = file.client().await;
        draw(&lock, before).await;
        for suffix in ["", "-wal"] {
            copy(with(&file, suffix), file.beside(&format!("disk{suffix}")));
        }
        let ceiling = file.number("SELECT ceiling FROM counter");
        let mut lost = 0;
        while file.number("SELECT token < ceiling FROM counter") == 1 {
            lost = draw(&lock, 1).await;
        }
        assert_eq!(file.number("SELECT ceiling FROM counter"), ceiling);
        lock.close().await.unwrap();
        for suffix in ["", "-wal"] {
            copy(file.beside(&format!("disk{suffix}")), with(&file, suffix));
        }
        let token = draw(&file.client().await, 1).await;
        assert!(token > lost, "{token} after {lost}");
    }
}

/// The log is brought into the database from 4 MiB on, and may miss its new beginning a few times.
#[tokio::test]
async fn the_log_stays_short_while_clients_write_and_wait_come_and_go() {
    const BOUND: u64 = 8 << 20;
    let file = File::new();
    let staying = file.client().await;
    granted(&staying, &claim("held")).await;
    let length = || std::fs::metadata(file.beside("locks.db-wal")).unwrap().len();
    let mut longest = 0;
    thread::scope(|scope| {
        let work = || {
            runtime().block_on(async {
                for _ in 0..7 {
                    let lock = SqliteLock::open(file.path()).await.unwrap();
                    for _ in 0..100 {
                        let claim = claim("n");
                        let attempt = in_time(lock.acquire(&claim, Wait::until(None))).await;
                        attempt.unwrap().granted().unwrap();
                        lock.release(&claim, None).await.unwrap();
                    }
                }
            });
        };
        let clients: Vec<_> = (0..4).map(|_| scope.spawn(work)).collect();
        while !clients.iter().all(thread::ScopedJoinHandle::is_finished) {
            longest = longest.max(length());
            thread::yield_now();
        }
    });
    assert!(longest > 0 && longest < BOUND, "{longest}");
}
