//! Several processes at one server: how little they ask of it, and what it costs when one of them is killed or stopped.
//!
//! The processes are this same binary, started with the name of a role.

#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a test may fail")]

mod player;
#[path = "../server/mod.rs"]
mod server;
mod silent;
mod turns;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Failed, Trial};
use player::ROLE;

fn main() -> ExitCode {
    if let Ok(role) = std::env::var(ROLE) {
        let port = std::env::args().nth(1).and_then(|port| port.parse().ok());
        return match run(play(&role, port.expect("the port of the server"))) {
            Ok(()) => ExitCode::SUCCESS,
            Err(_) => ExitCode::FAILURE,
        };
    }
    let trial = |name: &str, test: fn() -> Result<(), Failed>| Trial::test(name, test);
    let trials = vec![
        trial(
            "a_hundred_waiters_in_ten_processes_take_at_most_three_scripts_each_and_their_turns_in_order",
            || run(turns::contended()),
        ),
        trial("ten_processes_that_wait_send_nothing_between_refreshes", || {
            run(turns::quiet())
        }),
        trial("a_killed_waiter_is_passed_over_within_the_release", || {
            run(silent::killed_waiter())
        }),
        trial("a_stopped_waiter_delays_the_next_by_no_more_than_its_ttl", || {
            run(silent::stopped_waiter())
        }),
        trial(
            "a_waiter_that_has_been_stopped_for_long_is_passed_over_within_the_release",
            || run(silent::long_stopped_waiter()),
        ),
        trial("a_killed_holder_is_followed_when_its_lease_has_run_out", || {
            run(silent::killed_holder())
        }),
        trial("a_holder_killed_after_the_first_in_line_is_followed_as_soon", || {
            run(silent::killed_waiter_and_holder())
        }),
        trial("a_killed_test_leaves_no_server_behind", || run(silent::killed_test())),
    ];
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

/// What a started process does.
async fn play(role: &str, port: u16) {
    match role {
        "take turns" => turns::take_turns(port).await,
        "lock" => silent::lock(port).await,
        "keep a server" => silent::keep_a_server(),
        other => panic!("no role {other}"),
    }
}

fn run(test: impl Future<Output = ()>) -> Result<(), Failed> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(test);
    Ok(())
}
