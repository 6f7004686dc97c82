//! Servers that change their role, or cannot write for a while, under waits and holds.

use std::time::Duration;

use lock_core::{DistributedLock, LockError, LockGuard, Locks};

use crate::server::{
    self, HANG_LIMIT, LONG, Server, claim, config_by, granted, name, pair, proxy, until, until_accepted, until_renewed,
};

/// Much longer than what is done within it, on a machine that is busy.
const TTL: Duration = Duration::from_secs(20);

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
async fn a_wait_outlasts_the_time_in_which_its_address_leads_to_a_replica() {
    let (server, other) = pair().await;
    let proxy = proxy(&server).await;
    let locks = Locks::new(config_by(&proxy).connect().await.unwrap());
    granted(&server.client().await, &claim("n", LONG)).await;
    let waiting = locks.lock("n").ttl(TTL).wait_for(HANG_LIMIT);
    let waiting = tokio::spawn(waiting.into_future());
    server::until_queued(&other, "n", 1).await;
    fail_over(&server, &other).await;
    // With the pauses between, 6 attempts take 2 to 3 s.
    proxy.cut();
    until_accepted(&proxy, 6).await;
    assert!(!waiting.is_finished());
    fail_over(&other, &server).await;
    let taken_from = server.client().await.force_release(&name("n")).await.unwrap();
    assert_eq!(taken_from.len(), 1);
    assert!(waiting.await.unwrap().unwrap().is_held());
}

#[tokio::test]
async fn a_hold_outlasts_a_failover_within_its_ttl() {
    let (server, other) = pair().await;
    let locks = Locks::new(server.client().await);
    let guard = locks.lock("n").ttl(TTL).await.unwrap();
    other.until_locked("n", true).await;
    fail_over(&server, &other).await;
    let error = until_failed(&guard, 3).await;
    assert!(matches!(error, LockError::Unavailable { .. }), "{error:?}");
    assert!(format!("{error:#}").contains("failover"), "{error}");
    fail_over(&other, &server).await;
    until_renewed(&guard).await;
    assert!(guard.is_held());
}

/// Makes the replica the primary, and the old primary its replica, which is up to date when this is done.
async fn fail_over(old: &Server, new: &Server) {
    new.replicate(None).await;
    old.replicate(Some(new.port())).await;
    new.until_info("replication", "state=online").await;
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
