//! The suite on the Postgres backend, with PostgreSQL 15.

#[path = "postgres_harness/mod.rs"]
mod postgres_harness;

use std::process::ExitCode;

use conformance_tests::servers::Kind;
use postgres_harness::PostgresHarness;

fn main() -> ExitCode {
    conformance_tests::run_without_bugs(PostgresHarness::new(&Kind::POSTGRES_15, false))
}
