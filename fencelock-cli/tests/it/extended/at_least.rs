//! A name is free again after its time, also if the locker was killed, and whatever the wall clocks say.

use std::fs;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::world::{Backend, Done, PATIENTLY, World};

on_every_backend! {
    a_name_is_free_after_its_time_and_not_before,
    a_name_stays_taken_after_a_killed_locker,
    of_hosts_whose_clocks_differ_by_hours_one_runs_the_command,
}

/// Waits for the lock. Returns how long it was taken since then.
#[track_caller]
fn taken_since(world: &World, since: Instant) -> Duration {
    let done = world.run([&["run"], &PATIENTLY[..], &["lock", "--", "true"]].concat());
    assert_eq!(done.code, Some(0), "{done:?}");
    since.elapsed()
}

fn a_name_is_free_after_its_time_and_not_before(backend: Backend) {
    let world = World::on(backend);
    let (since, length) = (Instant::now(), Duration::from_secs(3));
    let done = world.run(["run", "-n", "--at-least", "3s", "lock", "--", "true"]);
    assert_eq!(done.code, Some(0), "{done:?}");
    let taken = taken_since(&world, since);
    assert!(taken >= length, "{taken:?}");
}

fn a_name_stays_taken_after_a_killed_locker(backend: Backend) {
    let world = World::on(backend);
    let (since, length) = (Instant::now(), Duration::from_secs(8));
    // Long after the ttl, so that it is the reservation that keeps the name.
    let mut running = world.start(&["--ttl", "4s", "--at-least", "8s"], "exec sleep 600");
    running.locker().signal(Signal::KILL);
    running.child.wait().unwrap();
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
            .args(["run", "-n", "-E", "0", "--at-least", "1h", "lock", "--"])
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
