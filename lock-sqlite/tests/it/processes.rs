//! Several processes on one file.
//!
//! The processes are this same program, started with the name of a role.

pub(crate) mod holders;
pub(crate) mod player;
pub(crate) mod readers;
pub(crate) mod shortages;
pub(crate) mod turns;

use std::path::PathBuf;

use holders::hold;
use player::{PATH, ROLE};
use readers::{come_and_go, come_once, ends, read_meanwhile};
use shortages::{fill, fill_disk, stop_inside, stopped_inside, with_few_descriptors};
use turns::take_turns;

use crate::file::runtime;

#[tokio::test]
async fn a_reader_sees_what_is_held_while_other_processes_come_and_go() {
    read_meanwhile().await;
}

#[tokio::test]
async fn a_process_that_ends_leaves_no_log_behind() {
    ends().await;
}

#[tokio::test]
async fn a_process_stopped_inside_a_transaction_is_waited_for_and_recovered_from() {
    stopped_inside().await;
}

/// What a started process does. Without the name of a role it does nothing.
#[test]
#[ignore = "started by other tests, as a process of its own"]
fn a_process_plays_its_role() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let path = std::env::var_os(PATH).expect("the path of the database");
    runtime().block_on(play(&role, path.into()));
    // As at the end of `main`, and without what the test harness does after a test.
    std::process::exit(0);
}

async fn play(role: &str, path: PathBuf) {
    match role {
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
