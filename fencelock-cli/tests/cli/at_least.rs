//! A name stays taken for a time after the command has ended, as a scheduler on many machines needs it.

use std::fs;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::world::{Backend, Done, World};

on_every_backend! {
    a_name_stays_taken_after_its_command,
    a_name_stays_taken_after_a_killed_locker,
    of_hosts_whose_clocks_differ_by_hours_one_runs_the_command,
}

/// Waits for the lock. Returns how long it was taken since then.
#[track_caller]
fn taken_since(world: &World, since: Instant) -> Duration {
    let done = world.run(["run", "--wait", "60s", "lock", "--", "true"]);
    assert_eq!(done.code, Some(0), "{done:?}");
    since.elapsed()
}

fn a_name_stays_taken_after_its_command(backend: Backend) {
    let world = World::on(backend);
    let (since, length) = (Instant::now(), Duration::from_secs(3));
    let done = world.run([
        "run",
        "-n",
        "--at-least",
        "3s",
        "--label",
        "nightly",
        "lock",
        "--",
        "false",
    ]);
    assert_eq!(done.code, Some(1), "{done:?}");
    let busy = world.run(["run", "-n", "lock", "--", "true"]);
    let line = busy.one_line(75);
    assert!(
        line.contains("lock is busy, reserved by ") && line.contains(" (nightly)"),
        "{line}"
    );
    let shown = world.run(["holder", "lock"]);
    assert_eq!(shown.code, Some(0), "{shown:?}");
    assert!(
        shown.stdout.starts_with("lock, reserved by ") && shown.stdout.contains(" (nightly) for "),
        "{shown:?}"
    );
    let listed = world.run(["list"]);
    assert!(listed.stdout.contains("reserved ("), "{listed:?}");
    let listed = world.run(["list", "--json"]);
    assert!(listed.stdout.contains("\"reserved\":true"), "{listed:?}");
    let taken = taken_since(&world, since);
    assert!(taken >= length, "{taken:?}");
    // Each of two starts, a while apart, takes the lock anew; force frees it.
    let done = world.run(["run", "-n", "--at-least", "1h", "lock", "--", "true"]);
    assert_eq!(done.code, Some(0), "{done:?}");
    let forced = world.run(["release", "--force", "lock"]);
    assert_eq!(forced.code, Some(0), "{forced:?}");
    let done = world.run(["run", "-n", "lock", "--", "true"]);
    assert_eq!(done.code, Some(0), "{done:?}");
}

fn a_name_stays_taken_after_a_killed_locker(backend: Backend) {
    let world = World::on(backend);
    let (since, length) = (Instant::now(), Duration::from_secs(5));
    let mut running = world.start(&["--ttl", "2s", "--at-least", "5s"], "exec sleep 60");
    running.locker().signal(Signal::KILL);
    running.child.wait().unwrap();
    let busy = world.run(["run", "-n", "lock", "--", "true"]);
    assert_eq!(busy.code, Some(75), "{busy:?}");
    let taken = taken_since(&world, since);
    assert!(taken >= length, "{taken:?}");
    assert!(!running.command.is_alive(), "the next holder is alone");
}

fn of_hosts_whose_clocks_differ_by_hours_one_runs_the_command(backend: Backend) {
    let world = World::on(backend);
    let mut ran = 0;
    for ahead in ["+0", "+3h", "-3h", "+1h"] {
        let mut host = std::process::Command::new("faketime");
        host.args(["-f", ahead, crate::world::binary()])
            .args(["run", "-n", "-E", "0", "--at-least", "20s", "lock", "--"])
            .args(["sh", "-c", "date +%s >> ran"])
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap())
            .env("FENCELOCK_URL", world.url())
            // Only the wall clock can be wrong on a real machine.
            .env("FAKETIME_DONT_FAKE_MONOTONIC", "1")
            .current_dir(world.dir());
        let done = Done::of(&mut host);
        assert_eq!(done.code, Some(0), "{done:?}");
        ran = fs::read_to_string(world.path("ran")).unwrap().lines().count();
        assert_eq!(ran, 1, "clock {ahead}");
    }
    assert_eq!(ran, 1);
    let forced = world.run(["release", "--force", "lock"]);
    assert_eq!(forced.code, Some(0), "{forced:?}");
}
