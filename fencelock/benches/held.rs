//! What 10 000 held locks cost in memory and threads. Counts, no timings: it fails on every machine if a guard costs more than the ceiling.
//! What they cost in renewals is shown by `make bench`.

use std::alloc::System;
use std::process::ExitCode;

use fencelock::{LockError, LockGuard, Locks, MemoryLock};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const GUARDS: usize = 10_000;
const CEILING: usize = 1000;

/// Counts all that is allocated while the locks are taken, including the entries of the store that stands for a server.
#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<ExitCode, LockError> {
    let locks = Locks::new(MemoryLock::new());
    locks.lock("warms up").await?.release().await?;
    let mut guards = Vec::with_capacity(GUARDS);
    let region = Region::new(ALLOCATOR);
    for n in 0..GUARDS {
        guards.push(locks.lock(format!("stock/{n:05}")).await?);
    }
    let change = region.change();
    let bytes = change.bytes_allocated.saturating_sub(change.bytes_deallocated) / GUARDS + size_of::<LockGuard>();
    println!("{GUARDS} guards on memory: {bytes} bytes each, at most {CEILING} expected");
    // That of this function, and the one that renews. Where the system does not tell, none is too many.
    let threads = std::fs::read_dir("/proc/self/task").map_or(0, Iterator::count);
    println!("{GUARDS} guards on memory: {threads} threads, at most 2 expected");
    locks.shutdown().await?;
    match bytes <= CEILING && threads <= 2 {
        true => Ok(ExitCode::SUCCESS),
        false => Ok(ExitCode::FAILURE),
    }
}
