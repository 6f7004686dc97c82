//! The suite on every backend of this workspace, side by side in one program.
//!
//! ```sh
//! cargo test -p conformance-tests --all-features --test suite                      # the rows of `make test`
//! cargo test -p conformance-tests --all-features --test suite -- redis::tokens     # one group on one backend
//! FENCELOCK_TEST_ROWS="redlock valkey" cargo test -p conformance-tests --all-features --test suite
//! FENCELOCK_TEST_ROWS=help cargo test -p conformance-tests --all-features --test suite
//! ```

mod etcd;
mod memory;
mod postgres;
mod redis;
mod redis_cluster;
mod redlock;
mod sqlite;

use std::process::ExitCode;

use conformance_tests::Suite;
use conformance_tests::servers::Kind;
use etcd::EtcdHarness;
use memory::MemoryHarness;
use postgres::PostgresHarness;
use redis::RedisHarness;
use redis_cluster::ClusterHarness;
use redlock::RedlockHarness;
use sqlite::SqliteHarness;

/// What `make test` runs.
const ROWS: &str = "memory memory-shared sqlite redis postgres etcd";

/// The planted bugs that a backend in memory cannot have: those of connections, and those that take a fault of the server.
const BUGS_OF_SERVERS: [&str; 5] = [
    "a connected client draws from a counter that was set back",
    "a refusal that only a person can mend is told as one that may pass",
    "calls into silence have no limit",
    "the deadline counts from a reply that comes late",
    "tokens start again with an empty store",
];

/// The one that takes a lease of several locks, and those of shared locks and semaphores, whose holders may have one lease.
const BUGS_OF_SHARED_LEASES: [&str; 11] = [
    "on a shared lease the deadline counts from the acquire",
    "a downgrade releases first",
    "a name of another kind is busy instead of refused",
    "a writer is granted beside readers",
    "list shows one holder of a name",
    "one permit too many",
    "permits of expired holders stay taken",
    "readers exclude each other",
    "readers pass a waiting writer",
    "readers share a token",
    "the release of one reader ends all",
];

fn main() -> ExitCode {
    let rows = std::env::var("FENCELOCK_TEST_ROWS").unwrap_or_default();
    let rows = if rows.trim().is_empty() { ROWS } else { &rows };
    Suite::new()
        .row("memory", MemoryHarness::separate_leases())
        .backend_row("memory-shared", MemoryHarness::shared_leases(), &BUGS_OF_SHARED_LEASES)
        .backend_row("sqlite", SqliteHarness, &[])
        .backend_row("redis", RedisHarness::new(&Kind::REDIS, 0), &BUGS_OF_SERVERS)
        .backend_row("redis-7.0", RedisHarness::new(&Kind::REDIS_7_0, 0), &[])
        .backend_row("valkey", RedisHarness::new(&Kind::VALKEY, 0), &[])
        .backend_row("sentinel", RedisHarness::new(&Kind::REDIS, 3), &[])
        .backend_row("cluster", ClusterHarness::new(&Kind::REDIS), &[])
        .backend_row("redlock", RedlockHarness::new(&Kind::REDIS, 5), &[])
        .backend_row("redlock-failing", RedlockHarness::new(&Kind::REDIS, 5).disturbed(), &[])
        .backend_row("postgres", PostgresHarness::new(&Kind::POSTGRES, false), &[])
        .backend_row("postgres-15", PostgresHarness::new(&Kind::POSTGRES_15, false), &[])
        .backend_row("pgbouncer", PostgresHarness::new(&Kind::POSTGRES, true), &[])
        .backend_row("etcd", EtcdHarness::new(1), &[])
        .backend_row("etcd-cluster", EtcdHarness::new(3), &[])
        .run(&rows.split_whitespace().collect::<Vec<_>>())
}
