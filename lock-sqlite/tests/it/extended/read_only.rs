//! Clients that only look, beside others of their process that come and go.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use lock_core::DistributedLock;

use crate::file::{File, LONG, claim, granted, runtime};
use crate::read_only::{names, names_in, reader};

#[test]
fn readers_see_what_is_held_while_clients_of_their_process_come_and_go() {
    let file = File::new();
    runtime().block_on(async {
        granted(&file.client().await, &claim("kept", LONG)).await;
    });
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let readers: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(|| {
                    runtime().block_on(async {
                        let reader = reader(&file).connect().await.unwrap();
                        let mut reads = 0;
                        while !over.load(Ordering::Relaxed) {
                            let seen = names(&reader).await;
                            assert!(seen.contains(&"kept".to_owned()), "{seen:?}");
                            reads += 1;
                        }
                        reads
                    })
                })
            })
            .collect();
        let writer = scope.spawn(|| {
            runtime().block_on(async {
                for _ in 0..200 {
                    let lock = file.client().await;
                    let passing = claim("passing", LONG);
                    granted(&lock, &passing).await;
                    lock.release(&passing, None).await.unwrap();
                    lock.close().await.unwrap();
                }
            });
        });
        let written = writer.join();
        over.store(true, Ordering::Relaxed);
        for reader in readers {
            assert!(reader.join().unwrap() > 0);
        }
        written.unwrap();
    });
    // Readers may have kept the last client from taking its log along, but make none themselves.
    let there = names_in(&file);
    assert!(
        [2, 4].contains(&there.len()) && there.contains(&"locks.db-wake".to_owned()),
        "{there:?}"
    );
}
