//! State that goes back.

use std::time::Duration;

use lock_core::{Claim, DistributedLock, FencingToken};
use lock_etcd::EtcdLock;
use test_servers::Data;

use crate::server::{HANG_LIMIT, LONG, client, config, plain, start};

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
    let token = tokio::time::timeout(HANG_LIMIT, taking).await.unwrap();
    lock.release(&wanted, None).await.unwrap();
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
