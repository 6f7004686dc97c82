//! The suite on a Redis 8 with replicas that clients find by sentinels. What a failover does is shown by the tests of `lock-redis`.

#[path = "redis_harness/mod.rs"]
mod redis_harness;

use std::process::ExitCode;

use conformance_tests::servers::Kind;
use redis_harness::RedisHarness;

fn main() -> ExitCode {
    conformance_tests::run_without_bugs(RedisHarness::new(&Kind::REDIS, 3))
}
