//! One line for each exit code.

use std::fs;
use std::time::Instant;

use crate::world::{Backend, SHORT_TTL, TAKEN_AWAY, World};

pub(crate) fn the_code_is_the_commands_own(backend: Backend) {
    for code in [0, 1, 7, 64, 69, 75, 76, 255] {
        let done = World::on(backend).run(["run", "lock", "--", "sh", "-c", &format!("exit {code}")]);
        assert_eq!((done.code, done.stderr.as_str()), (Some(code), ""));
    }
}

pub(crate) fn the_code_is_128_and_the_signal_that_killed_the_command(backend: Backend) {
    for (signal, code) in [("TERM", 143), ("KILL", 137), ("INT", 130), ("SEGV", 139)] {
        let done = World::on(backend).run(["run", "lock", "--", "sh", "-c", &format!("kill -{signal} $$")]);
        assert_eq!((done.code, done.stderr.as_str()), (Some(code), ""), "{signal}");
    }
}

pub(crate) fn busy_is_75_and_names_the_holder(backend: Backend) {
    let world = World::on(backend);
    let started = Instant::now();
    let running = world.start(&["--label", "night shift"], "exec sleep 600");
    let holder = running.locker().0;
    for patience in [&["-n"][..], &["--wait", "30ms"], &["-w", "0s"]] {
        let done = world.run([&["run"], patience, &["lock", "--", "true"]].concat());
        let line = done.one_line(75);
        assert!(line.starts_with("lock is busy, held by "), "{line}");
        let (_, held) = line.split_once(&format!(":{holder} (night shift) for ")).unwrap();
        let seconds: u64 = held.strip_suffix(" s").unwrap().parse().unwrap();
        // Rounded, as people want to see it. It cannot be held for longer than the test runs.
        assert!(seconds <= started.elapsed().as_secs() + 1, "{line}");
    }
    assert_eq!(running.stop().code, Some(143));
}

pub(crate) fn the_code_for_busy_can_be_chosen(backend: Backend) {
    let world = World::on(backend);
    let running = world.start(&[], "exec sleep 600");
    for code in [0, 1, 200] {
        let done = world.run(["run", "-n", "-E", &code.to_string(), "lock", "--", "true"]);
        done.one_line(code);
    }
    running.stop();
}

pub(crate) fn lost_is_76_and_the_command_is_ended(backend: Backend) {
    let world = World::on(backend);
    let running = world.start(&SHORT_TTL, "exec sleep 600");
    let command = running.command;
    let done = world.run(["release", "--force", "lock"]);
    assert_eq!(done.code, Some(0), "{done:?}");
    let done = running.end();
    let line = done.one_line(76);
    assert_eq!(
        line,
        format!("the lock lock was lost: {TAKEN_AWAY}; the command was ended")
    );
    assert!(!command.is_alive());
}

#[test]
fn a_wrong_configuration_is_78_since_a_retry_does_not_help() {
    let world = World::new();
    fs::write(
        world.path("locks.db"),
        "not a database, but a letter to you that is long enough to be looked at",
    )
    .unwrap();
    let done = world.run(["run", "lock", "--", "true"]);
    let line = done.one_line(78);
    assert!(line.contains("is not an SQLite database"), "{line}");
    assert_eq!(world.run(["check"]).code, Some(78));
    for page in [&["run", "--help"][..], &["man", "run"]] {
        let done = world.run(page);
        let code = |line: &str| line.trim_start().starts_with("78 ");
        assert!(done.stdout.lines().any(code), "{done:?}");
    }
}

#[test]
fn out_of_reach_is_69() {
    let world = World::new();
    assert_eq!(world.run(["run", "lock", "--", "true"]).code, Some(0));
    let others = rusqlite::Connection::open(world.path("locks.db")).unwrap();
    others.execute_batch("BEGIN IMMEDIATE").unwrap();
    let url = format!("{}?op_timeout=100ms", world.url());
    let done = world.run(["run", "--url", &url, "lock", "--", "true"]);
    let line = done.one_line(69);
    assert!(line.contains("did not answer within"), "{line}");
}

#[test]
fn wrong_arguments_are_64() {
    let done = World::new().run(["run", "--nonsense", "lock", "--", "true"]);
    let line = done.one_line(64);
    assert!(line.contains("--nonsense"), "{line}");
}

pub(crate) fn what_cannot_be_executed_is_126(backend: Backend) {
    let world = World::on(backend);
    fs::write(world.path("letter"), "dear reader").unwrap();
    let done = world.run(["run", "lock", "--", "./letter"]);
    assert_eq!(
        done.one_line(126),
        "./letter cannot be run: Permission denied (os error 13)"
    );
}

pub(crate) fn what_does_not_exist_is_127(backend: Backend) {
    let done = World::on(backend).run(["run", "lock", "--", "no-such-command"]);
    assert_eq!(
        done.one_line(127),
        "no-such-command cannot be run: No such file or directory (os error 2)"
    );
}

pub(crate) fn the_lock_is_free_after_every_end(backend: Backend) {
    let world = World::on(backend);
    for script in ["exit 0", "exit 7", "kill -9 $$"] {
        world.run(["run", "lock", "--", "sh", "-c", script]);
        let done = world.run(["holder", "lock"]);
        assert_eq!(
            (done.code, done.stdout.as_str()),
            (Some(1), "lock is free\n"),
            "{script}"
        );
    }
    world.run(["run", "lock", "--", "no-such-command"]);
    assert_eq!(world.run(["holder", "lock"]).code, Some(1));
}
