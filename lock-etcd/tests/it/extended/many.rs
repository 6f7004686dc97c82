//! Clients that start together, and clients that come and go.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use crate::server::{
    HANG_LIMIT, LONG, Plain, client, config, everything, plain, requests, start, transactions, until, until_queued,
};
use lock_core::Locks;
use tokio::task::JoinSet;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_clients_that_start_together_all_succeed_with_ten_requests_each() {
    // FENCELOCK_MANY=500 for more.
    let clients: u64 = std::env::var("FENCELOCK_MANY").map_or(100, |many| many.parse().unwrap());
    let server = start().await;
    let mut starts = JoinSet::new();
    let before = requests(&server).await;
    let began = Instant::now();
    for number in 0..clients {
        let config = config(&server).op_timeout(HANG_LIMIT);
        starts.spawn(async move {
            let locks = Locks::new(config.connect().await?);
            let guard = locks.lock(format!("n{number}")).ttl(LONG).await?;
            guard.release().await?;
            locks.shutdown().await
        });
    }
    let mut failed = 0;
    while let Some(ended) = starts.join_next().await {
        if let Err(error) = ended.unwrap() {
            println!("{error}");
            failed += 1;
        }
    }
    let took = began.elapsed();
    let each = (requests(&server).await - before) as f64 / clients as f64;
    println!("{clients} clients: {each:.1} requests each, {failed} failed, in {took:?}");
    assert_eq!(failed, 0);
    assert!(each <= 10.0, "{each}");
}

/// Raises the base of tokens without end, as clients do that connect.
fn raising(etcd: Plain, on: &Arc<AtomicBool>, raised: &Arc<AtomicU64>) -> tokio::task::JoinHandle<()> {
    let (on, raised) = (Arc::clone(on), Arc::clone(raised));
    tokio::spawn(async move {
        let found = etcd.kv_client().get(etcd.base_key(), None).await.unwrap();
        let mut base: u64 = found.kvs()[0].value_str().unwrap().parse().unwrap();
        while on.load(Ordering::Acquire) {
            base += 1;
            etcd.kv_client()
                .put(etcd.base_key(), base.to_string(), None)
                .await
                .unwrap();
            raised.fetch_add(1, Ordering::Relaxed);
        }
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_connect_keep_nobody_from_a_lock_or_from_a_queue() {
    const ROUNDS: u64 = 30;
    let server = start().await;
    let etcd = plain(&server).await;
    let (one, other) = (Locks::new(client(&server).await), Locks::new(client(&server).await));
    one.lock("n").ttl(LONG).await.unwrap().release().await.unwrap();
    other.lock("n").ttl(LONG).await.unwrap().release().await.unwrap();
    let (on, raised) = (Arc::new(AtomicBool::new(true)), Arc::new(AtomicU64::new(0)));
    let raising = raising(plain(&server).await, &on, &raised);
    until(async || raised.load(Ordering::Relaxed) > 10).await;

    let before = transactions(&server).await;
    for _ in 0..ROUNDS {
        one.lock("n").ttl(LONG).await.unwrap().release().await.unwrap();
    }
    let each = (transactions(&server).await - before) as f64 / ROUNDS as f64;
    println!("{each:.1} transactions for a lock and its release while others raise the base");
    // To put the key, to write its token into it, to delete it.
    assert!(each <= 3.0, "{each}");

    let before = transactions(&server).await;
    for _ in 0..ROUNDS {
        let guard = one.lock("n").ttl(LONG).await.unwrap();
        let waiting = tokio::spawn(other.lock("n").ttl(LONG).into_future());
        until_queued(&etcd, "n", 1).await;
        guard.release().await.unwrap();
        waiting.await.unwrap().unwrap().release().await.unwrap();
    }
    let each = (transactions(&server).await - before) as f64 / ROUNDS as f64;
    println!("{each:.1} transactions for a lock, a wait and two releases");
    // Three for the one, four for the other, which looks once more when its watches begin, as somebody has written meanwhile.
    assert!(each <= 9.0, "{each}");
    on.store(false, Ordering::Release);
    raising.await.unwrap();
}

#[tokio::test]
async fn clients_that_end_leave_no_lease_and_no_key() {
    const RUNS: usize = 100;
    let server = start().await;
    let etcd = plain(&server).await;
    for run in 0..RUNS {
        let locks = Locks::new(client(&server).await);
        let guard = locks.lock("n").ttl(LONG).await.unwrap();
        // By a shutdown, or by a drop of all there is.
        match run % 3 {
            0 => {
                guard.release().await.unwrap();
                locks.shutdown().await.unwrap();
            }
            1 => guard.release().await.map(drop).unwrap(),
            _ => {}
        }
    }
    let mut left = (0, Vec::new());
    let gone = until(async || {
        let leases = etcd.lease_client().leases().await.unwrap();
        left = (leases.leases().len(), everything(&etcd).await);
        left.0 == 0 && left.1 == ["fencelock:base"]
    });
    if tokio::time::timeout(HANG_LIMIT / 2, gone).await.is_err() {
        panic!("left: {} leases and {:?}", left.0, left.1);
    }
}
