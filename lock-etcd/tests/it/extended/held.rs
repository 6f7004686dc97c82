//! Very many locks at a time.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::server::{client, everything, keepalives, leases_granted, plain, start};
use futures_util::stream::{self, StreamExt as _};
use lock_core::Locks;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_held_locks_are_one_keepalive_in_a_third_of_a_ttl() {
    const LOCKS: usize = 10_000;
    const AT_A_TIME: usize = 100;
    const TTL: Duration = Duration::from_secs(30);
    const PERIODS: u32 = 2;
    let server = start().await;
    let locks = Arc::new(Locks::new(client(&server).await));
    let etcd = plain(&server).await;
    let began = Instant::now();
    let taking = stream::iter(0..LOCKS).map(|number| {
        let locks = Arc::clone(&locks);
        async move { locks.lock(format!("held/{number}")).ttl(TTL).await.unwrap() }
    });
    let guards: Vec<_> = taking.buffer_unordered(AT_A_TIME).collect().await;
    println!(
        "{LOCKS} locks, {AT_A_TIME} at a time, were taken in {:?}",
        began.elapsed()
    );
    assert_eq!(leases_granted(&server).await, 1);

    let before = keepalives(&server).await;
    tokio::time::sleep(TTL / 3 * PERIODS).await;
    let sent = keepalives(&server).await - before;
    println!("{sent} keepalives in {PERIODS} thirds of a ttl");
    // The clocks of the two need not begin at the same time.
    assert!(sent <= u64::from(PERIODS) + 1, "{sent}");
    assert!(guards.iter().all(|guard| guard.is_held()));

    let began = Instant::now();
    let releasing = stream::iter(guards).map(|guard| async move { guard.release().await.unwrap() });
    let released: Vec<_> = releasing.buffer_unordered(AT_A_TIME).collect().await;
    println!("and released in {:?}", began.elapsed());
    assert!(
        released
            .iter()
            .all(|outcome| *outcome == lock_core::ReleaseOutcome::Released)
    );
    locks.shutdown().await.unwrap();
    assert_eq!(everything(&etcd).await, ["fencelock:base"]);
}
