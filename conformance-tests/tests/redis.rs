//! The suite on the Redis backend, with Redis 8, where the planted bugs are shown too.

#[path = "redis_harness/mod.rs"]
mod redis_harness;

use std::process::ExitCode;

use conformance_tests::servers::Kind;
use redis_harness::RedisHarness;

fn main() -> ExitCode {
    conformance_tests::run(RedisHarness::new(&Kind::REDIS, 0))
}
