//! What is asked of the disk, and of a standby, before tokens are handed out; and what the sequence may be set to meanwhile.

use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use lock_core::{DistributedLock, LockError, Locks};

use crate::server::proxy::Proxy;
use crate::server::{self, HANG_LIMIT, Server, claim, granted};
use crate::tokens::count;

const TTL: Duration = Duration::from_secs(30);

/// Longer than it takes to draw thousands of tokens on a machine that is busy.
const LONG: Duration = Duration::from_secs(120);

/// Sessions that hold locks and wait for a standby. The right to put the counter right, whose key begins with this number, is none.
const STUCK: &str = "SELECT count(*) FROM pg_stat_activity a WHERE wait_event = 'SyncRep' AND EXISTS \
                     (SELECT FROM pg_locks l WHERE l.pid = a.pid AND l.locktype = 'advisory' AND l.classid <> 1717923427)";

/// The clock is half a minute ahead of the tokens then.
pub(super) const BEHIND: &str = "UPDATE fencelock.counter SET start = start - 30000000, ceiling = ceiling - 30000000;
    SELECT setval('fencelock.token', (SELECT last_value FROM fencelock.token) - 30000000)";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_session_that_holds_locks_waits_for_a_standby_that_is_away() {
    holds_locks_while_a_standby_is_away("").await;
}

/// The sequence of version 14, and of a schema that came from there: every 33rd token is logged, and so has to be confirmed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_session_that_holds_locks_waits_for_a_standby_that_is_away_with_a_logged_sequence() {
    holds_locks_while_a_standby_is_away("ALTER SEQUENCE fencelock.token SET LOGGED").await;
}

async fn holds_locks_while_a_standby_is_away(prepare: &str) {
    let server = Server::start();
    drop(server.client().await);
    server.run_sql(prepare).await;
    let lock = server
        .config()
        .op_timeout(Duration::from_secs(8))
        .connect()
        .await
        .unwrap();
    let other = server.client().await;
    let kept = granted(&lock, &claim("kept", LONG)).await;
    server
        .run_sql("SELECT setval('fencelock.token', (SELECT ceiling FROM fencelock.counter) - 32000)")
        .await;
    server.loses_its_standby().await;
    // All tokens up to the ceiling can be drawn, and none above it.
    let (mut drawn, start) = (0, Instant::now());
    let error = loop {
        let next = claim("next", LONG).with_tokens_wanted(NonZeroU32::MAX);
        match lock.try_acquire(&next).await {
            Ok(attempt) => drawn += count(&attempt.granted().unwrap()),
            Err(error) => break error,
        }
        lock.release(&next, None).await.unwrap();
        assert!(start.elapsed() < 2 * HANG_LIMIT && drawn <= 32_000, "{drawn} tokens");
    };
    assert!(matches!(error, LockError::Unavailable { .. }), "{error}");
    assert!(format!("{error:#}").contains("standby"), "{error}");
    let stuck: i64 = server.value(STUCK).await;
    assert_eq!(stuck, 0, "sessions that hold locks wait for the standby");
    assert!(drawn >= 30_000, "{drawn}");
    // What is held can be kept, and what is let go of goes to who waits.
    lock.renew(&kept.lease).await.unwrap();
    assert!(kept.lease.is_valid(lock_core::Clock::system().now()));
    assert!(server::is_busy(&other, &claim("kept", LONG)).await);
    lock.close().await.unwrap();
    server.until_locks(0).await;
    server.forgets_its_standby().await;
    let again = granted(&other, &claim("kept", LONG)).await;
    assert!(again.token > kept.token);
    println!("{drawn} tokens without a standby");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_starts_while_a_standby_is_away() {
    let server = Server::start();
    let first = granted(&server.client().await, &claim("a", TTL)).await;
    // The clock is half a minute ahead of the tokens, as after half a minute without any start.
    server.run_sql(BEHIND).await;
    server.loses_its_standby().await;
    let mut highest = 0;
    for _ in 0..3 {
        let start = Instant::now();
        let lock = server.client().await;
        let grant = granted(&lock, &claim("b", TTL)).await;
        println!("started within {:?}", start.elapsed());
        assert!(grant.token.get() > highest);
        highest = grant.token.get();
        lock.close().await.unwrap();
        // The session that waits for the standby has the turn to put the counter right, and no lock.
        server.until_locks(1).await;
    }
    server.forgets_its_standby().await;
    let locks = Locks::new(server.client().await);
    let guard = locks.lock("a").wait_for(HANG_LIMIT).await.unwrap();
    assert!(guard.token() > first.token, "up to the clock again");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_that_could_not_put_the_counter_right_does_not_keep_others_from_it() {
    let server = Server::start();
    drop(server.client().await);
    server.until_locks(0).await;
    server.run_sql(BEHIND).await;
    let mut plain = server.plain().await;
    let tx = plain.transaction().await.unwrap();
    tx.batch_execute("SELECT FROM fencelock.counter FOR UPDATE")
        .await
        .unwrap();
    let config = server.config().op_timeout(Duration::from_secs(4));
    let lock = config.connect().await.unwrap();
    // One in the pool would keep its turn for longer.
    server.until_locks(0).await;
    let held = granted(&lock, &claim("a", TTL)).await;
    tx.rollback().await.unwrap();
    let next = granted(&server.client().await, &claim("b", TTL)).await;
    assert!(
        next.token.get() > held.token.get() + 20_000_000,
        "up to the clock again"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_stops_while_it_puts_the_counter_right_does_not_keep_others_from_it() {
    let server = Server::start();
    server
        .run_sql(&lock_postgres::schema_sql("fencelock", None).unwrap())
        .await;
    let proxy = Proxy::to(server.port()).await;
    let config = server.config_at(proxy.port());
    let mut plain = server.plain().await;
    let tx = plain.transaction().await.unwrap();
    tx.batch_execute("SELECT FROM fencelock.counter FOR UPDATE")
        .await
        .unwrap();
    let stopped = tokio::spawn(config.op_timeout(Duration::from_secs(12)).connect());
    // It has the turn, and waits.
    server.until_locks(1).await;
    // Its next message never comes.
    proxy.hold_requests_after(0);
    proxy.hold_answers();
    tx.rollback().await.unwrap();
    server.until_locks(0).await;
    granted(&server.client().await, &claim("a", TTL)).await;
    stopped.abort();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_counter_that_somebody_keeps_locked_is_told_as_that() {
    let server = Server::start();
    server
        .run_sql(&lock_postgres::schema_sql("fencelock", None).unwrap())
        .await;
    let mut plain = server.plain().await;
    let tx = plain.transaction().await.unwrap();
    tx.batch_execute("SELECT FROM fencelock.counter FOR UPDATE")
        .await
        .unwrap();
    // The server gives up waiting four seconds before the client does.
    let config = server.config().op_timeout(Duration::from_secs(16));
    let error = config.connect().await.unwrap_err();
    assert!(matches!(error, LockError::Unavailable { .. }), "{error:?}");
    assert!(format!("{error:#}").contains("locked"), "{error}");
}
