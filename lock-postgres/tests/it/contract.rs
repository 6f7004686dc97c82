//! What the backend promises to the core.

use std::time::Duration;

use lock_core::{Attempt, DistributedLock, LockError, Locks, LossReason, Released, Renewal, Wait};
use lock_postgres::{PostgresConfig, Tls};

use crate::server::proxy::Proxy;
use crate::server::{self, Database, HANG_LIMIT, Server, claim, granted, in_time, is_busy, name, soon};

const TTL: Duration = Duration::from_secs(30);

#[tokio::test]
async fn a_lock_is_one_advisory_lock_and_goes_with_its_release() {
    let server = Database::new().await;
    let (one, two) = (server.client().await, server.client().await);
    let (mine, theirs) = (claim("a", TTL), claim("a", TTL));
    let first = granted(&one, &mine).await;
    assert_eq!(server.locks().await, 1);
    assert!(is_busy(&two, &theirs).await);
    let again = granted(&one, &mine).await;
    assert_eq!(again.token, first.token);
    assert_eq!(one.release(&mine, None).await.unwrap(), Released::Released);
    assert_eq!(server.locks().await, 0);
    let next = granted(&two, &theirs).await;
    assert!(next.token > first.token);
    assert_eq!(one.release(&mine, None).await.unwrap(), Released::NotHeld);
}

#[tokio::test]
async fn a_session_that_is_ended_is_told_at_once() {
    let server = Database::new().await;
    let lock = server.client().await;
    let locks = Locks::new(lock.clone());
    let guard = locks.lock("a").ttl(TTL).await.unwrap();
    server.end_sessions().await;
    let told = in_time(guard.lost().wait()).await;
    // And not because its time is over.
    assert_eq!(told, LossReason::Revoked);
    assert!(!guard.is_held());
    locks.lock("a").ttl(TTL).await.unwrap().release().await.unwrap();
}

#[tokio::test]
async fn a_waiter_gets_the_lock_when_it_is_released() {
    let server = Database::new().await;
    let (one, two) = (server.client().await, server.client().await);
    let (mine, theirs) = (claim("a", TTL), claim("a", TTL));
    granted(&one, &mine).await;
    let waiting = tokio::spawn({
        let theirs = theirs.clone();
        async move { two.acquire(&theirs, Wait::until(soon())).await }
    });
    server.until_waiting("a", 1).await;
    one.release(&mine, None).await.unwrap();
    let grant = waiting.await.unwrap().unwrap().granted().unwrap();
    assert_eq!(grant.claim, theirs);
}

#[tokio::test]
async fn a_crash_of_one_process_of_the_server_is_survived_by_tokens() {
    let server = Server::start();
    let lock = server.client().await;
    let first = granted(&lock, &claim("a", TTL)).await;
    server.survives_the_end_of(server::SESSIONS).await;
    in_time(first.lease.revocation().revoked()).await;
    assert_eq!(lock.renew(&first.lease).await.unwrap(), Renewal::NotHeld);
    let next = granted(&lock, &claim("a", TTL)).await;
    assert!(next.token > first.token);
}

#[tokio::test]
async fn a_holder_is_found_and_its_lock_can_be_taken_away() {
    let server = Database::new().await;
    let (one, two) = (server.client().await, server.client().await);
    let mine = claim("a", TTL).with_label("nightly");
    let grant = granted(&one, &mine).await;
    let holder = two.holder(&name("a")).await.unwrap().unwrap();
    assert_eq!(holder.pid, Some(std::process::id()));
    assert_eq!(holder.label.as_deref(), Some("nightly"));
    assert_eq!(two.list("").await.unwrap().len(), 1);
    let ended = two.force_release(&name("a")).await.unwrap().unwrap();
    assert_eq!(ended.label.as_deref(), Some("nightly"));
    in_time(grant.revocation().revoked()).await;
    assert!(two.holder(&name("a")).await.unwrap().is_none());
    assert!(matches!(
        two.try_acquire(&claim("a", TTL)).await.unwrap(),
        Attempt::Granted(_)
    ));
    one.close().await.unwrap();
    assert!(matches!(one.try_acquire(&mine).await, Err(LockError::Closed { .. })));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_whose_connection_ends_is_freed_at_once() {
    let server = Database::new().await;
    let proxy = Proxy::to(server.port()).await;
    let other = server.client().await;
    let config = PostgresConfig::new(server.login_at(proxy.port())).tls(Tls::Disable);
    let lock = config.connect().await.unwrap();
    // Longer than the test waits.
    let first = granted(&lock, &claim("a", 10 * HANG_LIMIT)).await;
    proxy.cut();
    let next = in_time(other.acquire(&claim("a", TTL), Wait::until(None)))
        .await
        .unwrap()
        .granted()
        .unwrap();
    assert!(next.token > first.token);
}
