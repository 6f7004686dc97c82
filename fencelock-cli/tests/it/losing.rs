//! The lock ends while the command runs. Whatever happens to whom, the command is gone before somebody else has the lock.

use rustix::process::Signal;

use crate::world::{Backend, PATIENTLY, Process, Running, SHORT_TTL, TAKEN_AWAY, World, wait_until};

/// A command with a child of its own, both deaf to SIGTERM, and a daemon that it has started.
const FAMILY: &str = "trap '' TERM
    sh -c 'echo $$ > child.new; mv child.new child; exec sleep 600' &
    setsid sh -c 'echo $$ > daemon.new; mv daemon.new daemon; exec sleep 600' &
    exec sleep 600";

struct Family {
    running: Running,
    all: [Process; 3],
}

fn family(world: &World, options: &[&str]) -> Family {
    let running = world.start(options, FAMILY);
    let all = [running.command, world.pid("child"), world.pid("daemon")];
    Family { running, all }
}

/// Waits for the lock; when it is granted, everyone is dead.
#[track_caller]
fn freed_after_all_are_dead(world: &World, all: [Process; 3]) {
    let script = alive_script(all);
    let done = world.run([&["run"], &PATIENTLY[..], &["lock", "--", "sh", "-c", &script]].concat());
    assert_eq!((done.code, done.stdout.as_str()), (Some(0), ""), "{done:?}");
}

/// Prints who still lives, as the next holder of the lock sees it.
fn alive_script(all: [Process; 3]) -> String {
    all.map(|Process(pid)| format!("grep -H '^State:.[^ZX]' /proc/{pid}/status 2>/dev/null; "))
        .concat()
        + "true"
}

pub(crate) fn a_killed_locker_takes_the_command_and_all_its_offspring_along(backend: Backend) {
    let world = World::on(backend);
    let mut family = family(&world, &["--grace", "300ms"]);
    family.running.locker().signal(Signal::KILL);
    match backend {
        // The lock ends with the locker's connection, before its time, and the command has its grace.
        #[cfg(feature = "postgres")]
        Backend::Postgres => wait_until("the end of all", || {
            !family.all.iter().any(|process| process.is_alive())
        }),
        _ => freed_after_all_are_dead(&world, family.all),
    }
    family.running.child.wait().unwrap();
}

pub(crate) fn a_stopped_locker_loses_command_and_lock_and_exits_with_76_when_it_wakes(backend: Backend) {
    let world = World::on(backend);
    let family = family(&world, &SHORT_TTL);
    family.running.locker().signal(Signal::STOP);
    freed_after_all_are_dead(&world, family.all);
    family.running.locker().signal(Signal::CONT);
    let done = family.running.end();
    assert!(done.one_line(76).contains("could not be renewed in time"), "{done:?}");
}

pub(crate) fn the_lock_of_a_killed_locker_is_free_long_before_its_ttl(backend: Backend) {
    let world = World::on(backend);
    let mut running = world.start(&["--ttl", "600s"], "exec sleep 600");
    running.locker().signal(Signal::KILL);
    running.child.wait().unwrap();
    let done = world.run([&["run"], &PATIENTLY[..], &["lock", "--", "true"]].concat());
    assert_eq!(done.code, Some(0), "{done:?}");
    assert!(!running.command.is_alive());
}

#[test]
fn the_address_of_a_killed_locker_is_not_shown_and_may_hold_anything() {
    let world = World::new();
    let url = format!("sqlite:{}", world.path("two words.db").display());
    let mut running = world.start(&["--ttl", "600s", "--url", &url], "exec sleep 600");
    let arguments = std::fs::read_to_string(format!("/proc/{}/cmdline", running.supervisor().0)).unwrap();
    assert!(!arguments.contains("two words"), "{arguments}");
    running.locker().signal(Signal::KILL);
    running.child.wait().unwrap();
    let done = world.run([&["run"], &PATIENTLY[..], &["--url", &url, "lock", "--", "true"]].concat());
    assert_eq!(done.code, Some(0), "{done:?}");
}

#[test]
fn a_killed_locker_does_not_release_what_another_holds_by_now() {
    let world = World::new();
    let mut first = world.start(
        &["--ttl", "600s"],
        "trap '' TERM; touch ready; while :; do sleep 0.01; done",
    );
    wait_until("the trap", || world.path("ready").exists());
    let supervisor = first.supervisor();
    // Its next renewal is minutes away, so it learns nothing of this.
    assert_eq!(world.run(["release", "--force", "lock"]).code, Some(0));
    std::fs::remove_file(world.path("pid")).unwrap();
    let second = world.start(&["--ttl", "600s"], "exec sleep 600");
    let holder = || world.run(["holder", "lock", "--json"]).stdout;
    let owner = |text: String| serde_json::from_str::<serde_json::Value>(&text).unwrap()["owner"].clone();
    let before = owner(holder());
    first.locker().signal(Signal::KILL);
    first.child.wait().unwrap();
    first.command.signal(Signal::KILL);
    wait_until("the end of the supervisor", || !supervisor.is_alive());
    assert_eq!(owner(holder()), before);
    second.locker().signal(Signal::TERM);
    assert_eq!(second.end().code, Some(143));
}

#[test]
fn the_lock_of_a_locker_that_was_killed_while_it_released_is_free_long_before_its_ttl() {
    let world = World::new();
    let mut running = world.start(&["--ttl", "600s"], "while ! test -e end; do sleep 0.01; done");
    let others = rusqlite::Connection::open(world.path("locks.db")).unwrap();
    others.execute_batch("BEGIN IMMEDIATE").unwrap();
    std::fs::write(world.path("end"), "").unwrap();
    wait_until("the end of the command", || !running.command.is_alive());
    let locker = running.locker();
    assert!(locker.is_alive());
    locker.signal(Signal::KILL);
    running.child.wait().unwrap();
    others.execute_batch("COMMIT").unwrap();
    let done = world.run([&["run"], &PATIENTLY[..], &["lock", "--", "true"]].concat());
    assert_eq!(done.code, Some(0), "{done:?}");
}

#[test]
fn a_supervisor_that_fails_by_itself_is_not_called_killed() {
    let world = World::new();
    let running = world.start(&[], "exec sleep 600");
    let supervisor = running.supervisor();
    supervisor.signal(Signal::KILL);
    let done = running.end();
    assert!(done.one_line(137).contains("killed by signal 9"), "{done:?}");
    // Too few files for it: it has more open than the locker, for a moment. Which limit that is differs.
    let failed = (8..40).map(|files| {
        let mut shell = std::process::Command::new("sh");
        shell.args([
            "-c",
            r#"ulimit -n "$1"; exec "$0" run lock -- true"#,
            crate::world::binary(),
            &files.to_string(),
        ]);
        crate::world::Done::of(shell.env("FENCELOCK_URL", world.url()).current_dir(world.dir()))
    });
    let failed: Vec<_> = failed.filter(|done| done.code != Some(0)).collect();
    assert!(!failed.is_empty());
    for done in failed {
        assert!(matches!(done.code, Some(69 | 126 | 127)), "{done:?}");
        assert!(!done.stderr.contains("killed by"), "{done:?}");
    }
}

#[test]
fn the_command_is_told_with_sigterm_first_and_has_its_grace() {
    let world = World::new();
    let script = "trap 'sleep 0.3; touch tidied; exit 0' TERM; touch ready; while :; do sleep 0.01; done";
    let mut running = world.start(&["--grace", "9s"], script);
    wait_until("the trap", || world.path("ready").exists());
    running.locker().signal(Signal::KILL);
    wait_until("the end of the command", || !running.command.is_alive());
    assert!(world.path("tidied").exists());
    running.child.wait().unwrap();
}

pub(crate) fn a_killed_supervisor_takes_everything_along_at_once(backend: Backend) {
    let world = World::on(backend);
    let family = family(&world, &[]);
    family.running.supervisor().signal(Signal::KILL);
    let done = family.running.end();
    assert!(
        done.one_line(137).contains("supervisor of the command was killed"),
        "{done:?}"
    );
    assert!(!family.all.iter().any(|process| process.is_alive()));
    assert_eq!(world.run(["holder", "lock"]).code, Some(1));
}

#[test]
fn a_stopped_supervisor_is_made_to_go_on() {
    let world = World::new();
    let running = world.start(&[], "exec sleep 600");
    let supervisor = running.supervisor();
    supervisor.signal(Signal::STOP);
    wait_until("the supervisor to go on", || supervisor.state() == Some('S'));
    running.locker().signal(Signal::TERM);
    assert_eq!(running.end().code, Some(143));
}

#[test]
fn the_command_dies_even_if_locker_and_supervisor_are_killed_together() {
    let world = World::new();
    let mut running = world.start(&[], "trap '' TERM; exec sleep 600");
    let supervisor = running.supervisor();
    running.locker().signal(Signal::STOP);
    supervisor.signal(Signal::KILL);
    running.locker().signal(Signal::KILL);
    wait_until("the end of the command", || !running.command.is_alive());
    running.child.wait().unwrap();
}

pub(crate) fn a_lock_that_is_taken_away_ends_the_command_and_all_its_offspring(backend: Backend) {
    let world = World::on(backend);
    let family = family(&world, &SHORT_TTL);
    assert_eq!(world.run(["release", "--force", "lock"]).code, Some(0));
    let done = family.running.end();
    assert!(done.one_line(76).contains(TAKEN_AWAY), "{done:?}");
    assert!(!family.all.iter().any(|process| process.is_alive()));
}

#[test]
fn a_stopped_command_is_ended_too() {
    let world = World::new();
    let mut running = world.start(&[], "exec sleep 600");
    running.command.signal(Signal::STOP);
    wait_until("the command to stop", || running.command.state() == Some('T'));
    running.locker().signal(Signal::KILL);
    wait_until("the end of the command", || !running.command.is_alive());
    running.child.wait().unwrap();
}

#[test]
fn a_lock_file_that_vanishes_ends_the_command_before_its_lease() {
    let world = World::new();
    let running = world.start(&SHORT_TTL, "exec sleep 600");
    std::fs::remove_file(world.path("locks.db")).unwrap();
    let command = running.command;
    let done = running.end();
    assert_eq!(done.code, Some(76), "{done:?}");
    assert!(!command.is_alive());
}
