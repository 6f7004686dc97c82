//! Visits every state of every model, and requires that each planted bug is found.
//!
//! Each line of the output has the number of states that differ, the length of the longest of the shortest ways to a state, and the time.

#[path = "exhaustive/etcd_queue.rs"]
mod etcd_queue;
#[path = "exhaustive/local_runs.rs"]
mod local_runs;
#[path = "exhaustive/postgres_epoch.rs"]
mod postgres_epoch;
#[path = "exhaustive/redlock.rs"]
mod redlock;
#[path = "exhaustive/report.rs"]
mod report;

use std::process::ExitCode;

use libtest_mimic::Arguments;

fn main() -> ExitCode {
    let trials = [
        redlock::trials(),
        local_runs::trials(),
        etcd_queue::trials(),
        postgres_epoch::trials(),
    ]
    .into_iter()
    .flatten();
    libtest_mimic::run(&Arguments::from_args(), trials.collect()).exit_code()
}
