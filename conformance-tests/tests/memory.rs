//! The suite on the backend in memory.

#[path = "memory_harness/mod.rs"]
mod memory_harness;

use std::process::ExitCode;

use memory_harness::MemoryHarness;

fn main() -> ExitCode {
    conformance_tests::run(MemoryHarness::new("memory", |store| store.client()))
}
