//! The suite on the Postgres backend, with PostgreSQL 17, where the planted bugs are shown too.

#[path = "postgres_harness/mod.rs"]
mod postgres_harness;

use std::process::ExitCode;

use conformance_tests::servers::Kind;
use postgres_harness::PostgresHarness;

fn main() -> ExitCode {
    conformance_tests::run(PostgresHarness::new(&Kind::POSTGRES, false))
}
