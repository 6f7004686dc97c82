//! What 10 000 held locks cost: bytes and threads, and the renewals of a lease that they share.
//!
//! Counts, no timings, so that it can be asserted anywhere: it fails if a guard costs more than the ceiling.

use std::alloc::System;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use fencelock::{LockError, LockGuard, Locks, MemoryLock};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const GUARDS: usize = 10_000;
const CEILING: usize = 1000;

/// Longest time for what must happen.
const HANG_LIMIT: Duration = Duration::from_secs(60);

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let outcome = async {
        let memory_ok = memory_and_threads().await?;
        let renewals_ok = renewals_of_a_shared_lease().await?;
        Ok::<_, LockError>(memory_ok && renewals_ok)
    };
    match outcome.await {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("the locks could not be taken: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Counts all that is allocated while the locks are taken, the entries of the store that stands for a server included.
async fn memory_and_threads() -> Result<bool, LockError> {
    let locks = Locks::new(MemoryLock::new());
    locks.lock("warms up").await?.release().await?;
    let mut guards = Vec::with_capacity(GUARDS);
    let region = Region::new(ALLOCATOR);
    hold(&locks, &mut guards).await?;
    let change = region.change();
    let bytes = change.bytes_allocated.saturating_sub(change.bytes_deallocated) / GUARDS + size_of::<LockGuard>();
    println!("{GUARDS} guards on memory: {bytes} bytes each, at most {CEILING} expected");
    let threads = background_threads();
    match threads {
        Some(n) => println!("{GUARDS} guards on memory: {n} background thread, 1 expected"),
        None => println!("threads cannot be counted on this system"),
    }
    locks.shutdown().await?;
    Ok(bytes <= CEILING && threads.is_none_or(|n| n == 1))
}

async fn renewals_of_a_shared_lease() -> Result<bool, LockError> {
    const TTL: Duration = Duration::from_secs(6);
    const RENEWALS: u64 = 3;
    let locks = Locks::with_options(MemoryLock::new().sharing_leases(), fencelock::Options::new().ttl(TTL));
    let mut guards = Vec::with_capacity(GUARDS);
    hold(&locks, &mut guards).await?;
    let (before, start) = (locks.stats().renewed, Instant::now());
    while locks.stats().renewed - before < RENEWALS && start.elapsed() < HANG_LIMIT {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let renewed = locks.stats().renewed - before;
    let most = start.elapsed().div_duration_f64(TTL / 3).ceil() as u64 + 1;
    let held = guards.iter().filter(|guard| guard.is_held()).count();
    println!(
        "{GUARDS} guards on one lease: {renewed} renewals in {:.1?}, at most {most} expected; {held} still held",
        start.elapsed()
    );
    locks.shutdown().await?;
    Ok((RENEWALS..=most).contains(&renewed) && held == GUARDS)
}

async fn hold(locks: &Locks, guards: &mut Vec<LockGuard>) -> Result<(), LockError> {
    for n in 0..GUARDS {
        guards.push(locks.lock(format!("stock/{n:05}")).await?);
    }
    Ok(())
}

#[cfg(target_os = "linux")]
fn background_threads() -> Option<usize> {
    let tasks = std::fs::read_dir("/proc/self/task").ok()?;
    let others = tasks.flatten().filter(|task| {
        let own = std::process::id().to_string();
        task.file_name().to_str() != Some(own.as_str())
    });
    Some(others.count())
}

#[cfg(not(target_os = "linux"))]
fn background_threads() -> Option<usize> {
    None
}
