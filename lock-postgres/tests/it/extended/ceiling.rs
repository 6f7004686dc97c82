//! What is waited for before tokens are handed out.

use std::num::NonZeroU32;
use std::time::Duration;

use lock_core::{DistributedLock, LockError};

use crate::server::proxy::Proxy;
use crate::server::{Server, claim, granted};

const TTL: Duration = Duration::from_secs(120);

/// Sessions that wait for a standby.
const STUCK: &str =
    "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND application_name LIKE 'fencelock %'";

/// The clock is half a minute ahead of the tokens then.
pub(super) const BEHIND: &str = "UPDATE fencelock.counter SET start = start - 30000000, ceiling = ceiling - 30000000;
    SELECT setval('fencelock.token', (SELECT last_value FROM fencelock.token) - 30000000)";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_session_waits_for_a_standby_that_is_away() {
    // The second sequence is that of version 14: every 33rd token is logged.
    for sequence in ["UNLOGGED", "LOGGED"] {
        let server = Server::start();
        drop(server.client().await);
        let prepare = format!(
            "ALTER SEQUENCE fencelock.token SET {sequence}; \
             SELECT setval('fencelock.token', (SELECT ceiling FROM fencelock.counter) - 1000)"
        );
        server.run_sql(&prepare).await;
        let lock = server.client().await;
        let kept = granted(&lock, &claim("kept", TTL)).await;
        server.loses_its_standby().await;
        // Beyond the ceiling.
        for _ in 0..200 {
            let next = claim("next", TTL).with_tokens_wanted(NonZeroU32::MAX);
            granted(&lock, &next).await;
            lock.release(&next, None).await.unwrap();
        }
        lock.renew(&kept.lease).await.unwrap();
        // Nor does a client wait that puts the counter right.
        server
            .run_sql(&format!("SET synchronous_commit = local; {BEHIND}"))
            .await;
        let other = granted(&server.client().await, &claim("other", TTL)).await;
        assert!(other.token > kept.token);
        assert_eq!(server.value::<i64>(STUCK).await, 0, "{sequence}");
        lock.close().await.unwrap();
        server.forgets_its_standby().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_counter_that_somebody_keeps_locked_is_told_as_that_and_keeps_nobody_later() {
    let server = Server::start();
    let schema = lock_postgres::schema_sql("fencelock", None).unwrap();
    server.run_sql(&schema).await;
    let mut plain = server.plain().await;
    let tx = plain.transaction().await.unwrap();
    let lock_it = "SELECT FROM fencelock.counter FOR UPDATE";
    tx.batch_execute(lock_it).await.unwrap();
    let error = server.config().connect().await.unwrap_err();
    assert!(matches!(error, LockError::Unavailable { .. }), "{error:?}");
    assert!(format!("{error:#}").contains("locked"), "{error}");
    // A client that stops in its turn, and whose next message never comes.
    let proxy = Proxy::to(server.port()).await;
    server.until_locks(0).await;
    let config = server.config_at(proxy.port()).op_timeout(Duration::from_secs(12));
    let stopped = tokio::spawn(config.connect());
    server.until_locks(1).await;
    proxy.hold_requests_after(0);
    proxy.hold_answers();
    tx.rollback().await.unwrap();
    server.until_locks(0).await;
    granted(&server.client().await, &claim("a", TTL)).await;
    stopped.abort();
}
