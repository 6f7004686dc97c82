//! The lock ends while the command runs: whatever happens to whom, the command is gone before another has the lock.

use std::fs;
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::process::Signal;

use crate::world::{Backend, Done, PATIENTLY, Process, Running, SHORT_TTL, World, binary, wait_until};

/// A script that is deaf to SIGTERM, and sleeps when its number is in that file.
fn deaf(file: &str) -> String {
    format!("sh -c 'trap \"\" TERM; echo $$ > {file}.new; mv {file}.new {file}; exec sleep 600'")
}

/// A command with a child of its own, both deaf.
fn family(world: &World, options: &str) -> (Running, [Process; 2]) {
    let running = world.start(options, &format!("trap '' TERM; {} & exec sleep 600", deaf("child")));
    let all = [running.command, world.pid("child").becomes("sleep")];
    (running, all)
}

/// Waits for the lock; when it is granted, everyone is dead.
#[track_caller]
fn freed_after_all_are_dead(world: &World, all: &[Process]) {
    let look = |Process(pid): &Process| format!("grep -H '^State:.[^ZX]' /proc/{pid}/status 2>/dev/null; ");
    let script = all.iter().map(look).collect::<String>() + "true";
    world.run_script(PATIENTLY, &script).is(0, "", "");
}

/// Waits until the lock is free, long before its ttl.
#[track_caller]
fn is_free_in_time(world: &World, name: &str) {
    world.run(&format!("run {PATIENTLY} {name} -- true")).is(0, "", "");
}

pub(crate) fn one_that_is_killed_takes_its_command_along(backend: Backend) {
    let world = World::on(backend);
    let (running, all) = family(&world, "--grace 300ms");
    running.kill();
    if backend != Backend::Postgres {
        // There the lock ends with the connection, before its time, and the command has its grace.
        freed_after_all_are_dead(&world, &all);
    }
    for process in all {
        process.ends();
    }
    let done = running.end();
    assert!(done.stderr.contains("fencelock was killed, so its command"), "{done:?}");
}

pub(crate) fn one_that_is_stopped_loses_command_and_lock_and_exits_with_76_when_it_wakes(backend: Backend) {
    let world = World::on(backend);
    let (running, all) = family(&world, SHORT_TTL);
    running.fencelock().signal(Signal::STOP);
    freed_after_all_are_dead(&world, &all);
    running.fencelock().signal(Signal::CONT);
    running.end().fails(76, "could not be renewed in time");
}

pub(crate) fn the_lock_of_one_that_is_killed_is_free_long_before_its_ttl(backend: Backend) {
    let world = World::on(backend);
    let running = world.sleeper("--ttl 600s");
    running.kill();
    is_free_in_time(&world, "lock");
    assert!(!running.command.is_alive());
    running.end();
}

#[test]
fn killed_or_stopped_on_sqlite() {
    one_that_is_killed_takes_its_command_along(Backend::Sqlite);
    one_that_is_stopped_loses_command_and_lock_and_exits_with_76_when_it_wakes(Backend::Sqlite);
}

#[test]
fn the_address_of_one_that_is_killed_is_not_shown_and_may_hold_anything() {
    let world = World::new();
    let url = world.file("two words.db");
    world.job("exec sleep 600");
    let mut program = world.fencelock();
    program.args("run --ttl 600s lock -- sh job".split(' '));
    let running = world.started(program.env("FENCELOCK_URL", &url), "exec sleep 600");
    let arguments = running.watchdog(None).cmdline();
    assert!(!arguments.contains("two words"), "{arguments}");
    running.kill();
    let next = world.run_at(&url, &format!("run {PATIENTLY} lock -- true"));
    next.is(0, "", "");
    running.end();
}

#[test]
fn one_that_is_killed_does_not_release_what_another_holds_by_now() {
    let world = World::new();
    let first = world.sleeper("--ttl 600s");
    let watchdog = first.watchdog(None);
    // Its next renewal is minutes away, so it learns nothing of this.
    world.take_away();
    let second = world.sleeper("--ttl 600s");
    let before = world.holder()["owner"].clone();
    first.kill();
    watchdog.ends();
    assert_eq!(world.holder()["owner"], before);
    first.end();
    second.stop();
}

#[test]
fn the_lock_of_one_that_is_killed_while_it_releases_is_free_long_before_its_ttl() {
    let world = World::new();
    let running = world.start("--ttl 600s", "while ! test -e end; do sleep 0.01; done");
    let others = world.keep_file_to_itself();
    world.write("end", "");
    running.command.ends();
    running.kill();
    others.execute_batch("COMMIT").unwrap();
    is_free_in_time(&world, "lock");
    running.end();
}

#[test]
fn the_command_gets_sigterm_first_and_has_its_grace() {
    let world = World::new();
    let script = "trap 'sleep 0.3; touch tidied; exit 0' TERM; touch ready; while :; do sleep 0.01; done";
    let running = world.start("--grace 9s", script);
    wait_until("the trap", || world.has("ready"));
    running.kill();
    running.command.ends();
    assert!(world.has("tidied"));
    running.end();
}

#[test]
fn a_stopped_command_is_ended_too() {
    let world = World::new();
    let running = world.sleeper("");
    running.command.signal(Signal::STOP);
    running.command.comes_to('T');
    running.kill();
    running.command.ends();
    running.end();
}

#[test]
fn another_watchdog_takes_the_place_of_one_that_is_killed_and_guards_the_command() {
    let world = World::new();
    let running = world.sleeper("");
    let first = running.watchdog(None);
    first.signal(Signal::KILL);
    let watchdog = running.watchdog(Some(first));
    watchdog.signal(Signal::STOP);
    watchdog.comes_to('S');
    // What a service manager sends to all changes nothing.
    for signal in [Signal::TERM, Signal::INT, Signal::HUP, Signal::ALARM, Signal::USR1] {
        watchdog.signal(signal);
    }
    assert!(running.command.is_alive());
    running.kill();
    running.command.ends();
    running.end();
}

#[test]
fn neither_watchdog_nor_starter_is_for_people() {
    let world = World::new();
    let run = |name: &str, args: &[&str]| {
        let mut command = Command::new(binary());
        command.arg0(name).args(args).current_dir(world.dir());
        Done::of(command.stdin(fs::File::open("/proc/version").unwrap()))
    };
    for args in [&["lock", ""][..], &["lock", "", "99999999", "99999999"]] {
        run("lock-watchdog", args).fails(64, "started by `fencelock run` only");
    }
    // Without leave from a `fencelock run`, nothing is started.
    run("lock-starter", &["99", "", "", "touch", "ran"]).is(137, "", "");
    assert!(!world.has("ran"));
}

#[test]
fn lost_is_76_and_the_command_is_ended() {
    let world = World::new();
    let (running, all) = family(&world, SHORT_TTL);
    world.take_away();
    let why = "it was released by force or deleted, or it expired where it is kept";
    let line = format!("fencelock: the lock lock was lost: {why}; the command was ended\n");
    running.end().is(76, "", &line);
    assert!(!all.iter().any(|process| process.is_alive()));
}

#[test]
fn a_run_inside_of_one_that_loses_its_lock_ends_its_deaf_command_and_frees_its_own_lock() {
    for kill in [false, true] {
        let world = World::new();
        let inner = format!(
            "exec {} run --ttl 600s --grace 100s inner -- {}",
            binary(),
            deaf("deaf")
        );
        let running = world.start("--ttl 15s --grace 500ms", &inner);
        let deaf = world.pid("deaf").becomes("sleep");
        match kill {
            true => running.kill(),
            false => world.take_away(),
        }
        // Long before both its ttl and its grace.
        is_free_in_time(&world, "inner");
        assert!(!deaf.is_alive());
        let done = running.end();
        assert!(kill || done.code == Some(76), "{done:?}");
    }
}

#[test]
fn what_the_command_leaves_in_the_background_is_ended_with_it_unless_it_has_left_the_group() {
    for (program, says) in [("nohup", "processes that it had started still ran"), ("setsid", "")] {
        let world = World::new();
        let script = format!(
            "{program} {} > /dev/null 2>&1 & while ! test -e left; do sleep 0.01; done; exit 3",
            deaf("left")
        );
        let done = world.run_script("--grace 300ms", &script);
        let left = world.pid("left");
        let is_alive = left.is_alive();
        left.clean_up();
        assert!(world.is_free());
        match says {
            "" => done.is(3, "", ""),
            says => {
                done.fails(3, says);
                done.fails(3, "they were ended");
            }
        }
        assert_eq!(is_alive, says.is_empty(), "{program}");
    }
}
