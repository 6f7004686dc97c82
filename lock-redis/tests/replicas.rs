//! Grants that replicas must have.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod server;

use std::time::Duration;

use lock_core::{DistributedLock, LockError};
use rustix::process::Signal;
use server::{LONG, Server, claim, granted, name, soon, until_queued};

/// A primary, and a replica of it that is up to date.
async fn pair() -> (Server, Server) {
    let (primary, replica) = (Server::with(&["--repl-diskless-sync-delay", "0"]), Server::start());
    let _: () = replica
        .command(&format!("REPLICAOF 127.0.0.1 {}", primary.port()))
        .await;
    // The primary must know it, too.
    while !primary
        .command::<String>("INFO replication")
        .await
        .contains("state=online")
    {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    (primary, replica)
}

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
    assert!(a.hand_over(&first, &second).await.unwrap().to.granted().is_some());
    assert_eq!(owner_there().await, second.owner().to_string());
    let wait = tokio::spawn({
        let third = third.clone();
        async move { (b.acquire(&third, soon()).await.unwrap().granted(), b) }
    });
    until_queued(&primary, "n", 1).await;
    a.release(&second).await.unwrap();
    assert!(wait.await.unwrap().0.is_some());
    assert_eq!(owner_there().await, third.owner().to_string());
}

#[tokio::test]
async fn a_grant_that_too_few_replicas_have_is_given_back() {
    let (primary, replica) = pair().await;
    let limit = Duration::from_millis(600);
    let config = primary.config().op_timeout(limit);
    let lock = config.clone().min_replicas(1).connect().await.unwrap();
    replica.signal(Signal::STOP);
    let error = lock.try_acquire(&claim("n", LONG)).await.unwrap_err();
    assert!(matches!(error, LockError::Unavailable { .. }), "{error:?}");
    assert!(error.to_string().contains("0 of 1 replicas"), "{error}");
    assert!(lock.holder(&name("n")).await.unwrap().is_none());
    // Nobody else waits for replicas.
    let other = config.connect().await.unwrap();
    granted(&other, &claim("n", LONG)).await;
    replica.signal(Signal::CONT);
    // It takes the replica a moment to catch up.
    while let Err(error) = lock.try_acquire(&claim("other", LONG)).await {
        assert!(matches!(error, LockError::Unavailable { .. }), "{error:?}");
    }
}
