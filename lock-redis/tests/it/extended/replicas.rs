//! Primaries whose replicas are gone or were promoted.

use std::time::Duration;

use lock_core::{DistributedLock, Locks, LossReason};

use crate::server::{Ask, pair, until, until_renewed};

const TTL: Duration = Duration::from_secs(6);

#[tokio::test]
async fn a_holder_whose_primary_was_replaced_is_told_within_its_ttl_if_the_primary_needs_replicas() {
    let (old, new) = pair().await;
    let lock = old.client().await;
    let warnings = lock.server_info().await.unwrap().warnings;
    let is_warned = warnings.len() == 1 && warnings[0].contains("min-replicas-to-write");
    assert!(is_warned, "{warnings:?}");
    for setting in ["min-replicas-to-write", "min-replicas-max-lag"] {
        let _: () = old.command(&format!("CONFIG SET {setting} 1")).await;
    }
    assert_eq!(lock.server_info().await.unwrap().warnings, [""; 0]);
    let locks = Locks::new(lock);
    let guard = locks.lock("n").ttl(TTL).await.unwrap();
    until_renewed(&guard).await;
    // The primary stays up, and sees that it has no replica any more.
    new.follow(None).await;
    old.until_info("replication", "connected_slaves:0").await;
    assert_eq!(guard.lost().await, LossReason::Expired);
    // The server keeps the lock for longer than the holder counts on, and says until then that it is held, without a write.
    until("the primary refuses to write", async || {
        let error = locks.lock("n").no_wait().await.unwrap_err();
        format!("{error:#}").contains("min-replicas-to-write")
    })
    .await;
}
