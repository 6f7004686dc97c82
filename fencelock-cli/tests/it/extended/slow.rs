//! What takes several ttl, and what is shown on every backend.

use crate::ending::{
    one_that_is_killed_takes_its_command_along,
    one_that_is_stopped_loses_command_and_lock_and_exits_with_76_when_it_wakes,
    the_lock_of_one_that_is_killed_is_free_long_before_its_ttl,
};
use crate::world::{Backend, World};

#[track_caller]
fn the_command_ends_with_its_lock_on(backend: Backend) {
    one_that_is_killed_takes_its_command_along(backend);
    one_that_is_stopped_loses_command_and_lock_and_exits_with_76_when_it_wakes(backend);
    the_lock_of_one_that_is_killed_is_free_long_before_its_ttl(backend);
    // For many ttl.
    World::on(backend).run("run --ttl 4s lock -- sleep 14").is(0, "", "");
}

#[test]
fn sqlite() {
    the_command_ends_with_its_lock_on(Backend::Sqlite);
}

#[test]
fn etcd() {
    the_command_ends_with_its_lock_on(Backend::Etcd);
}

#[test]
fn postgres() {
    the_command_ends_with_its_lock_on(Backend::Postgres);
    // A server that dies ends the command at once.
    let world = World::on_own(Backend::Postgres);
    let running = world.sleeper("--ttl 1h");
    let command = running.command;
    world.server().kill();
    let done = running.end();
    assert!(!command.is_alive());
    let line = done.stderr.lines().last().unwrap();
    let says = line.contains("ended the session or lease that kept the lock");
    assert!(says && done.code == Some(76), "{done:?}");
}

#[test]
fn redis() {
    the_command_ends_with_its_lock_on(Backend::Redis);
}
