//! What reaches the server after it was given up, and state that goes back.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod server;

use std::time::Duration;

use conformance_tests::faults::Proxy;
use conformance_tests::servers::Data;
use lock_core::{Claim, DistributedLock, FencingToken, Released};
use lock_etcd::EtcdLock;
use server::{LONG, PATIENCE, claim, client, config, config_at, granted, plain, queue, start};

#[tokio::test]
async fn a_commit_delayed_past_its_clean_up_leaves_no_key_while_the_client_lives_on() {
    let server = start().await;
    let proxy = Proxy::start(server.authority()).await.unwrap();
    let limit = Duration::from_millis(500);
    let at = proxy.address().to_string();
    let lock = config_at(&at).op_timeout(limit).connect().await.unwrap();
    let etcd = plain(&server).await;
    // Keeps the lease alive that both share.
    let kept = granted(&lock, &claim("kept", LONG)).await;
    let given_up = claim("n", LONG);
    let held = proxy.hold(given_up.owner().to_string().as_bytes());
    assert!(lock.try_acquire(&given_up).await.is_err());
    held.caught().await;
    // On another connection, as the first one is stuck.
    let cleaning = async {
        loop {
            match lock.release(&given_up).await {
                Ok(released) => return released,
                Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        }
    };
    let released = tokio::time::timeout(PATIENCE, cleaning).await.unwrap();
    assert_eq!(released, Released::NotHeld);
    held.deliver();
    for _ in 0..50 {
        assert!(queue(&etcd, "n").await.is_empty());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(queue(&etcd, "kept").await.len(), 1);
    assert!(kept.lease.is_valid(lock.clock().now()));
    // What it shut out was its own: the next one is granted.
    granted(&lock, &claim("n", LONG)).await;
}

/// The token of one more grant.
async fn next(lock: &EtcdLock) -> FencingToken {
    let wanted = Claim::new("n".parse().unwrap(), LONG);
    let taking = async {
        loop {
            if let Ok(attempt) = lock.try_acquire(&wanted).await
                && let Some(grant) = attempt.granted()
            {
                return grant.token;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let token = tokio::time::timeout(PATIENCE, taking).await.unwrap();
    lock.release(&wanted).await.unwrap();
    token
}

#[tokio::test]
async fn tokens_rise_across_restart_compaction_and_defragmentation_and_the_restore_of_an_old_copy() {
    let server = start().await;
    // One that sees everything, one that sleeps through it, one that is new each time.
    let (busy, asleep) = (client(&server).await, client(&server).await);
    let mut last = next(&asleep).await;
    let mut rises = async |lock: &EtcdLock, after: &str| {
        let token = next(lock).await;
        assert!(token > last, "{token} came after {last}, after {after}");
        last = token;
    };
    server.copy().await.unwrap();
    for _ in 0..50 {
        rises(&busy, "a grant").await;
    }
    server.restart(Data::Kept).await.unwrap();
    rises(&busy, "a restart").await;
    rises(&client(&server).await, "a restart").await;

    let etcd = plain(&server).await;
    let revision = etcd
        .kv_client()
        .get("n", None)
        .await
        .unwrap()
        .header()
        .unwrap()
        .revision();
    etcd.kv_client().compact(revision, None).await.unwrap();
    etcd.maintenance_client().defragment().await.unwrap();
    rises(&busy, "compaction and defragmentation").await;

    server.restart(Data::Copied).await.unwrap();
    let now = plain(&server).await.kv_client().get("n", None).await.unwrap();
    assert!(now.header().unwrap().revision() < revision, "the revisions went back");
    rises(&asleep, "the restore of an old copy").await;
    rises(&busy, "the restore of an old copy").await;
    rises(&config(&server).connect().await.unwrap(), "the restore of an old copy").await;

    server.restart(Data::Lost).await.unwrap();
    rises(&asleep, "the loss of everything").await;
    rises(&busy, "the loss of everything").await;
}
