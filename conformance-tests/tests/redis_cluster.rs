//! The suite on locks in a Redis Cluster of three primaries: what befalls a server befalls all of them.

#[path = "redis_cluster_harness/mod.rs"]
mod redis_cluster_harness;
#[path = "redis_harness/mod.rs"]
#[expect(dead_code, reason = "parts of it are used")]
mod redis_harness;

use std::process::ExitCode;

use conformance_tests::servers::Kind;
use redis_cluster_harness::ClusterHarness;

fn main() -> ExitCode {
    conformance_tests::run_without_bugs(ClusterHarness::new(&Kind::REDIS))
}
