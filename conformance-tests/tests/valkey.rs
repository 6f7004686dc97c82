//! The suite on the Redis backend, with Valkey 8.1.

#[path = "redis_harness/mod.rs"]
mod redis_harness;

use std::process::ExitCode;

use conformance_tests::servers::Kind;
use redis_harness::RedisHarness;

fn main() -> ExitCode {
    conformance_tests::run_without_bugs(RedisHarness::new(&Kind::VALKEY, 0))
}
