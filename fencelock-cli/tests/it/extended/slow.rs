//! What takes several ttl, and what is shown on every backend.

use std::fs;

use crate::ending::{
    one_that_is_killed_takes_its_command_along,
    one_that_is_stopped_loses_command_and_lock_and_exits_with_76_when_it_wakes,
    the_lock_of_one_that_is_killed_is_free_long_before_its_ttl,
};
use crate::world::{Backend, Done, World, binary};

fn a_command_that_runs_for_many_ttls_keeps_its_lock(backend: Backend) {
    let world = World::on(backend);
    let done = world.run(["run", "--ttl", "4s", "lock", "--", "sleep", "14"]);
    assert_eq!((done.code, done.stderr.as_str()), (Some(0), ""));
}

fn of_hosts_whose_clocks_differ_by_hours_one_runs_the_command(backend: Backend) {
    let world = World::on(backend);
    for ahead in ["+0", "+3h", "-3h", "+1h"] {
        let mut host = std::process::Command::new("faketime");
        host.args(["-f", ahead, binary()])
            .args(["run", "-n", "-E", "0", "--min-hold", "1h", "lock", "-c", "date +%s >> ran"])
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap())
            .env("FENCELOCK_URL", world.url())
            // Only the wall clock can be wrong on a real machine.
            .env("FAKETIME_DONT_FAKE_MONOTONIC", "1")
            .current_dir(world.dir());
        let done = Done::of(&mut host);
        assert_eq!(done.code, Some(0), "{done:?}");
        let ran = fs::read_to_string(world.path("ran")).unwrap().lines().count();
        assert_eq!(ran, 1, "clock {ahead}");
    }
}

on_every_backend! {
    one_that_is_killed_takes_its_command_along,
    one_that_is_stopped_loses_command_and_lock_and_exits_with_76_when_it_wakes,
    the_lock_of_one_that_is_killed_is_free_long_before_its_ttl,
    a_command_that_runs_for_many_ttls_keeps_its_lock,
    of_hosts_whose_clocks_differ_by_hours_one_runs_the_command,
}

#[cfg(feature = "postgres")]
#[test]
fn a_postgres_that_dies_ends_the_command_at_once() {
    let world = World::on_own(Backend::Postgres);
    let running = world.start(&["--ttl", "1h"], "exec sleep 600");
    let command = running.command;
    world.server().kill();
    let done = running.end();
    assert!(!command.is_alive());
    let line = done.stderr.lines().last().unwrap();
    assert!(
        done.code == Some(76) && line.contains("ended the session or lease that kept the lock"),
        "{done:?}"
    );
}
