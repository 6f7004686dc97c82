//! Tests that take longer, or need what not every machine has.

use std::thread;

use lock_core::{DistributedLock, Wait};
use lock_sqlite::SqliteLock;

use crate::file::{File, LONG, claim, granted, in_time, runtime};

/// The log is brought into the database from 4 MiB on, and may miss its new beginning a few times.
#[tokio::test]
async fn the_log_stays_short_while_clients_write_and_wait_come_and_go() {
    const BOUND: u64 = 8 << 20;
    let file = File::new();
    let staying = file.client().await;
    granted(&staying, &claim("held", LONG)).await;
    let length = || std::fs::metadata(file.beside("locks.db-wal")).unwrap().len();
    let mut longest = 0;
    thread::scope(|scope| {
        let work = || {
            runtime().block_on(async {
                for _ in 0..7 {
                    let lock = SqliteLock::open(file.path()).await.unwrap();
                    for _ in 0..100 {
                        let claim = claim("n", LONG);
                        in_time(lock.acquire(&claim, Wait::until(None)))
                            .await
                            .unwrap()
                            .granted()
                            .unwrap();
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
