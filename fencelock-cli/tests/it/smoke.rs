//! The command on each server, once: it runs, it says that a lock is busy, it shows the holder and takes a lock away.

use crate::modes::several_hold_a_lock_as_far_as_their_modes_go_together;
use crate::world::{Backend, World};

#[test]
fn etcd() {
    works_on(Backend::Etcd);
}

#[test]
fn postgres() {
    works_on(Backend::Postgres);
}

#[test]
fn redis() {
    works_on(Backend::Redis);
}

#[track_caller]
fn works_on(backend: Backend) {
    let world = World::on(backend);
    world.run_script("", "exit 3").is(3, "", "");
    let first = world.run_script("", "echo $FENCELOCK_TOKEN").token();
    let running = world.sleeper("--label nightly");
    let holder = format!(":{} (nightly) for ", running.fencelock().0);
    world.run("run -n lock -- true").fails(75, "lock is busy");
    world.run("holder lock").shows(0, &[&holder]);
    running.stop();

    world.run("holder lock").is(1, "lock is free\n", "");
    world.run("run -n --min-hold 1h lock -- true").is(0, "", "");
    world.run("run -n lock -- true").ends_with(75);
    world.take_away();
    assert!(world.run_script("", "echo $FENCELOCK_TOKEN").token() > first);
    let check = world.run("check --json");
    check.ends_with(0);
    let product = check.json()["backend"]["product"].to_string().to_lowercase();
    assert!(product.contains(&format!("{backend:?}").to_lowercase()), "{check:?}");
    several_hold_a_lock_as_far_as_their_modes_go_together(backend);
}
