//! The lock ends while the command runs: whatever happens to whom, the command is gone before another has the lock.

use std::fs;
use std::os::unix::process::CommandExt;

use rustix::process::Signal;

use crate::world::{Backend, Done, PATIENTLY, Process, Running, SHORT_TTL, TAKEN_AWAY, World, binary, wait_until};

/// A command with a child of its own, both deaf to SIGTERM.
const FAMILY: &str = "trap '' TERM
    sh -c 'echo $$ > child.new; mv child.new child; exec sleep 600' &
    exec sleep 600";

fn family(world: &World, options: &[&str]) -> (Running, [Process; 2]) {
    let running = world.start(options, FAMILY);
    let all = [running.command, world.pid("child").becomes("sleep")];
    (running, all)
}

/// Waits for the lock; when it is granted, everyone is dead.
#[track_caller]
fn freed_after_all_are_dead(world: &World, all: [Process; 2]) {
    let look = |Process(pid)| format!("grep -H '^State:.[^ZX]' /proc/{pid}/status 2>/dev/null; ");
    let script = all.map(look).concat() + "true";
    let done = world.run([&["run"], &PATIENTLY[..], &["lock", "--", "sh", "-c", &script]].concat());
    assert_eq!((done.code, done.stdout.as_str()), (Some(0), ""), "{done:?}");
}

#[track_caller]
fn is_free_in_time(world: &World, name: &str) {
    let done = world.run([&["run"], &PATIENTLY[..], &[name, "--", "true"]].concat());
    assert_eq!(done.code, Some(0), "{done:?}");
}

pub(crate) fn one_that_is_killed_takes_its_command_along(backend: Backend) {
    let world = World::on(backend);
    let (running, all) = family(&world, &["--grace", "300ms"]);
    running.fencelock().signal(Signal::KILL);
    match backend {
        // The lock ends with the connection, before its time, and the command has its grace.
        #[cfg(feature = "postgres")]
        Backend::Postgres => wait_until("the end of all", || !all.iter().any(|process| process.is_alive())),
        _ => freed_after_all_are_dead(&world, all),
    }
    let done = running.end();
    assert!(done.stderr.contains("fencelock was killed, so its command"), "{done:?}");
}

pub(crate) fn one_that_is_stopped_loses_command_and_lock_and_exits_with_76_when_it_wakes(backend: Backend) {
    let world = World::on(backend);
    let (running, all) = family(&world, &SHORT_TTL);
    running.fencelock().signal(Signal::STOP);
    freed_after_all_are_dead(&world, all);
    running.fencelock().signal(Signal::CONT);
    let done = running.end();
    assert!(done.one_line(76).contains("could not be renewed in time"), "{done:?}");
}

pub(crate) fn the_lock_of_one_that_is_killed_is_free_long_before_its_ttl(backend: Backend) {
    let world = World::on(backend);
    let running = world.start(&["--ttl", "600s"], "exec sleep 600");
    running.fencelock().signal(Signal::KILL);
    is_free_in_time(&world, "lock");
    assert!(!running.command.is_alive());
    running.end();
}

#[test]
fn killed_on_sqlite() {
    one_that_is_killed_takes_its_command_along(Backend::Sqlite);
}

#[test]
fn stopped_on_sqlite() {
    one_that_is_stopped_loses_command_and_lock_and_exits_with_76_when_it_wakes(Backend::Sqlite);
}

#[test]
fn the_address_of_one_that_is_killed_is_not_shown_and_may_hold_anything() {
    let world = World::new();
    let url = format!("sqlite:{}", world.path("two words.db").display());
    let running = world.start(&["--ttl", "600s", "--url", &url], "exec sleep 600");
    let arguments = fs::read_to_string(format!("/proc/{}/cmdline", running.watchdog().0)).unwrap();
    assert!(!arguments.contains("two words"), "{arguments}");
    running.fencelock().signal(Signal::KILL);
    let done = world.run([&["run"], &PATIENTLY[..], &["--url", &url, "lock", "--", "true"]].concat());
    assert_eq!(done.code, Some(0), "{done:?}");
    running.end();
}

#[test]
fn one_that_is_killed_does_not_release_what_another_holds_by_now() {
    let world = World::new();
    let first = world.start(
        &["--ttl", "600s"],
        "trap '' TERM; touch ready; while :; do sleep 0.01; done",
    );
    wait_until("the trap", || world.path("ready").exists());
    let watchdog = first.watchdog();
    // Its next renewal is minutes away, so it learns nothing of this.
    assert_eq!(world.run(["release", "--force", "lock"]).code, Some(0));
    fs::remove_file(world.path("pid")).unwrap();
    let second = world.start(&["--ttl", "600s"], "exec sleep 600");
    let before = world.holder()["owner"].clone();
    first.fencelock().signal(Signal::KILL);
    first.command.signal(Signal::KILL);
    wait_until("the end of the watchdog", || !watchdog.is_alive());
    assert_eq!(world.holder()["owner"], before);
    first.end();
    second.fencelock().signal(Signal::TERM);
    assert_eq!(second.end().code, Some(143));
}

#[test]
fn the_lock_of_one_that_is_killed_while_it_releases_is_free_long_before_its_ttl() {
    let world = World::new();
    let running = world.start(&["--ttl", "600s"], "while ! test -e end; do sleep 0.01; done");
    let others = world.keep_file_to_itself();
    fs::write(world.path("end"), "").unwrap();
    wait_until("the end of the command", || !running.command.is_alive());
    running.fencelock().signal(Signal::KILL);
    others.execute_batch("COMMIT").unwrap();
    is_free_in_time(&world, "lock");
    running.end();
}

#[test]
fn the_command_gets_sigterm_first_and_has_its_grace() {
    let world = World::new();
    let script = "trap 'sleep 0.3; touch tidied; exit 0' TERM; touch ready; while :; do sleep 0.01; done";
    let running = world.start(&["--grace", "9s"], script);
    wait_until("the trap", || world.path("ready").exists());
    running.fencelock().signal(Signal::KILL);
    wait_until("the end of the command", || !running.command.is_alive());
    assert!(world.path("tidied").exists());
    running.end();
}

#[test]
fn a_stopped_command_is_ended_too() {
    let world = World::new();
    let running = world.start(&[], "exec sleep 600");
    running.command.signal(Signal::STOP);
    wait_until("the command to stop", || running.command.state() == Some('T'));
    running.fencelock().signal(Signal::KILL);
    wait_until("the end of the command", || !running.command.is_alive());
    running.end();
}

#[test]
fn another_watchdog_takes_the_place_of_one_that_is_killed_and_guards_the_command() {
    let world = World::new();
    let running = world.start(&[], "exec sleep 600");
    let watchdog = running.watchdog();
    watchdog.signal(Signal::KILL);
    wait_until("another watchdog", || {
        running.watchdogs().iter().any(|other| other.0 != watchdog.0)
    });
    running.watchdog().signal(Signal::STOP);
    wait_until("the watchdog to go on", || running.watchdog().state() == Some('S'));
    assert!(running.command.is_alive());
    running.fencelock().signal(Signal::KILL);
    wait_until("the end of the command", || !running.command.is_alive());
    running.end();
}

#[test]
fn signals_to_the_watchdog_change_nothing() {
    let world = World::new();
    let running = world.start(&[], "exec sleep 600");
    let watchdog = running.watchdog();
    for signal in [Signal::TERM, Signal::INT, Signal::HUP, Signal::ALARM, Signal::USR1] {
        watchdog.signal(signal);
    }
    running.fencelock().signal(Signal::HUP);
    let done = running.end();
    assert_eq!((done.code, done.stderr.as_str()), (Some(129), ""));
}

#[test]
fn neither_watchdog_nor_starter_is_for_people() {
    let world = World::new();
    let run = |name: &str, args: &[&str]| {
        let mut command = std::process::Command::new(binary());
        command.arg0(name).args(args).current_dir(world.dir());
        Done::of(command.stdin(fs::File::open("/proc/version").unwrap()))
    };
    let done = run("lock-watchdog", &["lock", "-"]);
    assert!(
        done.one_line(64).contains("started by `fencelock run` only"),
        "{done:?}"
    );
    // Without leave from a `fencelock run`, nothing is started.
    assert_eq!(run("lock-starter", &["99", "", "touch", "ran"]).code, Some(137));
    assert!(!world.path("ran").exists());
}

#[test]
fn lost_is_76_and_the_command_is_ended() {
    let world = World::new();
    let (running, all) = family(&world, &SHORT_TTL);
    assert_eq!(world.run(["release", "--force", "lock"]).code, Some(0));
    let done = running.end();
    let line = done.one_line(76);
    assert_eq!(
        line,
        format!("the lock lock was lost: {TAKEN_AWAY}; the command was ended")
    );
    assert!(!all.iter().any(|process| process.is_alive()));
}

#[test]
fn a_lock_file_that_vanishes_ends_the_command_before_its_lease() {
    let world = World::new();
    let running = world.start(&SHORT_TTL, "exec sleep 600");
    fs::remove_file(world.path("locks.db")).unwrap();
    let command = running.command;
    assert_eq!(running.end().code, Some(76));
    assert!(!command.is_alive());
}

#[test]
fn a_run_inside_of_one_that_loses_its_lock_ends_its_deaf_command_and_frees_its_own_lock() {
    for kill in [false, true] {
        let world = World::new();
        let inner = format!(
            "exec {} run --ttl 600s --grace 100s inner -- sh -c 'trap \"\" TERM; echo $$ > deaf.new; mv deaf.new deaf; exec sleep 600'",
            binary()
        );
        let running = world.start(&["--ttl", "6s", "--grace", "500ms"], &inner);
        let deaf = world.pid("deaf").becomes("sleep");
        if kill {
            running.fencelock().signal(Signal::KILL);
        } else {
            assert_eq!(world.run(["release", "--force", "lock"]).code, Some(0));
        }
        // Long before both its ttl and its grace.
        is_free_in_time(&world, "inner");
        assert!(!deaf.is_alive());
        let done = running.end();
        assert!(kill || done.code == Some(76), "{done:?}");
    }
}

#[test]
fn what_the_command_leaves_in_the_background_is_ended_with_it_and_a_line_says_so() {
    let world = World::new();
    let script = "nohup sh -c 'trap \"\" TERM; echo $$ > left.new; mv left.new left; exec sleep 600' > /dev/null 2>&1 &
                  while ! test -e left; do sleep 0.01; done; exit 3";
    let done = world.run(["run", "--grace", "300ms", "lock", "--", "sh", "-c", script]);
    let line = done.one_line(3);
    assert!(
        line.contains("processes that it had started still ran") && line.contains("they were ended"),
        "{line}"
    );
    assert!(!world.pid("left").is_alive());
}

#[test]
fn a_daemon_that_left_the_group_outlives_the_command() {
    let world = World::new();
    let script = "setsid sh -c 'echo $$ > daemon.new; mv daemon.new daemon; exec sleep 600' > /dev/null 2>&1 &
                  while ! test -e daemon; do sleep 0.01; done";
    let done = world.run(["run", "lock", "--", "sh", "-c", script]);
    let daemon = world.pid("daemon");
    let alive = daemon.is_alive();
    daemon.clean_up();
    assert_eq!((done.code, done.stderr.as_str(), alive), (Some(0), "", true));
    assert_eq!(world.run(["holder", "lock"]).code, Some(1));
}
