//! What the backend does, asked through the trait as the core asks it.

use lock_core::{DistributedLock, LossReason, Released, Wait};

use crate::server::{HANG_LIMIT, LONG, Server, claim, granted, name, until_queued};

#[tokio::test]
async fn a_forced_release_is_told_to_the_holder_at_once() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let grant = granted(&a, &claim("n", LONG)).await;
    let taken_from = b.force_release(&name("n")).await.unwrap().pop().unwrap();
    assert_eq!(taken_from.owner, Some(grant.claim.owner()));
    assert!(taken_from.remaining.unwrap() > LONG - HANG_LIMIT);
    assert_eq!(grant.revocation().revoked().await, LossReason::NotHeld);
}

#[tokio::test]
async fn releasing_a_claim_ends_its_wait() {
    let server = Server::start();
    let lock = server.client().await;
    let (held, wanted) = (claim("n", LONG), claim("n", LONG));
    granted(&lock, &held).await;
    let wait = tokio::spawn({
        let (lock, wanted) = (lock.clone(), wanted.clone());
        async move { lock.acquire(&wanted, Wait::until(None)).await }
    });
    until_queued(&server, "n", 1).await;
    assert_eq!(lock.release(&wanted, None).await.unwrap(), Released::NotHeld);
    assert!(wait.await.unwrap().unwrap().granted().is_none());
    until_queued(&server, "n", 0).await;
}
