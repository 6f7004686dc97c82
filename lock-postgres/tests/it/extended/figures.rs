//! What locking costs: log, connections, heartbeats.

use std::time::{Duration, Instant};

use lock_core::{DistributedLock, Locks, Options, Released};

use crate::server::{Server, claim, granted};

const TTL: Duration = Duration::from_secs(30);

/// What the server has written to its log.
#[derive(Clone, Copy, Debug)]
struct Log {
    records: i64,
    bytes: i64,
    position: i64,
}

impl Log {
    async fn of(server: &Server) -> Self {
        let sql = "SELECT wal_records, wal_bytes::bigint, pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint \
                   FROM pg_stat_wal";
        let row = server.plain().await.query_one(sql, &[]).await.unwrap();
        Self {
            records: row.get(0),
            bytes: row.get(1),
            position: row.get(2),
        }
    }

    fn since(self, earlier: Self) -> Self {
        Self {
            records: self.records - earlier.records,
            bytes: self.bytes - earlier.bytes,
            position: self.position - earlier.position,
        }
    }
}

/// What the server writes while that many locks are taken and released, and how long that takes.
async fn log_of_locking(server: &Server, pairs: i64) -> (Log, Duration) {
    let lock = server.client().await;
    let first = claim("a", TTL);
    granted(&lock, &first).await;
    lock.release(&first, None).await.unwrap();
    let before = Log::of(server).await;
    let start = Instant::now();
    for _ in 0..pairs {
        let claim = claim("a", TTL);
        granted(&lock, &claim).await;
        assert_eq!(lock.release(&claim, None).await.unwrap(), Released::Released);
    }
    let length = start.elapsed();
    // A session tells what it has written when it likes to, but at the latest when it ends.
    lock.close().await.unwrap();
    server.until_no_sessions().await;
    (Log::of(server).await.since(before), length)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locking_and_releasing_write_no_log() {
    const PAIRS: i64 = 2000;
    let server = Server::with(&["autovacuum=off", "checkpoint_timeout=1h"]);
    // Makes the schema, and shows how long it takes.
    let (_, length) = log_of_locking(&server, PAIRS).await;
    let before = Log::of(&server).await;
    tokio::time::sleep(length).await;
    let idle = Log::of(&server).await.since(before);
    let (busy, length) = log_of_locking(&server, PAIRS).await;
    println!("{PAIRS} locks in {length:.1?}: {busy:?}; as long a time without any: {idle:?}");
    // The writer tells of running transactions every 15 s, whoever is there.
    assert!(busy.position <= idle.position + 256, "{busy:?}, and {idle:?} when idle");
    // The opening of the session is counted, too; far fewer than one for each pair.
    assert!(
        busy.records <= idle.records + PAIRS / 100,
        "{busy:?}, and {idle:?} when idle"
    );
    assert!(busy.bytes <= idle.bytes + PAIRS, "{busy:?}, and {idle:?} when idle");
    // Nor would more go unnoticed: this sequence writes a record for every 32nd token.
    server.run_sql("ALTER SEQUENCE fencelock.token SET LOGGED").await;
    let (logged, _) = log_of_locking(&server, PAIRS).await;
    println!("with a sequence that has a log: {logged:?}");
    assert!(logged.records > idle.records + PAIRS / 100, "{logged:?}");
    assert!(logged.bytes > idle.bytes + PAIRS, "{logged:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_idle_locks_are_one_connection_and_one_heartbeat_per_third_of_a_ttl() {
    const TTL: Duration = Duration::from_secs(6);
    let server = Server::start();
    let locks = Locks::with_options(server.client().await, Options::new().ttl(TTL));
    let mut guards = Vec::new();
    for i in 0..1000 {
        guards.push(locks.lock(format!("n {i}")).await.unwrap());
    }
    assert_eq!(server.sessions().await.len(), 1);
    let before = locks.stats().renewed;
    tokio::time::sleep(2 * TTL).await;
    let beats = locks.stats().renewed - before;
    assert!((4..=7).contains(&beats), "{beats} heartbeats in two ttls");
    assert!(guards.iter().all(lock_core::LockGuard::is_held));
    assert_eq!(server.sessions().await.len(), 1);
    assert_eq!(server.locks().await, 1000);
    println!("1000 locks: one session, {beats} heartbeats in two ttls");
    drop(guards);
    server.until_locks(0).await;
}
