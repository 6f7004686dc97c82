//! What the backend does, asked through the trait as the core asks it.

use std::time::Duration;

use lock_core::{Attempt, Clock, DistributedLock, LockError, LossReason, Released, Renewal, Wait};

use crate::server::{HANG_LIMIT, LONG, Server, busy, claim, granted, name, soon, until_queued};

#[tokio::test]
async fn one_holder_at_a_time_and_the_next_token_is_higher() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let (first, second) = (claim("n", LONG), claim("n", LONG));
    let grant = granted(&a, &first).await;
    let held = busy(&b, &second).await;
    assert_eq!(held.holder.unwrap().owner, Some(first.owner()));
    assert!(held.retry_after.unwrap() > LONG - HANG_LIMIT);
    assert_eq!(b.release(&second, None).await.unwrap(), Released::NotHeld);
    assert_eq!(a.release(&first, None).await.unwrap(), Released::Released);
    assert_eq!(a.release(&first, None).await.unwrap(), Released::NotHeld);
    assert!(granted(&b, &second).await.token > grant.token);
    b.release(&second, None).await.unwrap();
    assert_eq!(server.leftovers().await, Vec::<String>::new());
}

#[tokio::test]
async fn a_repeated_acquire_returns_the_token_and_a_full_ttl() {
    let server = Server::start();
    let lock = server.client().await;
    let claim = claim("n", LONG);
    let first = granted(&lock, &claim).await;
    let _: () = server.command("PEXPIRE {fencelock:n}:lock 20000").await;
    assert!(lock.holder(claim.name()).await.unwrap().unwrap().remaining.unwrap() <= Duration::from_secs(20));
    let again = granted(&lock, &claim).await;
    assert_eq!(again.token, first.token);
    assert!(again.lease.deadline() > first.lease.deadline());
    assert!(lock.holder(claim.name()).await.unwrap().unwrap().remaining.unwrap() > LONG - HANG_LIMIT);
    // Also by the way of waiting.
    let again = lock
        .acquire(&claim, Wait::until(soon()))
        .await
        .unwrap()
        .granted()
        .unwrap();
    assert_eq!(again.token, first.token);
}

#[tokio::test]
async fn names_that_look_alike_are_different_names() {
    let server = Server::start();
    let lock = server.client().await;
    let names = [
        "a", "A", "a ", "a/b", "á", "a\u{301}", "{a}", "a}", "}", "{", "a:lock", "a}:lock", "a}:fence", "'", "\"", "%",
        "_", "a%", "𝔞", "*", "a*", "[a]", "\\",
    ];
    for name in names {
        granted(&lock, &claim(name, LONG)).await;
    }
    let mut sorted = names.to_vec();
    sorted.sort_unstable();
    let listed = lock.list("").await.unwrap();
    let listed: Vec<_> = listed.iter().map(|h| h.name.as_ref().unwrap().as_str()).collect();
    assert_eq!(listed, sorted);
    granted(&lock, &claim(&"x".repeat(512), LONG)).await;
}

#[tokio::test]
async fn a_list_holds_exactly_what_starts_with_the_prefix() {
    let server = Server::start();
    let lock = server.client().await;
    let elsewhere = server.config().namespace("other").connect().await.unwrap();
    for name in ["a", "a*", "a*b", "a?b", "aé", "a𝔞", "b", "A*", "[a]", "a\\"] {
        granted(&lock, &claim(name, LONG)).await;
        granted(&elsewhere, &claim(name, LONG)).await;
    }
    for (prefix, expected) in [
        ("a*", &["a*", "a*b"] as &[_]),
        ("a?", &["a?b"]),
        ("[", &["[a]"]),
        ("a\\", &["a\\"]),
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
async fn the_keys_of_a_name_share_a_hash_slot() {
    let server = Server::with(&["--cluster-enabled", "yes"]);
    for name in ["a", "{a}", "a}", "}", "{", "{}", "{a}{b}", "a}:lock"] {
        let mut slots = Vec::new();
        for kind in ["lock", "fence", "order", "waiters"] {
            let key = format!("{{fencelock:{name}}}:{kind}");
            let ask = lock_redis::redis::cmd("CLUSTER").arg("KEYSLOT").arg(key).clone();
            slots.push(server.ask::<i64>(&ask).await);
        }
        assert!(slots.iter().all(|slot| *slot == slots[0]), "{name}");
    }
    let refused = server.config().connect().await.unwrap_err();
    assert!(format!("{refused:#}").contains("Cluster"), "{refused}");
}

#[tokio::test]
async fn the_holder_is_shown_with_all_that_is_known() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
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
    assert!(holder.acquired_at.unwrap().elapsed().unwrap_or_default() < HANG_LIMIT);
    assert!(holder.remaining.unwrap() <= LONG);
}

#[tokio::test]
async fn a_renewal_lengthens_the_lease_and_never_brings_it_back() {
    let server = Server::start();
    let lock = server.client().await;
    let mine = claim("n", LONG);
    let grant = granted(&lock, &mine).await;
    let _: () = server.command("PEXPIRE {fencelock:n}:lock 20000").await;
    assert_eq!(lock.renew(&grant.lease).await.unwrap(), Renewal::Renewed);
    assert!(lock.holder(mine.name()).await.unwrap().unwrap().remaining.unwrap() > LONG - HANG_LIMIT);
    // Gone, and nobody else has taken it.
    let _: () = server.command("DEL {fencelock:n}:lock").await;
    assert_eq!(lock.renew(&grant.lease).await.unwrap(), Renewal::NotHeld);
    assert!(lock.holder(mine.name()).await.unwrap().is_none());
    assert_eq!(lock.release(&mine, None).await.unwrap(), Released::NotHeld);
}

#[tokio::test]
async fn what_an_old_holder_sends_late_spares_its_successor() {
    let server = Server::start();
    let lock = server.client().await;
    let (old, new) = (claim("n", LONG), claim("n", LONG));
    let late = granted(&lock, &old).await;
    let _: () = server.command("DEL {fencelock:n}:lock").await;
    let grant = granted(&lock, &new).await;
    assert!(grant.token > late.token);
    assert_eq!(lock.renew(&late.lease).await.unwrap(), Renewal::NotHeld);
    assert_eq!(lock.release(&old, None).await.unwrap(), Released::NotHeld);
    assert_eq!(lock.renew(&grant.lease).await.unwrap(), Renewal::Renewed);
}

#[tokio::test]
async fn a_forced_release_is_told_to_the_holder_at_once() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let (victim, next) = (claim("n", LONG), claim("n", LONG));
    let grant = granted(&a, &victim).await;
    let taken_from = b.force_release(&name("n")).await.unwrap().unwrap();
    assert_eq!(taken_from.owner, Some(victim.owner()));
    assert!(taken_from.remaining.unwrap() > LONG - HANG_LIMIT);
    assert_eq!(grant.revocation().revoked().await, LossReason::NotHeld);
    assert!(b.force_release(&name("n")).await.unwrap().is_none());
    assert_eq!(a.renew(&grant.lease).await.unwrap(), Renewal::NotHeld);
    assert!(granted(&b, &next).await.token > grant.token);
}

#[tokio::test]
async fn after_a_release_the_same_client_does_not_pass_by_who_waits_at_the_server() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let (first, second, waiting) = (claim("n", LONG), claim("n", LONG), claim("n", LONG));
    granted(&a, &first).await;
    let wait = tokio::spawn({
        let waiting = waiting.clone();
        async move { b.acquire(&waiting, Wait::until(soon())).await }
    });
    until_queued(&server, "n", 1).await;
    assert_eq!(a.release(&first, None).await.unwrap(), Released::Released);
    assert_eq!(busy(&a, &second).await.holder.unwrap().owner, Some(waiting.owner()));
    assert_eq!(wait.await.unwrap().unwrap().granted().unwrap().claim, waiting);
}

#[tokio::test]
async fn a_waiter_is_pushed_its_grant_in_the_order_of_arrival() {
    let server = Server::start();
    let holder = server.client().await;
    let held = claim("n", LONG);
    granted(&holder, &held).await;
    let mut waiting = Vec::new();
    for i in 0..5 {
        let lock = server.client().await;
        let wanted = claim("n", LONG);
        waiting.push((
            wanted.clone(),
            tokio::spawn(async move {
                let grant = lock.acquire(&wanted, Wait::until(soon())).await.unwrap().granted();
                (lock, grant)
            }),
        ));
        until_queued(&server, "n", i + 1).await;
    }
    holder.release(&held, None).await.unwrap();
    let mut last = None;
    for (wanted, wait) in waiting {
        let (lock, grant) = wait.await.unwrap();
        let grant = grant.unwrap();
        assert_eq!(grant.claim, wanted);
        assert!(grant.lease.is_valid(Clock::system().now()));
        assert!(last.is_none_or(|last| grant.token > last));
        last = Some(grant.token);
        lock.release(&wanted, None).await.unwrap();
    }
    assert_eq!(server.leftovers().await, Vec::<String>::new());
}

#[tokio::test]
async fn whoever_tries_does_not_pass_by_who_waits() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let (held, waiting) = (claim("n", LONG), claim("n", LONG));
    granted(&a, &held).await;
    let wait = tokio::spawn({
        let waiting = waiting.clone();
        async move { b.acquire(&waiting, Wait::until(soon())).await }
    });
    until_queued(&server, "n", 1).await;
    // The lock is gone and nobody told: the next one who comes serves the queue.
    let _: () = server.command("DEL {fencelock:n}:lock").await;
    let refused = busy(&a, &claim("n", LONG)).await;
    assert_eq!(refused.holder.unwrap().owner, Some(waiting.owner()));
    assert_eq!(wait.await.unwrap().unwrap().granted().unwrap().claim, waiting);
}

#[tokio::test]
async fn a_renewal_that_finds_the_lock_gone_serves_who_waits() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let (held, waiting) = (claim("n", LONG), claim("n", LONG));
    let grant = granted(&a, &held).await;
    let wait = tokio::spawn(async move { b.acquire(&waiting, Wait::until(soon())).await });
    until_queued(&server, "n", 1).await;
    let _: () = server.command("DEL {fencelock:n}:lock").await;
    assert_eq!(a.renew(&grant.lease).await.unwrap(), Renewal::NotHeld);
    assert!(wait.await.unwrap().unwrap().granted().is_some());
}

#[tokio::test]
async fn a_waiter_is_granted_when_the_lease_runs_out() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let (silent, wanted) = (claim("n", Duration::from_secs(1)), claim("n", LONG));
    let held = granted(&a, &silent).await;
    let grant = b
        .acquire(&wanted, Wait::until(soon()))
        .await
        .unwrap()
        .granted()
        .unwrap();
    assert!(grant.token > held.token);
    // The lease's deadline lies before the expiry; the grant must not. A refresh would come after the deadline of the wait.
    assert!(!held.lease.is_valid(Clock::system().now()));
}

#[tokio::test]
async fn a_wait_ends_busy_at_its_deadline_and_leaves_the_queue() {
    let server = Server::start();
    let lock = server.client().await;
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
    assert_eq!(server.leftovers().await, ["{fencelock:n}:lock"]);
    assert!(
        lock.acquire(&wanted, Wait::until(Some(started)))
            .await
            .unwrap()
            .granted()
            .is_none()
    );
    assert_eq!(server.leftovers().await, ["{fencelock:n}:lock"]);
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
    assert!(b.holder(other.name()).await.unwrap().is_some());
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
