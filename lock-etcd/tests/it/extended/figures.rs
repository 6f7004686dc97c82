//! What locks cost, as requests that the server has counted.

use std::time::Duration;

use lock_core::Locks;

use crate::server::{LONG, client, leases_granted, plain, requests, start, transactions, until, until_queued};

#[tokio::test]
async fn an_uncontended_lock_and_release_are_two_transactions() {
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
}

#[tokio::test]
async fn a_release_wakes_one_waiter_however_many_there_are() {
    const WAITERS: usize = 50;
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
    // The last one still asks to be told.
    let mut before = 0;
    until(async || {
        before = requests(&server).await;
        tokio::time::sleep(Duration::from_millis(200)).await;
        requests(&server).await == before
    })
    .await;
    guard.release().await.unwrap();
    let (_, first) = waiting.remove(0);
    let next = first.await.unwrap().unwrap();
    let sent = requests(&server).await - before;
    println!("{sent} requests for a release and the next grant, with {WAITERS} waiters");
    assert!(sent < 10, "{sent}");
    assert!(waiting.iter().all(|(_, waiter)| !waiter.is_finished()));
    for (_, waiter) in &waiting {
        waiter.abort();
    }
    next.release().await.unwrap();
}
