//! The suite on the Postgres backend, with PostgreSQL 17 behind a PgBouncer that gives each client a session.

#[path = "postgres_harness/mod.rs"]
mod postgres_harness;

use std::process::ExitCode;

use conformance_tests::servers::Kind;
use postgres_harness::PostgresHarness;

fn main() -> ExitCode {
    conformance_tests::run_without_bugs(PostgresHarness::new(&Kind::POSTGRES, true))
}
