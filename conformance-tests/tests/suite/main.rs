//! The suite on every backend of this workspace, side by side in one program.
//!
//! ```sh
//! cargo test -p conformance-tests --all-features --test suite                      # the rows of `make test`
//! cargo test -p conformance-tests --all-features --test suite -- redis::tokens     # one group on one backend
//! FENCELOCK_TEST_ROWS="redlock valkey" cargo test -p conformance-tests --all-features --test suite
//! FENCELOCK_TEST_ROWS=help cargo test -p conformance-tests --all-features --test suite
//! ```

mod etcd;
mod hosts;
mod memory;
mod postgres;
mod redis;
mod sqlite;

use std::process::ExitCode;

use conformance_tests::Suite;
use etcd::EtcdHarness;
use memory::MemoryHarness;
use postgres::PostgresHarness;
use redis::{RedisHarness, Topology};
use sqlite::SqliteHarness;
use test_servers::Kind;

/// What `make test` runs.
const ROWS: &str = "memory memory-shared sqlite redis postgres etcd";

/// The planted bug that takes a connection.
const BUG_OF_CONNECTIONS: &str = "the deadline counts from a reply that comes late";

/// The planted bug that takes a lease of several locks.
const BUG_OF_SHARED_LEASES: &str = "on a shared lease the deadline counts from the acquire";

fn main() -> ExitCode {
    let rows = std::env::var("FENCELOCK_TEST_ROWS").unwrap_or_default();
    let rows = if rows.trim().is_empty() { ROWS } else { &rows };
    let redlock = || RedisHarness::new(&Kind::REDIS, Topology::Redlock(5));
    Suite::new()
        .row("memory", MemoryHarness::separate_leases())
        .backend_row("memory-shared", MemoryHarness::shared_leases(), &[BUG_OF_SHARED_LEASES])
        .backend_row("sqlite", SqliteHarness, &[])
        .backend_row(
            "redis",
            RedisHarness::new(&Kind::REDIS, Topology::Alone),
            &[BUG_OF_CONNECTIONS],
        )
        .backend_row("redis-7.0", RedisHarness::new(&Kind::REDIS_7_0, Topology::Alone), &[])
        .backend_row("valkey", RedisHarness::new(&Kind::VALKEY, Topology::Alone), &[])
        .backend_row("sentinel", RedisHarness::new(&Kind::REDIS, Topology::Watched), &[])
        .backend_row("cluster", RedisHarness::new(&Kind::REDIS, Topology::Cluster), &[])
        .backend_row("redlock", redlock(), &[])
        .backend_row("redlock-failing", redlock().disturbed(), &[])
        .backend_row("postgres", PostgresHarness::new(&Kind::POSTGRES, false), &[])
        .backend_row("postgres-15", PostgresHarness::new(&Kind::POSTGRES_15, false), &[])
        .backend_row("pgbouncer", PostgresHarness::new(&Kind::POSTGRES, true), &[])
        .backend_row("etcd", EtcdHarness::new(1), &[])
        .backend_row("etcd-cluster", EtcdHarness::new(3), &[])
        .run(&rows.split_whitespace().collect::<Vec<_>>())
}
