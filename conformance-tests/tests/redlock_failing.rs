//! The suite on locks on five independent servers, two of which are stopped, killed or emptied all the time.

#[path = "redis_harness/mod.rs"]
#[allow(dead_code, reason = "parts of it are used")]
mod redis_harness;
#[path = "redlock_harness/mod.rs"]
mod redlock_harness;

use std::process::ExitCode;

use conformance_tests::servers::Kind;
use redlock_harness::RedlockHarness;

fn main() -> ExitCode {
    conformance_tests::run_without_bugs(RedlockHarness::disturbed(&Kind::REDIS, 5))
}
