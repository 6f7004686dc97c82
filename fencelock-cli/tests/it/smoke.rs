//! The command on each server, once: it runs, it says that a lock is busy, it shows the holder and takes a lock away.

use crate::modes;
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
    world.run("run -n lock -- true").fails(75, &holder);
    let shown = world.run("holder lock");
    assert!(shown.code == Some(0) && shown.stdout.contains(&holder), "{shown:?}");
    running.stop();

    world.run("holder lock").is(1, "lock is free\n", "");
    world.run("run -n --min-hold 1h lock -- true").is(0, "", "");
    assert_eq!(world.run("run -n lock -- true").code, Some(75));
    world.take_away();
    assert!(world.run_script("", "echo $FENCELOCK_TOKEN").token() > first);
    let check = world.run("check --json");
    let product = check.json()["backend"]["product"].to_string().to_lowercase();
    let expected = format!("{backend:?}").to_lowercase();
    assert!(check.code == Some(0) && product.contains(&expected), "{check:?}");
    modes::readers_share_a_lock_and_exclude_a_writer(backend);
    modes::a_number_of_holders_are_let_in_at_once(backend);
}
