//! A lock is kept for as long as the command runs.

use crate::world::{Backend, World};

on_every_backend! {
    a_command_that_runs_for_many_ttls_keeps_its_lock,
}

fn a_command_that_runs_for_many_ttls_keeps_its_lock(backend: Backend) {
    let world = World::on(backend);
    let done = world.run(["run", "--ttl", "4s", "lock", "--", "sleep", "14"]);
    assert_eq!((done.code, done.stderr.as_str()), (Some(0), ""));
}
