//! The suite on the etcd backend, with one member, where the planted bugs are shown too.

#[path = "etcd_harness/mod.rs"]
mod etcd_harness;

use std::process::ExitCode;

use etcd_harness::EtcdHarness;

fn main() -> ExitCode {
    conformance_tests::run(EtcdHarness::new(1))
}
