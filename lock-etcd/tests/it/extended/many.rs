//! Clients that start together, and clients that come and go.

use std::time::Instant;

use crate::server::{HANG_LIMIT, LONG, client, config, everything, plain, requests, start, until};
use lock_core::Locks;
use tokio::task::JoinSet;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_start_together_all_succeed() {
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
