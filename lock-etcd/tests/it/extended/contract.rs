//! Waits that are longer than a ttl, and long lists.

use std::time::{Duration, Instant};

use conformance_tests::faults::{Direction, Proxy, Traffic};
use futures_util::StreamExt as _;
use lock_core::{Clock, DistributedLock};

use crate::server::{LONG, claim, client, config_behind, granted, plain, queue, shared, until_queued, waiting};

#[tokio::test]
async fn a_waiter_keeps_its_place_for_longer_than_its_ttl() {
    const TTL: Duration = Duration::from_secs(6);
    let server = shared().await;
    let (a, b, etcd) = (client(&server).await, client(&server).await, plain(&server).await);
    let (held, wanted) = (claim("n", LONG), claim("n", TTL));
    granted(&a, &held).await;
    let wait = waiting(&b, &wanted);
    until_queued(&etcd, "n", 1).await;
    let before = queue(&etcd, "n").await;
    tokio::time::sleep(TTL * 2).await;
    let after = queue(&etcd, "n").await;
    assert_eq!(before[1].create_revision(), after[1].create_revision());
    a.release(&held, None).await.unwrap();
    let grant = wait.await.unwrap();
    assert!(grant.lease.is_valid(Clock::system().now()));
}

#[tokio::test]
async fn many_holders_with_leases_of_their_own_are_listed_over_a_slow_connection() {
    const LOCKS: usize = 2_000;
    const ROUND_TRIP: Duration = Duration::from_millis(20);
    let server = shared().await;
    let lock = client(&server).await;
    let taking = futures_util::stream::iter(0..LOCKS).for_each_concurrent(64, |i| {
        let lock = &lock;
        async move { drop(granted(lock, &claim(&format!("n{i:04}"), LONG).with_own_lease()).await) }
    });
    taking.await;
    let proxy = Proxy::start(server.authority()).await.unwrap();
    let far = config_behind(&server, &proxy).connect().await.unwrap();
    proxy.set(Direction::Both, Traffic::Delayed(ROUND_TRIP / 2));
    let began = Instant::now();
    let listed = far.list("").await.map(|listed| {
        let known = listed.iter().filter(|holder| holder.remaining.is_some()).count();
        (listed.len(), known)
    });
    println!(
        "{listed:?} after {:?} with round trips of {ROUND_TRIP:?}",
        began.elapsed()
    );
    assert_eq!(listed.unwrap(), (LOCKS, LOCKS));
}
