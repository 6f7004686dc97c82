//! Servers that change their role, or cannot write for a while, under waits and holds.

use std::time::Duration;

use lock_core::{DistributedLock, LockError, LockGuard, Locks};
use lock_redis::RedisConfig;

use crate::server::{self, HANG_LIMIT, LONG, Proxy, Server, claim, granted, name, pair, until, until_renewed};

/// Much longer than what is done within it, on a machine that is busy.
const TTL: Duration = Duration::from_secs(20);

/// A client of the server that the proxy leads to.
async fn by(proxy: &Proxy) -> Locks {
    let config = RedisConfig::new("127.0.0.1", proxy.port());
    Locks::new(config.connect().await.unwrap())
}

/// Renews until that many renewals have failed; the last error.
async fn until_failed(guard: &LockGuard, renewals: u32) -> LockError {
    let (mut failed, mut last) = (0, None);
    until("renewals fail", async || {
        if let Err(error) = guard.renew_now().await {
            failed += 1;
            last = Some(error);
        }
        failed >= renewals
    })
    .await;
    last.unwrap()
}

#[tokio::test]
async fn a_wait_outlasts_a_failover_behind_a_virtual_address() {
    let (old, new) = pair().await;
    let proxy = Proxy::to(old.port()).await;
    let locks = by(&proxy).await;
    granted(&old.client().await, &claim("n", LONG)).await;
    let waiting = locks.lock("n").ttl(TTL).wait_for(HANG_LIMIT);
    let waiting = tokio::spawn(waiting.into_future());
    server::until_queued(&new, "n", 1).await;
    new.replicate(None).await;
    old.replicate(Some(new.port())).await;
    // The address leads to the old primary for a while. With the pauses between, 6 attempts take 2 to 3 s.
    proxy.cut();
    proxy.until_accepted(6).await;
    assert!(!waiting.is_finished());
    proxy.lead_to(new.port());
    new.client()
        .await
        .force_release(&name("n"))
        .await
        .unwrap()
        .pop()
        .unwrap();
    assert!(waiting.await.unwrap().unwrap().is_held());
}

#[tokio::test]
async fn a_hold_outlasts_a_failover_within_its_ttl() {
    let (old, new) = pair().await;
    let proxy = Proxy::to(old.port()).await;
    let locks = by(&proxy).await;
    let guard = locks.lock("n").ttl(TTL).await.unwrap();
    server::until_queued(&new, "n", 0).await;
    new.until_locked("n", true).await;
    new.replicate(None).await;
    old.replicate(Some(new.port())).await;
    let error = until_failed(&guard, 3).await;
    assert!(matches!(error, LockError::Unavailable { .. }), "{error:?}");
    assert!(format!("{error:#}").contains("failover"), "{error}");
    proxy.lead_to(new.port());
    until_renewed(&guard).await;
    assert!(guard.is_held());
}

#[tokio::test]
async fn who_has_never_found_a_primary_is_refused_at_once_by_a_replica() {
    let server = Server::start();
    server.replicate(Some(1)).await;
    let lock = server.config().connect_lazy().unwrap();
    for _ in 0..2 {
        let error = lock.try_acquire(&claim("n", LONG)).await.unwrap_err();
        assert!(matches!(error, LockError::UnsafeConfiguration { .. }), "{error:?}");
    }
    server.replicate(None).await;
    granted(&lock, &claim("n", LONG)).await;
    server.replicate(Some(1)).await;
    let _: () = server.command("CLIENT KILL TYPE pubsub").await;
    let error = lock.try_acquire(&claim("n", LONG)).await.unwrap_err();
    assert!(matches!(error, LockError::Unavailable { .. }), "{error:?}");
}

#[tokio::test]
async fn a_replica_that_lacks_a_lock_is_not_believed_that_it_is_lost() {
    let (server, empty) = (Server::start(), Server::with(&["--repl-diskless-sync-delay", "0"]));
    let lock = server.client().await;
    let grant = granted(&lock, &claim("n", LONG)).await;
    server.replicate(Some(empty.port())).await;
    server.until_locked("n", false).await;
    let error = lock.renew(&grant.lease).await.unwrap_err();
    assert!(matches!(error, LockError::Unavailable { .. }), "{error:?}");
}

#[tokio::test]
async fn waits_and_holds_outlast_a_failed_background_save() {
    let server = Server::with(&["--dbfilename", "data.rdb"]);
    let (locks, other) = (Locks::new(server.client().await), Locks::new(server.client().await));
    let guard = locks.lock("n").ttl(TTL).await.unwrap();
    let waiting = tokio::spawn(other.lock("n").ttl(TTL / 10).wait_for(HANG_LIMIT).into_future());
    server::until_queued(&server, "n", 1).await;
    // Saving moves a file to this place.
    std::fs::create_dir(server.path("data.rdb")).unwrap();
    let _: () = server
        .ask(lock_redis::redis::cmd("CONFIG").arg("SET").arg("save").arg("3600 1"))
        .await;
    let _: () = server.command("BGSAVE").await;
    server.until_info("persistence", "rdb_last_bgsave_status:err").await;
    // The refresh of the waiter comes before any renewal.
    server.until_info("errorstats", "errorstat_MISCONF").await;
    let error = until_failed(&guard, 3).await;
    assert!(matches!(error, LockError::Unavailable { .. }), "{error:?}");
    assert!(format!("{error:#}").contains("stop-writes-on-bgsave-error"), "{error}");
    std::fs::remove_dir(server.path("data.rdb")).unwrap();
    let _: () = server.command("BGSAVE").await;
    server.until_info("persistence", "rdb_last_bgsave_status:ok").await;
    until_renewed(&guard).await;
    guard.release().await.unwrap();
    assert!(waiting.await.unwrap().unwrap().is_held());
}
