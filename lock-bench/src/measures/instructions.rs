//! What the client itself costs, in instructions of the processor: much the same in each run, so that a change shows.
//!
//! The backend in memory stands for a server that answers at once, one thread does everything, and the clock is not read.

use std::process::Command;

use fencelock::{Clock, Locks, MemoryLock, Options};
use tokio::runtime::Handle;

use crate::contestant::{OURS_HERE, Result};
use crate::report::Report;

/// Between these two numbers of times the start and the end of the program cancel out.
const TIMES: [u64; 2] = [2_000, 12_000];

pub(super) fn measure(report: &mut Report) -> Result {
    if Command::new("valgrind").arg("--version").output().is_err() {
        report.note("Without valgrind no instructions were counted (Debian: apt-get install valgrind).".to_owned());
        return Ok(());
    }
    let [few, many] = TIMES;
    let each = (under_callgrind(many)? - under_callgrind(few)?) / (many - few);
    report.add("lock + release", "instructions", None, OURS_HERE, each as f64);
    Ok(())
}

fn under_callgrind(times: u64) -> Result<u64> {
    let folder = tempfile::tempdir()?;
    let counts = folder.path().join("counts");
    let output = Command::new("valgrind")
        .args([
            "--tool=callgrind",
            &format!("--callgrind-out-file={}", counts.display()),
        ])
        .arg(std::env::current_exe()?)
        .args(["repeat", &times.to_string()])
        .output()?;
    let counts = std::fs::read_to_string(counts).unwrap_or_default();
    let total = counts.lines().find_map(|line| line.strip_prefix("totals:"));
    let total = total.filter(|_| output.status.success());
    let total = total.ok_or_else(|| format!("valgrind failed: {}", String::from_utf8_lossy(&output.stderr)))?;
    Ok(total.trim().parse()?)
}

/// Takes and releases a lock that many times, in a process of its own.
pub(crate) async fn repeat(times: u64) -> Result {
    // The system's clock is read in ways that valgrind does not know. This one stands still.
    let (clock, _stands) = Clock::manual();
    let options = Options::new().runtime(Handle::current());
    let locks = Locks::with_options(MemoryLock::with_clock(clock), options);
    for _ in 0..times {
        locks.lock("pair").await?.release().await?;
    }
    Ok(())
}
