//! What the backend does, asked through the trait as the core asks it.

use std::pin::pin;

use crate::file::{File, LONG, busy, claim, granted, until_waiting, waited};
use lock_core::{DistributedLock, LockError, Released, Renewal, Wait};
use lock_sqlite::SqliteConfig;

#[tokio::test]
async fn the_holder_is_shown_with_all_that_is_known() {
    let file = File::new();
    let (a, b) = (file.client().await, file.client().await);
    let claim = claim("n", LONG).with_label("nightly 'import'");
    assert!(b.holders(claim.name()).await.unwrap().pop().is_none());
    let grant = granted(&a, &claim).await;
    let held = busy(&b, &crate::file::claim("n", LONG)).await;
    assert!(held.retry_after.unwrap() > LONG * 3 / 4);
    for holder in [b.holders(claim.name()).await.unwrap().pop(), held.holder] {
        let holder = holder.unwrap();
        assert_eq!(holder.name.as_ref(), Some(claim.name()));
        assert_eq!(holder.owner, Some(claim.owner()));
        assert_eq!(holder.token, Some(grant.token));
        assert_eq!(holder.label.as_deref(), Some("nightly 'import'"));
        assert_eq!(holder.pid, Some(std::process::id()));
        assert!(holder.host.is_some());
        assert!(holder.acquired_at.unwrap().elapsed().unwrap() < LONG);
        assert!(holder.remaining.unwrap() <= LONG);
    }
}

#[tokio::test]
async fn another_boot_frees_every_lock() {
    let file = File::new();
    let (a, b) = (file.client().await, file.client().await);
    let (before, after) = (claim("n", LONG), claim("n", LONG));
    let grant = granted(&a, &before).await;
    file.sql("UPDATE lock SET boot = '00000000-0000-4000-8000-000000000000'");
    assert!(b.holders(before.name()).await.unwrap().pop().is_none());
    assert!(b.list("").await.unwrap().is_empty());
    assert_eq!(a.renew(&grant.lease).await.unwrap(), Renewal::NotHeld);
    assert!(granted(&b, &after).await.token > grant.token);
    file.sql("UPDATE lock SET boot = '00000000-0000-4000-8000-000000000000'");
    assert_eq!(b.release(&after, None).await.unwrap(), Released::NotHeld);
    granted(&b, &after).await;
    file.sql("UPDATE lock SET boot = '00000000-0000-4000-8000-000000000000'");
    file.client().await;
    assert_eq!(file.rows(), 0);
}

#[tokio::test]
async fn releasing_a_claim_ends_its_wait() {
    let file = File::new();
    let lock = file.client().await;
    let (held, wanted) = (claim("n", LONG), claim("n", LONG));
    granted(&lock, &held).await;
    let mut waiting = pin!(lock.acquire(&wanted, Wait::until(None)));
    until_waiting(&lock, waiting.as_mut()).await;
    assert_eq!(lock.release(&wanted, None).await.unwrap(), Released::NotHeld);
    assert!(waiting.await.unwrap().granted().is_none());
}

#[tokio::test]
async fn many_names_wait_at_once_while_requests_of_the_same_client_go_on() {
    let file = File::new();
    let (a, b) = (file.client().await, file.client().await);
    let mut waiting = Vec::new();
    let mut held = Vec::new();
    for i in 0..300 {
        let mine = claim(&format!("n{i}"), LONG);
        granted(&a, &mine).await;
        held.push(mine);
        let (b, wanted) = (b.clone(), claim(&format!("n{i}"), LONG));
        waiting.push(tokio::spawn(async move { waited(&b, &wanted).await }));
    }
    let other = claim("other", LONG);
    let grant = granted(&b, &other).await;
    for _ in 0..50 {
        assert_eq!(b.renew(&grant.lease).await.unwrap(), Renewal::Renewed);
    }
    for mine in &held {
        a.release(mine, None).await.unwrap();
    }
    for waiter in waiting {
        waiter.await.unwrap();
    }
}

#[tokio::test]
async fn expired_rows_are_cleared_away_by_later_grants() {
    let file = File::new();
    let lock = file.client().await;
    for i in 0..40 {
        granted(&lock, &claim(&format!("left/{i}"), LONG)).await;
    }
    file.sql("UPDATE lock SET expires = 1");
    assert!(lock.list("").await.unwrap().is_empty());
    for _ in 0..30 {
        let claim = claim("busy", LONG);
        granted(&lock, &claim).await;
        lock.release(&claim, None).await.unwrap();
    }
    assert_eq!(file.rows(), 0);
}

#[tokio::test]
async fn closing_frees_what_the_client_holds_and_ends_it_for_good() {
    let file = File::new();
    let (a, b) = (file.client().await, file.client().await);
    let (mine, other, next) = (claim("n", LONG), claim("other", LONG), claim("n", LONG));
    granted(&a, &mine).await;
    granted(&b, &other).await;
    let wanted = claim("other", LONG);
    let mut waiting = pin!(a.acquire(&wanted, Wait::until(None)));
    until_waiting(&a, waiting.as_mut()).await;
    a.close().await.unwrap();
    a.close().await.unwrap();
    assert!(matches!(waiting.await, Err(LockError::Closed { .. })));
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
async fn a_client_that_connects_lazily_opens_at_the_first_request() {
    let file = File::new();
    let lock = SqliteConfig::new(file.path()).connect_lazy().unwrap();
    assert!(!file.path().exists());
    granted(&lock, &claim("n", LONG)).await;
    assert!(file.path().exists());
    let missing = SqliteConfig::new(file.beside("no/locks.db")).connect_lazy().unwrap();
    let refused = missing.try_acquire(&claim("n", LONG)).await.unwrap_err();
    assert!(matches!(refused, LockError::Configuration { .. }), "{refused}");
    std::fs::create_dir(file.beside("no")).unwrap();
    granted(&missing, &claim("n", LONG)).await;
}
