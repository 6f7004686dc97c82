//! The suite on the etcd backend, with a cluster of three members: what befalls a server befalls the one that leads.

#[path = "etcd_harness/mod.rs"]
mod etcd_harness;

use std::process::ExitCode;

use etcd_harness::EtcdHarness;

fn main() -> ExitCode {
    conformance_tests::run_without_bugs(EtcdHarness::new(3))
}
