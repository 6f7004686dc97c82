//! The suite on the backend in memory, with one lease for many locks as servers with sessions have them.

#[path = "memory_harness/mod.rs"]
mod memory_harness;

use std::process::ExitCode;

use memory_harness::MemoryHarness;

fn main() -> ExitCode {
    conformance_tests::run(MemoryHarness::new("memory, shared leases", |store| {
        store.sharing_leases()
    }))
}
