//! The write-ahead log beside many clients.

use std::thread;

use lock_core::DistributedLock;
use lock_sqlite::SqliteLock;

use crate::file::{File, LONG, claim, granted, runtime, waited};
use crate::log::{BOUND, length, take_and_release};

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
    assert!(staying.holders(held.name()).await.unwrap().pop().is_some());
}

#[tokio::test]
async fn the_log_stays_short_while_many_clients_write_and_wait_at_once() {
    let file = File::new();
    file.client().await;
    let clients: Vec<_> = (0..4)
        .map(|_| {
            let path = file.path();
            thread::spawn(move || {
                runtime().block_on(async {
                    let lock = SqliteLock::open(path).await.unwrap();
                    for _ in 0..700 {
                        let claim = claim("n", LONG);
                        waited(&lock, &claim).await;
                        lock.release(&claim, None).await.unwrap();
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
