//! Grants that replicas must have.

use std::future::IntoFuture;
use std::time::Duration;

use lock_core::{Clock, DistributedLock, LockError, Locks, LossReason, Renewal};
use rustix::process::Signal;

use crate::server::{
    HANG_LIMIT, LONG, Server, claim, granted, name, pair, until, until_queued, until_renewed, waiting,
};

#[tokio::test]
async fn a_grant_is_on_the_replica_when_it_is_told_however_it_came_about() {
    let (primary, replica) = pair().await;
    let config = primary.config().min_replicas(1);
    let (a, b) = (config.clone().connect().await.unwrap(), config.connect().await.unwrap());
    let owner_there = async || {
        let value: String = replica.command("GET {fencelock:n}:lock").await;
        value.split(' ').nth(1).unwrap().to_owned()
    };
    let (first, second, third) = (claim("n", LONG), claim("n", LONG), claim("n", LONG));
    granted(&a, &first).await;
    assert_eq!(owner_there().await, first.owner().to_string());
    a.release(&first, None).await.unwrap();
    granted(&a, &second).await;
    assert_eq!(owner_there().await, second.owner().to_string());
    let wait = waiting(&b, &third);
    until_queued(&primary, "n", 1).await;
    a.release(&second, None).await.unwrap();
    wait.await.unwrap();
    assert_eq!(owner_there().await, third.owner().to_string());
}

#[tokio::test]
async fn a_grant_that_too_few_replicas_have_is_given_back() {
    let (primary, replica) = pair().await;
    // Replicas are waited for during half of it.
    let limit = Duration::from_secs(8);
    let config = primary.config().op_timeout(limit);
    let lock = config.clone().min_replicas(1).connect().await.unwrap();
    replica.signal(Signal::STOP);
    let error = lock.try_acquire(&claim("n", LONG)).await.unwrap_err();
    assert!(matches!(error, LockError::Unavailable { .. }), "{error:?}");
    assert!(format!("{error:#}").contains("0 of 1 replicas"), "{error}");
    assert!(lock.holders(&name("n")).await.unwrap().pop().is_none());
    // Nobody else waits for replicas.
    let other = config.connect().await.unwrap();
    granted(&other, &claim("n", LONG)).await;
    replica.signal(Signal::CONT);
    // It takes the replica a moment to catch up.
    let other = claim("other", LONG);
    until("the replica has caught up", async || {
        match lock.try_acquire(&other).await {
            Err(LockError::Unavailable { .. }) => false,
            attempt => attempt.unwrap().granted().is_some(),
        }
    })
    .await;
}

const TTL: Duration = Duration::from_secs(6);

/// Promotes the replica while its primary stays up, and waits until the primary has seen that it has none any more.
async fn split(primary: &Server, replica: &Server) {
    replica.replicate(None).await;
    primary.until_info("replication", "connected_slaves:0").await;
}

#[tokio::test]
async fn a_holder_whose_primary_was_replaced_is_told_within_its_ttl_if_it_needs_replicas() {
    let (old, new) = pair().await;
    // For half of the time of a request its grant waits for replicas; the rest is for all else that it does.
    let config = old.config().min_replicas(1).op_timeout(Duration::from_secs(10));
    let locks = Locks::new(config.connect().await.unwrap());
    let guard = locks.lock("n").ttl(TTL).await.unwrap();
    until_renewed(&guard).await;
    split(&old, &new).await;
    // The replica has the last renewal that counted, so nobody else gets the lock before the holder knows.
    let successor = Locks::new(new.client().await);
    let successor = tokio::spawn(successor.lock("n").ttl(TTL).wait_for(HANG_LIMIT).into_future());
    until("the holder is told", async || {
        // In this order: it may be told between the two.
        let granted = successor.is_finished();
        assert!(!granted || !guard.is_held(), "two believe that they hold the lock");
        !guard.is_held()
    })
    .await;
    assert_eq!(guard.lost().await, LossReason::Expired);
    // Renewals that did not count have lengthened the lease there; the client releases it after the loss.
    old.until_locked("n", false).await;
    let error = locks.lock("n").no_wait().await.unwrap_err();
    assert!(format!("{error:#}").contains("0 of 1 replicas"), "{error}");
    assert!(successor.await.unwrap().unwrap().token() > guard.token());
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
async fn a_renewal_that_too_few_replicas_have_does_not_count() {
    let (primary, replica) = pair().await;
    let lock = primary.config().min_replicas(1).connect().await.unwrap();
    // Replicas are waited for during an eighth of it.
    let grant = granted(&lock, &claim("n", TTL * 2)).await;
    assert_eq!(lock.renew(&grant.lease).await.unwrap(), Renewal::Renewed);
    replica.signal(Signal::STOP);
    let error = lock.renew(&grant.lease).await.unwrap_err();
    assert!(format!("{error:#}").contains("0 of 1 replicas"), "{error}");
    replica.signal(Signal::CONT);
    // It takes the replica a moment to catch up.
    until("the replica has caught up", async || {
        lock.renew(&grant.lease).await.is_ok()
    })
    .await;
    assert!(grant.lease.is_valid(Clock::system().now()));
}

#[tokio::test]
async fn a_reservation_is_on_the_replica_when_it_counts_and_fails_if_it_is_not() {
    const HOUR: Duration = Duration::from_secs(3600);
    let (primary, replica) = pair().await;
    let lock = primary.config().min_replicas(1).connect().await.unwrap();
    let [first, second] = ["n", "other"].map(|name| claim(name, LONG).with_at_least(HOUR));
    granted(&lock, &first).await;
    granted(&lock, &second).await;
    assert_eq!(lock.reserve(&first, HOUR).await.unwrap(), Renewal::Renewed);
    let left: u128 = replica.command("PTTL {fencelock:n}:lock").await;
    assert!(left > (HOUR - LONG).as_millis(), "{left}");
    replica.signal(Signal::STOP);
    let error = lock.reserve(&second, HOUR).await.unwrap_err();
    assert!(format!("{error:#}").contains("0 of 1 replicas"), "{error}");
    replica.signal(Signal::CONT);
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
    let careful = primary.config().min_replicas(1).connect().await.unwrap();
    assert_eq!(careful.server_info().await.unwrap().warnings, [""; 0]);
    let _: () = primary.command("CONFIG SET min-replicas-to-write 1").await;
    assert_eq!(lock.server_info().await.unwrap().warnings, [""; 0]);
}
