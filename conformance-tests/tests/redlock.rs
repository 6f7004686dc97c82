//! The suite on locks on five independent servers. With `FENCELOCK_REDLOCK_FAILING` set, two of them are stopped, killed or emptied all the
//! time.

#[path = "redis_harness/mod.rs"]
#[expect(dead_code, reason = "parts of it are used")]
mod redis_harness;
#[path = "redlock_harness/mod.rs"]
mod redlock_harness;

use std::process::ExitCode;

use conformance_tests::servers::Kind;
use redlock_harness::RedlockHarness;

fn main() -> ExitCode {
    let harness = RedlockHarness::new(&Kind::REDIS, 5);
    conformance_tests::run_without_bugs(match std::env::var_os("FENCELOCK_REDLOCK_FAILING") {
        Some(_) => harness.disturbed(),
        None => harness,
    })
}
