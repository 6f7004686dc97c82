//! What a client does for one lock or one waiter costs the same whatever else it holds or waits for.

use std::time::{Duration, Instant};

use lock_core::{Locks, MemoryLock};

use crate::engine::scripted::{TTL, World, ask};

const TIMES: u32 = 200;

/// Nine out of ten took longer: some do because the machine was busy.
fn typical(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 10]
}

/// The time from a forced release until the holder is told and has let go, beside that many locks that share one lease.
async fn loss_beside(held: usize) -> Duration {
    let memory = MemoryLock::new().sharing_leases();
    let locks = Locks::new(memory.client());
    let mut guards = Vec::new();
    for lock in 0..held {
        guards.push(locks.lock(lock.to_string()).await.unwrap());
    }
    let mut times = Vec::new();
    for guard in guards.drain(..TIMES as usize) {
        let before = locks.stats().held;
        let start = Instant::now();
        memory.expire(guard.name());
        while locks.stats().held == before {
            tokio::task::yield_now().await;
        }
        times.push(start.elapsed());
    }
    typical(times)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_loss_costs_no_more_beside_many_locks() {
    let (few, many) = (loss_beside(300).await, loss_beside(30_000).await);
    println!("told within {few:?} beside 300 locks, within {many:?} beside 30 000");
    // A look at each of the others would cost a hundred times as much.
    assert!(many < 30 * few, "{few:?} and {many:?}");
}

/// What it costs that a request comes to wait, and that one times out, beside that many that wait for the same name.
async fn wait_beside(waiting: usize) -> (Duration, Duration) {
    let world = World::new();
    world.server.occupy("a", 100 * TTL);
    let waits = |limit| ask(world.lock("a").wait_for(limit));
    let others: Vec<_> = (0..waiting).map(|_| waits(10 * TTL)).collect();
    world.settle().await;
    let (mut arrivals, mut ends) = (Vec::new(), Vec::new());
    for time in 1..=TIMES {
        let start = Instant::now();
        waits(TTL + Duration::from_millis(10) * time);
        world.settle().await;
        arrivals.push(start.elapsed());
    }
    world.pass(TTL).await;
    for time in 1..=TIMES.into() {
        let start = Instant::now();
        crate::until(|| world.locks.stats().timed_out >= time).await;
        ends.push(start.elapsed());
    }
    others.iter().for_each(|other| other.abort());
    (typical(arrivals), typical(ends))
}

#[tokio::test(start_paused = true)]
async fn a_wait_costs_no_more_beside_many_others() {
    let (few, many) = (wait_beside(300).await, wait_beside(30_000).await);
    println!("comes and times out within {few:?} beside 300 waiters, within {many:?} beside 30 000");
    assert!(many.0 < 30 * few.0 && many.1 < 30 * few.1, "{few:?} and {many:?}");
}
