//! What a client does for one lock costs the same whatever else it holds.

use std::time::{Duration, Instant};

use lock_core::{Locks, MemoryLock};

const LOSSES: usize = 200;

/// The time from a forced release until the holder is told and has let go, beside that many locks that share one lease. Nine out of
/// ten took longer: some do because the machine was busy.
async fn loss_beside(held: usize) -> Duration {
    let memory = MemoryLock::new().sharing_leases();
    let locks = Locks::new(memory.client());
    let mut guards = Vec::new();
    for lock in 0..held {
        guards.push(locks.lock(lock.to_string()).await.unwrap());
    }
    let mut times = Vec::new();
    for guard in guards.drain(..LOSSES) {
        let before = locks.stats().held;
        let start = Instant::now();
        memory.expire(guard.name());
        while locks.stats().held == before {
            tokio::task::yield_now().await;
        }
        times.push(start.elapsed());
    }
    times.sort_unstable();
    times[LOSSES / 10]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_loss_costs_no_more_beside_many_locks() {
    let few = loss_beside(300).await;
    let many = loss_beside(30_000).await;
    println!("told within {few:?} beside 300 locks, within {many:?} beside 30 000");
    // A look at each of the others would cost a hundred times as much.
    assert!(many < 30 * few, "{few:?} and {many:?}");
}
