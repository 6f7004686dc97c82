//! What the backend does, asked through the trait as the core asks it.

use std::time::Duration;

use lock_core::{Attempt, Clock, DistributedLock, LockError, LossReason, Released, Renewal, Wait};

use crate::server::{HANG_LIMIT, LONG, Server, busy, claim, granted, name, until_queued, waiting};

#[tokio::test]
async fn the_holder_is_shown_with_all_that_is_known() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let claim = claim("n", LONG).with_label("nightly 'import'");
    assert!(b.holders(claim.name()).await.unwrap().pop().is_none());
    let grant = granted(&a, &claim).await;
    let holder = b.holders(claim.name()).await.unwrap().pop().unwrap();
    assert_eq!(holder.name.as_ref(), Some(claim.name()));
    assert_eq!(holder.owner, Some(claim.owner()));
    assert_eq!(holder.token, Some(grant.token));
    assert_eq!(holder.label.as_deref(), Some("nightly 'import'"));
    assert_eq!(holder.pid, Some(std::process::id()));
    assert!(holder.host.is_some());
    assert!(holder.acquired_at.unwrap().elapsed().unwrap_or_default() < HANG_LIMIT);
    assert!(holder.remaining.unwrap() <= LONG);
    let found = busy(&b, &self::claim("n", LONG)).await;
    assert_eq!(found.holder.unwrap().owner, Some(claim.owner()));
    assert!(found.retry_after.unwrap() > LONG - HANG_LIMIT);
}

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
async fn a_wait_ends_busy_at_its_deadline_and_leaves_the_queue() {
    let server = Server::start();
    let lock = server.client().await;
    let (held, wanted) = (claim("n", LONG), claim("n", LONG));
    granted(&lock, &held).await;
    for wait in [Duration::from_millis(200), Duration::ZERO] {
        let deadline = Some(Clock::system().now() + wait);
        let Attempt::Busy(busy) = lock.acquire(&wanted, Wait::until(deadline)).await.unwrap() else {
            panic!("granted although held");
        };
        assert_eq!(busy.holder.unwrap().owner, Some(held.owner()));
        assert_eq!(server.leftovers().await, ["{fencelock:n}:lock"]);
    }
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

#[tokio::test]
async fn many_names_wait_at_once_while_requests_of_the_same_client_go_on() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let (mut held, mut waits) = (Vec::new(), Vec::new());
    for i in 0..300 {
        let name = format!("n{i}");
        held.push(granted(&a, &claim(&name, LONG)).await.claim);
        waits.push(waiting(&b, &claim(&name, LONG)));
    }
    let other = claim("other", LONG);
    let grant = granted(&b, &other).await;
    for _ in 0..50 {
        assert_eq!(b.renew(&grant.lease).await.unwrap(), Renewal::Renewed);
    }
    for mine in &held {
        a.release(mine, None).await.unwrap();
    }
    for wait in waits {
        wait.await.unwrap();
    }
}

#[tokio::test]
async fn closing_frees_what_the_client_holds_and_ends_it_for_good() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let (mine, other, next) = (claim("n", LONG), claim("other", LONG), claim("n", LONG));
    granted(&a, &mine).await;
    granted(&b, &other).await;
    let wait = tokio::spawn({
        let (a, wanted) = (a.clone(), claim("other", LONG));
        async move { a.acquire(&wanted, Wait::until(None)).await }
    });
    until_queued(&server, "other", 1).await;
    a.close().await.unwrap();
    a.close().await.unwrap();
    assert!(matches!(wait.await.unwrap(), Err(LockError::Closed { .. })));
    assert!(matches!(a.try_acquire(&mine).await, Err(LockError::Closed { .. })));
    assert!(matches!(
        a.acquire(&mine, Wait::until(None)).await,
        Err(LockError::Closed { .. })
    ));
    assert!(matches!(a.release(&mine, None).await, Err(LockError::Closed { .. })));
    granted(&b, &next).await;
    assert!(b.holders(other.name()).await.unwrap().pop().is_some());
}

#[tokio::test]
async fn a_client_that_connects_lazily_connects_at_the_first_request() {
    let mut server = Server::start();
    server.kill();
    let lock = server.config().connect_lazy().unwrap();
    let refused = lock.try_acquire(&claim("n", LONG)).await.unwrap_err();
    assert!(matches!(refused, LockError::Unavailable { .. }), "{refused}");
    server.revive();
    granted(&lock, &claim("n", LONG)).await;
}
