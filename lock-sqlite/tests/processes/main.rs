//! Several processes on one file: killed, stopped, cut short of disk space.
//!
//! The processes are this same binary, started with the name of a role.

#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a test may fail")]

#[path = "../file/mod.rs"]
mod file;
mod holders;
mod player;
mod readers;
mod shortages;
mod turns;

use std::path::PathBuf;
use std::process::ExitCode;

use holders::{hold, killed_holder, other_clock, stopped_holder, time_namespace};
use libtest_mimic::{Arguments, Failed, Trial};
use player::ROLE;
use readers::{come_and_go, come_once, ends, read_meanwhile};
use shortages::{
    few_descriptors, fill, fill_disk, full_disk, really_full, small_disk, stop_inside, stopped_inside,
    with_few_descriptors,
};
use turns::{increment, increments, killed, take_turns};

fn main() -> ExitCode {
    if let Ok(role) = std::env::var(ROLE) {
        let path = std::env::args_os().nth(1).expect("the path of the database");
        return match run(play(&role, path.into())) {
            Ok(()) => ExitCode::SUCCESS,
            Err(_) => ExitCode::FAILURE,
        };
    }
    let trial = |name: &str, test: fn() -> Result<(), Failed>| Trial::test(name, test);
    let mut trials = vec![
        trial(
            "twenty_processes_that_increment_under_the_lock_lose_no_update_five_times_in_a_row",
            || run(increments()),
        ),
        trial(
            "a_process_short_of_file_descriptors_may_try_again_and_frees_nothing",
            || run(few_descriptors()),
        ),
        trial("tokens_rise_across_processes_killed_at_any_moment", || run(killed())),
        trial("a_reader_sees_what_is_held_while_other_processes_come_and_go", || {
            run(read_meanwhile())
        }),
        trial("a_process_that_ends_leaves_no_log_behind", || run(ends())),
        trial("a_killed_holder_is_followed_within_its_ttl", || run(killed_holder())),
        trial("a_stopped_holder_is_followed_and_sees_the_loss_when_it_wakes", || {
            run(stopped_holder())
        }),
        trial(
            "a_process_stopped_inside_a_transaction_is_waited_for_and_recovered_from",
            || run(stopped_inside()),
        ),
        trial("locks_go_on_where_the_log_cannot_grow_and_a_full_disk_is_told", || {
            run(full_disk())
        }),
    ];
    trials.push(match small_disk() {
        Ok(()) => trial("a_lock_is_kept_and_let_go_on_a_disk_that_is_really_full", || {
            run(really_full())
        }),
        Err(why) => trial(&format!("a_disk_that_is_really_full ({why})"), || Ok(())).with_ignored_flag(true),
    });
    trials.push(match time_namespace() {
        Ok(()) => trial("a_process_with_a_boot_clock_of_its_own_agrees_on_expiry", || {
            run(other_clock())
        }),
        Err(why) => {
            trial(&format!("a_process_with_a_boot_clock_of_its_own ({why})"), || Ok(())).with_ignored_flag(true)
        }
    });
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

/// What a started process does.
async fn play(role: &str, path: PathBuf) {
    match role {
        "increment" => increment(&path).await,
        "take turns" => take_turns(&path).await,
        "come and go" => come_and_go(&path).await,
        "come once" => come_once(&path).await,
        "hold" => hold(&path).await,
        "stop inside" => stop_inside(&path),
        "fill" => fill(&path).await,
        "fill disk" => fill_disk(&path).await,
        "few descriptors" => with_few_descriptors(&path).await,
        other => panic!("no role {other}"),
    }
}

fn run(test: impl Future<Output = ()>) -> Result<(), Failed> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(test);
    Ok(())
}
