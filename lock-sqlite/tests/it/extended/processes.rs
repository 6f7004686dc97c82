//! Many processes on one file: killed, cut short of disk space, with clocks of their own.

use std::io::Write as _;

use crate::processes::holders::{other_clock, time_namespace};
use crate::processes::shortages::{few_descriptors, full_disk, really_full, small_disk};
use crate::processes::turns::killed;

#[tokio::test]
async fn a_process_short_of_file_descriptors_may_try_again_and_frees_nothing() {
    few_descriptors().await;
}

#[tokio::test]
async fn tokens_rise_across_processes_killed_at_any_moment() {
    killed().await;
}

#[tokio::test]
async fn locks_go_on_where_the_log_cannot_grow_and_a_full_disk_is_told() {
    full_disk().await;
}

#[tokio::test]
async fn a_lock_is_kept_and_let_go_on_a_disk_that_is_really_full() {
    if is_possible(small_disk()) {
        really_full().await;
    }
}

#[tokio::test]
async fn a_process_with_a_boot_clock_of_its_own_agrees_on_expiry() {
    if is_possible(time_namespace()) {
        other_clock().await;
    }
}

/// Whether this machine allows it. If not, that is said past the capture of what tests print.
fn is_possible(possible: Result<(), &'static str>) -> bool {
    if let Err(why) = possible {
        let name = std::thread::current().name().unwrap_or_default().to_owned();
        let _ = writeln!(std::io::stderr(), "could not be judged here: {name} {why}");
    }
    possible.is_ok()
}
