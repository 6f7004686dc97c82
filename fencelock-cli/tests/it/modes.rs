//! Who else may hold the lock, for how long it is held, and runs inside of runs.

use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::world::{Backend, PATIENTLY, World, wait_until};

/// Whether the locks of this backend can be held in that way. If not, the command says so, with the code for what a retry does not help.
#[track_caller]
fn is_supported(world: &World, options: &[&str]) -> bool {
    let done = world.run([&["run"], options, &["lock", "--", "true"]].concat());
    if done.code == Some(0) {
        return true;
    }
    let line = done.one_line(78);
    assert!(line.contains("does not support locks "), "{line}");
    false
}

pub(crate) fn readers_share_a_lock_and_exclude_a_writer(backend: Backend) {
    let world = World::on(backend);
    if !is_supported(&world, &["--shared"]) {
        return;
    }
    let reader = world.start(&["-s"], "exec sleep 600");
    assert_eq!(world.run(["run", "-n", "-s", "lock", "--", "true"]).code, Some(0));
    let busy = world.run(["run", "-n", "lock", "--", "true"]);
    assert!(busy.one_line(75).contains("lock is busy, shared by "), "{busy:?}");
    assert_eq!(world.holder()["mode"], "shared");
    reader.stop();
    let writer = world.start(&[], "exec sleep 600");
    assert_eq!(world.run(["run", "-n", "-s", "lock", "--", "true"]).code, Some(75));
    writer.stop();
}

pub(crate) fn a_number_of_holders_are_let_in_at_once(backend: Backend) {
    let world = World::on(backend);
    if !is_supported(&world, &["--max-holders", "2"]) {
        return;
    }
    let first = world.start(&["--max-holders", "2"], "exec sleep 600");
    let second = [
        "run",
        "-n",
        "--max-holders",
        "2",
        "lock",
        "-c",
        "echo ${FENCELOCK_TOKEN-none}",
    ];
    assert_eq!(world.run(second).stdout, "none\n");
    let other = world.start(&["--max-holders", "2"], "exec sleep 600");
    assert_eq!(world.run(second).code, Some(75));
    other.stop();
    first.stop();
}

#[test]
fn modes_on_sqlite() {
    readers_share_a_lock_and_exclude_a_writer(Backend::Sqlite);
    a_number_of_holders_are_let_in_at_once(Backend::Sqlite);
}

#[test]
fn the_longest_hold_ends_the_command() {
    let world = World::new();
    let running = world.start(&["--max-hold", "3s"], "exec sleep 600");
    let command = running.command;
    let done = running.end();
    let line = done.one_line(76);
    assert!(
        line.contains("was held for as long as --max-hold permits; the command was ended"),
        "{line}"
    );
    assert!(!command.is_alive());
    let done = world.run(["run", "--max-hold", "0s", "lock", "--", "true"]);
    assert!(done.one_line(64).contains("--max-hold"), "{done:?}");
}

#[test]
fn the_shortest_hold_keeps_the_lock_taken_after_the_command_and_after_a_kill() {
    for (option, kill) in [("--min-hold", false), ("--at-least", false), ("--min-hold", true)] {
        let world = World::new();
        let since = Instant::now();
        let running = world.start(
            &["-n", option, "3s", "--ttl", "1s", "--label", "nightly"],
            "exec sleep 600",
        );
        running
            .fencelock()
            .signal(if kill { Signal::KILL } else { Signal::TERM });
        running.end();
        let busy = world.run(["run", "-n", "lock", "--", "true"]);
        assert!(
            kill || busy.one_line(75).contains("lock is busy, reserved by "),
            "{busy:?}"
        );
        assert_eq!(busy.code, Some(75));
        let done = world.run([&["run"], &PATIENTLY[..], &["lock", "--", "true"]].concat());
        assert_eq!(done.code, Some(0), "{done:?}");
        assert!(since.elapsed() >= Duration::from_secs(3));
    }
    let world = World::new();
    assert_eq!(
        world.run(["run", "--min-hold", "1h", "lock", "--", "false"]).code,
        Some(1)
    );
    assert!(world.run(["list"]).stdout.contains("  reserved  "));
    assert_eq!(world.run(["release", "--force", "lock"]).code, Some(0));
    assert_eq!(world.run(["run", "-n", "lock", "--", "true"]).code, Some(0));
}

#[test]
fn a_run_inside_of_one_with_the_same_lock_says_so_at_once() {
    let world = World::new();
    let inner = format!("exec {} run lock -- true", crate::world::binary());
    let between = format!("exec {} run other -- sh -c '{inner}'", crate::world::binary());
    for script in [&inner, &between] {
        let done = world.run(["run", "lock", "--", "sh", "-c", script]);
        assert!(done.one_line(75).contains("locks are not re-entrant"), "{done:?}");
    }
    // In another place the name is another lock.
    let elsewhere = format!("FENCELOCK_URL=sqlite:other.db {inner}");
    let done = world.run(["run", "lock", "--", "sh", "-c", &elsewhere]);
    assert_eq!((done.code, done.stderr.as_str()), (Some(0), ""));
    // A lock that another holds is waited for.
    let holder = world.start(&[], "exec sleep 600");
    let mut waiting = world.fencelock();
    let mut waiting = waiting
        .args(["run", "other", "--", "sh", "-c", &inner])
        .spawn()
        .unwrap();
    wait_until("the outer lock", || world.run(["holder", "other"]).code == Some(0));
    holder.stop();
    assert_eq!(waiting.wait().unwrap().code(), Some(0));
}
