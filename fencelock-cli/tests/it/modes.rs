//! Who else may hold the lock, for how long it is held, and runs inside of runs.

use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::world::{Backend, PATIENTLY, World, binary, wait_until};

/// Whether the locks of this backend can be held in that way. If not, the command says so, with the code for what a retry does not help.
#[track_caller]
fn is_supported(world: &World, options: &str) -> bool {
    let done = world.run_script(options, "");
    let is_supported = done.code == Some(0);
    if !is_supported {
        done.fails(78, "does not support locks ");
    }
    is_supported
}

pub(crate) fn several_hold_a_lock_as_far_as_their_modes_go_together(backend: Backend) {
    let world = World::on(backend);
    if is_supported(&world, "--shared") {
        let reader = world.sleeper("-s");
        world.run("run -n -s lock -- true").is(0, "", "");
        world.run("run -n lock -- true").fails(75, "lock is busy, shared by ");
        assert_eq!(world.holder()["mode"], "shared");
        world.run("list").shows(0, &["  shared  "]);
        reader.stop();
        let writer = world.sleeper("");
        world.run("run -n -s lock -- true").ends_with(75);
        writer.stop();
    }
    let world = World::on(backend);
    if is_supported(&world, "--max-holders 2") {
        let first = world.sleeper("--max-holders 2");
        let second = || world.run_script("-n --max-holders 2", "echo ${FENCELOCK_TOKEN-none}");
        second().is(0, "none\n", "");
        assert_eq!(world.holder()["max_holders"], 2);
        let other = world.sleeper("--max-holders 2");
        second().fails(75, "held by up to 2, one of them ");
        world.run("list").shows(0, &["  1 of 2  "]);
        other.stop();
        first.stop();
    }
}

#[test]
fn modes_on_sqlite() {
    several_hold_a_lock_as_far_as_their_modes_go_together(Backend::Sqlite);
}

#[test]
fn the_longest_hold_ends_the_command() {
    let world = World::new();
    let running = world.sleeper("--max-hold 3s");
    let command = running.command;
    let says = "was held for as long as --max-hold permits; the command was ended";
    running.end().fails(76, says);
    assert!(!command.is_alive());
    world.run("run --max-hold 0s lock -- true").fails(64, "--max-hold");
}

#[test]
fn the_shortest_hold_keeps_the_lock_taken_after_the_command_and_after_a_kill() {
    for (option, signal, by) in [
        ("--min-hold", Signal::TERM, ", reserved by "),
        ("--at-least", Signal::TERM, ", reserved by "),
        ("--min-hold", Signal::KILL, ""),
    ] {
        let world = World::new();
        let since = Instant::now();
        let running = world.sleeper(&format!("-n {option} 3s --ttl 1s"));
        running.fencelock().signal(signal);
        running.end();
        let busy = world.run("run -n lock -- true");
        if since.elapsed() < Duration::from_secs(3) {
            busy.fails(75, &format!("lock is busy{by}"));
        }
        world.run(&format!("run {PATIENTLY} lock -- true")).ends_with(0);
        assert!(since.elapsed() >= Duration::from_secs(3));
    }
    let world = World::new();
    world.run("run --min-hold 1h lock -- false").is(1, "", "");
    world.run("list").shows(0, &["  reserved  "]);
    world.take_away();
    world.run("run -n lock -- true").is(0, "", "");
}

#[test]
fn a_run_inside_of_one_with_the_same_lock_says_so_at_once() {
    let world = World::new();
    let inner = format!("exec {} run lock -- true", binary());
    let between = format!("exec {} run other -- sh -c '{inner}'", binary());
    for script in [&inner, &between] {
        world.run_script("", script).fails(75, "locks are not re-entrant");
    }
    // In another place the name is another lock.
    let elsewhere = format!("FENCELOCK_URL=sqlite:other.db {inner}");
    world.run_script("", &elsewhere).is(0, "", "");
    // A lock that another holds is waited for.
    let holder = world.sleeper("");
    let mut waiting = world.fencelock();
    let mut waiting = waiting.args(["run", "other", "-c", &inner]).spawn().unwrap();
    wait_until("the outer lock", || world.run("holder other").code == Some(0));
    holder.stop();
    assert_eq!(waiting.wait().unwrap().code(), Some(0));
}
