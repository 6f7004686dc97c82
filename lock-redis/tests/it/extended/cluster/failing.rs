//! Nodes that fail, come and go.

use std::time::{Duration, Instant};

use lock_core::{DistributedLock, Grant, LockError, Released, Renewal};
use lock_redis::{RedisConfig, RedisLock, redis};
use rustix::process::Signal;

use super::{TTL, queue, served};
use crate::server::{Cluster, NODE_TIMEOUT, busy, claim, granted, until, waiting};

/// A cluster, the node of the name `n`, and a client that holds that.
async fn held() -> (Cluster, usize, RedisLock, Grant) {
    let cluster = Cluster::start().await;
    let primary = cluster.owner(cluster.slot("n").await).await;
    let one = cluster.client().await;
    let held = granted(&one, &claim("n", TTL)).await;
    (cluster, primary, one, held)
}

/// Waits until all nodes but the one that failed take its replica for a primary, and the cluster is up.
async fn until_promoted(cluster: &Cluster, failed: usize, replica: usize) {
    let replica = cluster.id(replica).await;
    for (at, node) in cluster.nodes.iter().enumerate() {
        if at == failed {
            continue;
        }
        until("the replica is promoted", async || {
            let nodes: String = node.command("CLUSTER NODES").await;
            let promoted = nodes
                .lines()
                .any(|line| line.starts_with(&replica) && line.contains("master"));
            promoted
                && node
                    .command::<String>("CLUSTER INFO")
                    .await
                    .contains("cluster_state:ok")
        })
        .await;
    }
}

#[tokio::test]
async fn locks_outlive_their_primary_and_waiters_are_served_by_its_replica() {
    let (mut cluster, primary, one, held) = held().await;
    let other = cluster.client().await;
    let waits = queue(&cluster, "n", 3).await;
    cluster.until_replicated(primary).await;
    cluster.nodes[primary].kill();
    let killed = Instant::now();
    until_promoted(&cluster, primary, primary + 3).await;
    println!("promoted after {:?}, node timeout {NODE_TIMEOUT} ms", killed.elapsed());
    let promoted = Instant::now();
    assert_eq!(one.renew(&held.lease).await.unwrap(), Renewal::Renewed);
    println!("renewed {:?} after that", promoted.elapsed());
    busy(&other, &claim("n", TTL)).await;
    assert_eq!(one.release(&held.claim, None).await.unwrap(), Released::Released);
    served(waits, held.token).await;
    println!("all granted {:?} after that", promoted.elapsed());
}

#[tokio::test]
async fn requests_outlast_a_failover() {
    let (mut cluster, primary, one, held) = held().await;
    let other = cluster.client().await;
    let wait = waiting(&other, &claim("n", TTL));
    cluster.until_queued("n", 1).await;
    cluster.until_replicated(primary).await;
    cluster.nodes[primary].kill();
    // Each of them begins while no node serves the slot.
    let killed = Instant::now();
    assert_eq!(one.renew(&held.lease).await.unwrap(), Renewal::Renewed);
    println!("renewed {:?} after the primary was killed", killed.elapsed());
    assert_eq!(one.release(&held.claim, None).await.unwrap(), Released::Released);
    assert!(wait.await.unwrap().token > held.token);
    println!("granted {:?} after the primary was killed", killed.elapsed());
}

#[tokio::test]
async fn a_silent_primary_is_left_for_its_replica() {
    let (cluster, primary, one, held) = held().await;
    cluster.until_replicated(primary).await;
    cluster.nodes[primary].signal(Signal::STOP);
    assert_eq!(one.renew(&held.lease).await.unwrap(), Renewal::Renewed);
    cluster.nodes[primary].signal(Signal::CONT);
    // It learns that it is a replica now, and that is not the word of the cluster on the lock.
    assert_eq!(one.renew(&held.lease).await.unwrap(), Renewal::Renewed);
    assert_eq!(one.release(&held.claim, None).await.unwrap(), Released::Released);
}

#[tokio::test]
async fn a_lock_that_the_promoted_replica_lacks_was_not_released() {
    let (mut cluster, primary, one, held) = held().await;
    let other = cluster.client().await;
    cluster.nodes[primary].signal(Signal::STOP);
    cluster.nodes[primary + 3].kill();
    cluster.nodes[primary + 3].revive();
    // The first request goes to the silent node, and might be carried out there.
    let told = one.release(&held.claim, None).await;
    assert!(!matches!(told, Ok(Released::Released)), "{told:?}");
    let next = granted(&other, &claim("n", TTL)).await;
    assert!(next.token > held.token);
    cluster.nodes[primary].signal(Signal::CONT);
}

#[tokio::test]
async fn a_node_that_is_set_up_wrong_disturbs_no_name_of_another_one() {
    let mut cluster = Cluster::with(3, false, &[]).await;
    let owner = cluster.owner(cluster.slot("n").await).await;
    let one = cluster.client().await;
    granted(&one, &claim("n", TTL)).await;
    let other = &cluster.nodes[(owner + 1) % 3];
    let _: () = other.command("CONFIG SET maxmemory-policy allkeys-lru").await;
    let _: () = other.command("CONFIG SET maxmemory 1gb").await;
    cluster.nodes[owner].kill();
    let error = one.try_acquire(&claim("n", TTL)).await.unwrap_err();
    assert!(error.is_retryable(), "{error:?}");
}

#[tokio::test]
async fn a_node_of_another_cluster_takes_no_lock_over_while_this_one_is_silent() {
    let cluster = Cluster::with(3, false, &[]).await;
    let other = Cluster::with(1, false, &[]).await;
    let signal = |of: &Cluster, signal| of.nodes.iter().for_each(|node| node.signal(signal));
    // So that the first of them is found, whatever the order.
    signal(&other, Signal::STOP);
    let config = RedisConfig::cluster([&cluster, &other].map(|of| ("127.0.0.1", of.nodes[0].port())));
    let one = config.op_timeout(Duration::from_secs(6)).connect().await.unwrap();
    let held = granted(&one, &claim("n", TTL)).await;
    signal(&other, Signal::CONT);
    signal(&cluster, Signal::STOP);
    let error = one.try_acquire(&claim("n", TTL)).await.unwrap_err();
    assert!(error.to_string().contains("another cluster"), "{error}");
    assert_eq!(other.nodes[0].command::<u64>("DBSIZE").await, 0);
    signal(&cluster, Signal::CONT);
    assert_eq!(one.renew(&held.lease).await.unwrap(), Renewal::Renewed);
}

#[tokio::test]
async fn a_node_whose_password_has_changed_is_left_for_the_one_that_took_its_place() {
    let (cluster, primary, one, held) = held().await;
    cluster.until_replicated(primary).await;
    let _: () = cluster.nodes[primary + 3].command("CLUSTER FAILOVER").await;
    until_promoted(&cluster, primary, primary + 3).await;
    let mut old = cluster.nodes[primary].plain().await;
    for words in [
        &["CONFIG", "SET", "requirepass", "hunter2"][..],
        &["CLIENT", "KILL", "TYPE", "normal"],
    ] {
        let command = words.iter().fold(redis::Cmd::new(), |mut command, word| {
            command.arg(word);
            command
        });
        command.exec_async(&mut old).await.unwrap();
    }
    assert_eq!(one.renew(&held.lease).await.unwrap(), Renewal::Renewed);
}

#[tokio::test]
async fn a_replica_that_is_promoted_without_data_loses_the_lock_and_its_tokens_are_higher() {
    let (mut cluster, primary, one, held) = held().await;
    cluster.nodes[primary].signal(Signal::STOP);
    cluster.nodes[primary + 3].kill();
    cluster.nodes[primary + 3].revive();
    assert_eq!(one.renew(&held.lease).await.unwrap(), Renewal::NotHeld);
    let next = granted(&one, &claim("n", TTL)).await;
    assert!(next.token > held.token);
    cluster.nodes[primary].signal(Signal::CONT);
    assert_eq!(one.renew(&next.lease).await.unwrap(), Renewal::Renewed);
}

#[tokio::test]
async fn nodes_can_be_added_and_removed_under_holds_and_waits() {
    let mut cluster = Cluster::with(3, false, &[]).await;
    let slot = cluster.slot("n").await;
    let from = cluster.owner(slot).await;
    let one = cluster.client().await;
    let mut last = granted(&one, &claim("n", TTL)).await;
    let mut before = one;
    let waits = queue(&cluster, "n", 2).await;
    cluster.start_node(&[]);
    cluster.meet(from, 3).await;
    cluster.until_known().await;
    cluster.move_slot(slot, from, 3).await;
    cluster.until_known().await;
    assert_eq!(before.renew(&last.lease).await.unwrap(), Renewal::Renewed);
    cluster.until_queued("n", 2).await;
    let mut waits = waits.into_iter();
    for leaves in [false, true] {
        if leaves {
            cluster.move_slot(slot, 3, from).await;
            cluster.until_known().await;
            let gone = cluster.id(3).await;
            for node in &cluster.nodes[..3] {
                let _: () = node.command(&format!("CLUSTER FORGET {gone}")).await;
            }
            drop(cluster.nodes.pop());
            cluster.until_known().await;
        }
        before.release(&last.claim, None).await.unwrap();
        let (lock, wait) = waits.next().unwrap();
        let next = wait.await.unwrap();
        assert!(next.token > last.token);
        (before, last) = (lock, next);
    }
    assert_eq!(before.release(&last.claim, None).await.unwrap(), Released::Released);
}

#[tokio::test]
async fn a_slot_that_no_node_serves_is_an_error_that_says_so() {
    let cluster = Cluster::with(3, false, &["--cluster-require-full-coverage", "no"]).await;
    let slot = cluster.slot("n").await;
    let (owner, other) = (cluster.owner(slot).await, slot + 1);
    for node in &cluster.nodes {
        let _: () = node.command(&format!("CLUSTER DELSLOTS {slot}")).await;
    }
    let one = cluster
        .config()
        .op_timeout(Duration::from_millis(500))
        .connect()
        .await
        .unwrap();
    let error = one.try_acquire(&claim("n", TTL)).await.unwrap_err();
    assert!(matches!(error, LockError::Unavailable { .. }), "{error:?}");
    let text = error.to_string();
    assert!(
        text.contains(&format!("slot {slot}")) && text.contains("1 of 16384"),
        "{text}"
    );
    // A list of the others would look whole.
    let error = one.list("").await.unwrap_err();
    assert!(error.to_string().contains("1 of 16384"), "{error}");
    let warnings = one.server_info().await.unwrap().warnings;
    assert!(warnings[0].contains("1 of 16384"), "{warnings:?}");
    // All others are served, unless all must be.
    assert!(granted(&one, &claim("m", TTL)).await.token.get() > 0);
    for node in &cluster.nodes {
        let _: () = node.command("CONFIG SET cluster-require-full-coverage yes").await;
        let _: () = node.command(&format!("CLUSTER DELSLOTS {other}")).await;
        node.until_cluster_info("cluster_state:fail").await;
    }
    let error = one.try_acquire(&claim("m2", TTL)).await.unwrap_err();
    assert!(error.to_string().contains("cluster-require-full-coverage"), "{error}");
    let _: () = cluster.nodes[owner]
        .command(&format!("CLUSTER ADDSLOTS {slot} {other}"))
        .await;
    cluster.until_known().await;
    granted(&one, &claim("n", TTL)).await;
}
