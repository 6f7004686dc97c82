//! Primaries whose replicas are gone or were promoted.

use std::time::Duration;

use lock_core::{DistributedLock, Locks, LossReason};

use crate::server::{HANG_LIMIT, Server, pair, until, until_renewed};

const TTL: Duration = Duration::from_secs(6);

/// Promotes the replica while its primary stays up, and waits until the primary has seen that it has none any more.
async fn split(primary: &Server, replica: &Server) {
    replica.replicate(None).await;
    primary.until_info("replication", "connected_slaves:0").await;
}

#[tokio::test]
async fn a_holder_whose_primary_was_replaced_is_told_within_its_ttl_if_the_primary_needs_replicas() {
    let (old, new) = pair().await;
    for setting in ["min-replicas-to-write", "min-replicas-max-lag"] {
        let _: () = old.command(&format!("CONFIG SET {setting} 1")).await;
    }
    let locks = Locks::new(old.client().await);
    let guard = locks.lock("n").ttl(TTL).await.unwrap();
    until_renewed(&guard).await;
    split(&old, &new).await;
    assert_eq!(guard.lost().await, LossReason::Expired);
    // The server keeps the lock for longer than the holder counts on, and says until then that it is held, without a write.
    until("the primary refuses to write", async || {
        let error = locks.lock("n").no_wait().await.unwrap_err();
        format!("{error:#}").contains("min-replicas-to-write")
    })
    .await;
}

#[tokio::test]
async fn without_replicas_that_it_needs_a_replaced_primary_keeps_its_holders_and_outranks() {
    let (old, new) = pair().await;
    let locks = Locks::new(old.client().await);
    let stale = locks.lock("n").ttl(TTL).await.unwrap();
    new.until_locked("n", true).await;
    split(&old, &new).await;
    let current = Locks::new(new.client().await);
    let current = current.lock("n").ttl(TTL).wait_for(HANG_LIMIT).await.unwrap();
    // What docs/guarantees.md says: as long as both servers are up, both believe.
    until_renewed(&current).await;
    until_renewed(&stale).await;
    assert!(stale.is_held() && current.is_held());
    stale.release().await.unwrap();
    let stale = locks.lock("n").await.unwrap();
    assert!(stale.token() > current.token() && current.is_held());
}

#[tokio::test]
async fn a_primary_that_goes_on_without_its_replicas_is_warned_of() {
    let (primary, _replica) = pair().await;
    let lock = primary.client().await;
    let warnings = lock.server_info().await.unwrap().warnings;
    assert!(
        warnings.len() == 1 && warnings[0].contains("min-replicas-to-write"),
        "{warnings:?}"
    );
    let _: () = primary.command("CONFIG SET min-replicas-to-write 1").await;
    assert_eq!(lock.server_info().await.unwrap().warnings, [""; 0]);
}
