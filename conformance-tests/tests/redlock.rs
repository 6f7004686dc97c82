//! The suite on locks on five independent servers.

#[path = "redis_harness/mod.rs"]
#[allow(dead_code, reason = "parts of it are used")]
mod redis_harness;
#[path = "redlock_harness/mod.rs"]
#[allow(dead_code, reason = "parts of it are used")]
mod redlock_harness;

use std::process::ExitCode;

use conformance_tests::servers::Kind;
use redlock_harness::RedlockHarness;

fn main() -> ExitCode {
    conformance_tests::run_without_bugs(RedlockHarness::new(&Kind::REDIS, 5))
}
