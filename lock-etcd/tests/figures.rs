//! What locks cost, counted by the server.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod server;

use std::time::{Duration, Instant};

use conformance_tests::servers::{Kind, Server};
use lock_core::Locks;
use server::{LONG, client, leases_granted, plain, requests, start, transactions, until_queued};

/// The middle of what was measured.
fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

#[tokio::test]
async fn an_uncontended_lock_and_release_are_two_transactions_and_a_hand_over_is_one() {
    const ROUNDS: u64 = 20;
    let server = start().await;
    let locks = Locks::new(client(&server).await);
    locks.lock("n").ttl(LONG).await.unwrap().release().await.unwrap();
    let before = (transactions(&server).await, leases_granted(&server).await);
    for _ in 0..ROUNDS {
        locks.lock("n").ttl(LONG).await.unwrap().release().await.unwrap();
    }
    let after = (transactions(&server).await, leases_granted(&server).await);
    assert_eq!((after.0 - before.0, after.1 - before.1), (2 * ROUNDS, 0));

    let mut guard = locks.lock("n").ttl(LONG).await.unwrap();
    let before = transactions(&server).await;
    for _ in 0..ROUNDS {
        let next = tokio::spawn(locks.lock("n").ttl(LONG).into_future());
        while locks.stats().waiting == 0 {
            tokio::task::yield_now().await;
        }
        guard.release().await.unwrap();
        guard = next.await.unwrap().unwrap();
    }
    assert_eq!(transactions(&server).await - before, ROUNDS);
    guard.release().await.unwrap();
}

#[tokio::test]
async fn of_many_waiters_a_release_wakes_one_and_the_others_send_nothing() {
    const WAITERS: usize = 100;
    let server = start().await;
    let etcd = plain(&server).await;
    let holder = Locks::new(client(&server).await);
    let guard = holder.lock("n").ttl(LONG).await.unwrap();
    let mut waiting = Vec::new();
    for waiters in 1..=WAITERS {
        let locks = Locks::new(client(&server).await);
        let asked = locks.lock("n").ttl(LONG).into_future();
        waiting.push((locks, tokio::spawn(asked)));
        until_queued(&etcd, "n", waiters).await;
    }
    // Whoever has just come still asks to be told.
    let mut before = requests(&server).await;
    loop {
        tokio::time::sleep(Duration::from_millis(200)).await;
        let now = requests(&server).await;
        if now == before {
            break;
        }
        before = now;
    }
    guard.release().await.unwrap();
    let (locks, first) = waiting.remove(0);
    let next = first.await.unwrap().unwrap();
    tokio::time::sleep(Duration::from_millis(200)).await;
    let sent = requests(&server).await - before;
    println!("{sent} requests for a release and the next grant, with {WAITERS} waiters");
    // The release, the verification, and one watch that is not needed any more.
    assert!((2..=4).contains(&sent), "{sent}");
    assert!(waiting.iter().all(|(_, waiter)| !waiter.is_finished()));
    for (_, waiter) in &waiting {
        waiter.abort();
    }
    next.release().await.unwrap();
    locks.shutdown().await.unwrap();
}

#[tokio::test]
async fn a_lock_and_its_release_take_little_longer_than_two_puts() {
    const ROUNDS: usize = 300;
    // With its disk, as in real life.
    let server = Server::start_own(&Kind::ETCD, &[]).await.unwrap();
    let (locks, etcd) = (Locks::new(client(&server).await), plain(&server).await);
    let (mut puts, mut pairs) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let began = Instant::now();
        etcd.kv_client().put("a", "1", None).await.unwrap();
        etcd.kv_client().put("a", "2", None).await.unwrap();
        puts.push(began.elapsed());
        let began = Instant::now();
        locks.lock("n").ttl(LONG).await.unwrap().release().await.unwrap();
        pairs.push(began.elapsed());
    }
    let (puts, pairs) = (median(puts), median(pairs));
    let ratio = pairs.as_secs_f64() / puts.as_secs_f64();
    println!("p50 of two puts {puts:?}, of a lock and its release {pairs:?}: {ratio:.2} times");
    // A debug build on a machine that does something else is no place to be strict.
    assert!(ratio < 3.0, "{ratio}");
}
