//! What the backend does, asked through the trait as the core asks it.

use std::pin::pin;
use std::time::Duration;

use crate::file::{File, HANG_LIMIT, LONG, SHORT, busy, claim, granted, name, until_waiting};
use lock_core::{Attempt, Clock, DistributedLock, LockError, Released, Renewal, Stamp, Wait};
use lock_sqlite::SqliteConfig;

fn soon() -> Option<Stamp> {
    Some(Clock::system().now() + HANG_LIMIT)
}

#[tokio::test]
async fn one_holder_at_a_time_and_the_next_token_is_higher() {
    let file = File::new();
    let (a, b) = (file.client().await, file.client().await);
    let (first, second) = (claim("n", LONG), claim("n", LONG));
    let grant = granted(&a, &first).await;
    let held = busy(&b, &second).await;
    assert_eq!(held.holder.unwrap().owner, Some(first.owner()));
    assert!(held.retry_after.unwrap() > LONG * 3 / 4);
    assert_eq!(b.release(&second, None).await.unwrap(), Released::NotHeld);
    assert_eq!(a.release(&first, None).await.unwrap(), Released::Released);
    assert_eq!(a.release(&first, None).await.unwrap(), Released::NotHeld);
    assert!(granted(&b, &second).await.token > grant.token);
}

#[tokio::test]
async fn a_repeated_acquire_returns_the_token_and_a_full_ttl() {
    let file = File::new();
    let lock = file.client().await;
    let claim = claim("n", LONG);
    let first = granted(&lock, &claim).await;
    file.sql("UPDATE lock SET expires = expires - 60000000000");
    assert!(lock.holder(claim.name()).await.unwrap().unwrap().remaining.unwrap() <= LONG / 2);
    let again = granted(&lock, &claim).await;
    assert_eq!(again.token, first.token);
    assert!(again.lease.deadline() > first.lease.deadline());
    assert!(lock.holder(claim.name()).await.unwrap().unwrap().remaining.unwrap() > LONG * 3 / 4);
}

#[tokio::test]
async fn names_that_look_alike_are_different_names() {
    let file = File::new();
    let lock = file.client().await;
    let names = [
        "a", "A", "a ", "a/b", "á", "a\u{301}", "{a}", "a:lock", "'", "\"", "%", "_", "a%", "𝔞",
    ];
    for name in names {
        granted(&lock, &claim(name, LONG)).await;
    }
    let mut sorted = names.to_vec();
    sorted.sort_unstable();
    let listed = lock.list("").await.unwrap();
    assert_eq!(
        listed
            .iter()
            .map(|h| h.name.as_ref().unwrap().as_str())
            .collect::<Vec<_>>(),
        sorted
    );
    granted(&lock, &claim(&"x".repeat(512), LONG)).await;
}

#[tokio::test]
async fn a_list_holds_exactly_what_starts_with_the_prefix() {
    let file = File::new();
    let lock = file.client().await;
    for name in ["a", "a%", "a%b", "a_b", "aé", "a𝔞", "b", "A%"] {
        granted(&lock, &claim(name, LONG)).await;
    }
    let expired = claim("a%expired", SHORT);
    granted(&lock, &expired).await;
    file.sql("UPDATE lock SET expires = 0 WHERE name = 'a%expired'");
    for (prefix, expected) in [
        ("a%", &["a%", "a%b"] as &[_]),
        ("a_", &["a_b"]),
        ("aé", &["aé"]),
        ("a\u{1d51e}", &["a𝔞"]),
        ("zz", &[]),
    ] {
        let listed = lock.list(prefix).await.unwrap();
        let listed: Vec<_> = listed.iter().map(|h| h.name.as_ref().unwrap().as_str()).collect();
        assert_eq!(listed, expected, "{prefix}");
    }
}

#[tokio::test]
async fn the_holder_is_shown_with_all_that_is_known() {
    let file = File::new();
    let (a, b) = (file.client().await, file.client().await);
    let claim = claim("n", LONG).with_label("nightly 'import'");
    assert!(b.holder(claim.name()).await.unwrap().is_none());
    let grant = granted(&a, &claim).await;
    let holder = b.holder(claim.name()).await.unwrap().unwrap();
    assert_eq!(holder.name.as_ref(), Some(claim.name()));
    assert_eq!(holder.owner, Some(claim.owner()));
    assert_eq!(holder.token, Some(grant.token));
    assert_eq!(holder.label.as_deref(), Some("nightly 'import'"));
    assert_eq!(holder.pid, Some(std::process::id()));
    assert!(holder.host.is_some());
    assert!(holder.acquired_at.unwrap().elapsed().unwrap() < LONG);
    assert!(holder.remaining.unwrap() <= LONG);
}

#[tokio::test]
async fn a_renewal_lengthens_the_lease_and_never_brings_it_back() {
    let file = File::new();
    let lock = file.client().await;
    let mine = claim("n", LONG);
    let grant = granted(&lock, &mine).await;
    file.sql("UPDATE lock SET expires = expires - 60000000000");
    assert_eq!(lock.renew(&grant.lease).await.unwrap(), Renewal::Renewed);
    assert!(lock.holder(mine.name()).await.unwrap().unwrap().remaining.unwrap() > LONG * 3 / 4);
    // Expired, and nobody else has taken it.
    file.sql("UPDATE lock SET expires = 1");
    assert_eq!(lock.renew(&grant.lease).await.unwrap(), Renewal::NotHeld);
    assert!(lock.holder(mine.name()).await.unwrap().is_none());
    assert_eq!(lock.release(&mine, None).await.unwrap(), Released::NotHeld);
}

#[tokio::test]
async fn what_an_old_holder_sends_late_spares_its_successor() {
    let file = File::new();
    let lock = file.client().await;
    let (old, new) = (claim("n", LONG), claim("n", LONG));
    let late = granted(&lock, &old).await;
    file.sql("UPDATE lock SET expires = 1");
    let grant = granted(&lock, &new).await;
    assert!(grant.token > late.token);
    assert_eq!(lock.renew(&late.lease).await.unwrap(), Renewal::NotHeld);
    assert_eq!(lock.release(&old, None).await.unwrap(), Released::NotHeld);
    assert_eq!(lock.renew(&grant.lease).await.unwrap(), Renewal::Renewed);
}

#[tokio::test]
async fn another_boot_frees_every_lock() {
    let file = File::new();
    let (a, b) = (file.client().await, file.client().await);
    let (before, after) = (claim("n", LONG), claim("n", LONG));
    let grant = granted(&a, &before).await;
    file.sql("UPDATE lock SET boot = '00000000-0000-4000-8000-000000000000'");
    assert!(b.holder(before.name()).await.unwrap().is_none());
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
async fn a_forced_release_is_told_at_the_next_renewal() {
    let file = File::new();
    let (a, b) = (file.client().await, file.client().await);
    let (victim, next) = (claim("n", LONG), claim("n", LONG));
    let grant = granted(&a, &victim).await;
    let taken_from = b.force_release(&name("n")).await.unwrap().unwrap();
    assert_eq!(taken_from.owner, Some(victim.owner()));
    assert!(b.force_release(&name("n")).await.unwrap().is_none());
    assert_eq!(a.renew(&grant.lease).await.unwrap(), Renewal::NotHeld);
    assert!(granted(&b, &next).await.token > grant.token);
}

#[tokio::test]
async fn a_waiter_is_granted_when_another_process_or_its_own_client_lets_go() {
    let file = File::new();
    let (a, b) = (file.client().await, file.client().await);
    for releaser in [&a, &b] {
        let (held, wanted) = (claim("n", LONG), claim("n", LONG));
        granted(releaser, &held).await;
        let mut waiting = pin!(b.acquire(&wanted, Wait::until(soon())));
        until_waiting(&b, waiting.as_mut()).await;
        releaser.release(&held, None).await.unwrap();
        let grant = waiting.await.unwrap().granted().unwrap();
        assert_eq!(grant.claim, wanted);
        b.release(&wanted, None).await.unwrap();
    }
}

#[tokio::test]
async fn a_waiter_is_granted_when_the_lease_runs_out() {
    let file = File::new();
    let (a, b) = (file.client().await, file.client().await);
    let (silent, wanted) = (claim("n", SHORT * 3), claim("n", LONG));
    let held = granted(&a, &silent).await;
    let grant = b
        .acquire(&wanted, Wait::until(soon()))
        .await
        .unwrap()
        .granted()
        .unwrap();
    assert!(grant.token > held.token);
    // The lease's deadline lies before the expiry; the grant must not.
    assert!(Clock::system().now() >= held.lease.deadline());
    assert!(!held.lease.is_valid(Clock::system().now()));
}

#[tokio::test]
async fn a_wait_ends_busy_at_its_deadline_and_says_who_holds() {
    let file = File::new();
    let lock = file.client().await;
    let (held, wanted) = (claim("n", LONG), claim("n", LONG));
    granted(&lock, &held).await;
    let started = Clock::system().now();
    let limit = Duration::from_millis(200);
    let Attempt::Busy(busy) = lock.acquire(&wanted, Wait::until(Some(started + limit))).await.unwrap() else {
        panic!("granted although held");
    };
    let waited = Clock::system().now().since(started);
    assert!(waited >= limit, "{waited:?}");
    assert_eq!(busy.holder.unwrap().owner, Some(held.owner()));
    assert!(
        lock.acquire(&wanted, Wait::until(Some(started)))
            .await
            .unwrap()
            .granted()
            .is_none()
    );
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
        waiting.push(tokio::spawn(
            async move { b.acquire(&wanted, Wait::until(soon())).await },
        ));
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
        assert!(waiter.await.unwrap().unwrap().granted().is_some());
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
    assert!(b.holder(other.name()).await.unwrap().is_some());
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
