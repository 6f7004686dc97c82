//! Several processes take turns.

use std::fs;
use std::process::{Child, Stdio};

use crate::world::{Backend, Done, World, wait_for};

pub(crate) fn twenty_processes_count_to_twenty(backend: Backend) {
    let world = World::on(backend);
    fs::write(world.path("n"), "0").unwrap();
    let script = "n=$(cat n); sleep 0.02; echo $((n+1)) > n; echo $FENCELOCK_TOKEN >> tokens";
    let start = |_| {
        world
            .fencelock()
            .args(["run", "counter", "--", "sh", "-c", script])
            .spawn()
            .unwrap()
    };
    let mut children: Vec<Child> = (0..20).map(start).collect();
    for child in &mut children {
        assert!(child.wait().unwrap().success());
    }
    assert_eq!(fs::read_to_string(world.path("n")).unwrap().trim(), "20");
    let tokens = fs::read_to_string(world.path("tokens")).unwrap();
    let tokens: Vec<u64> = tokens.lines().map(|token| token.parse().unwrap()).collect();
    assert_eq!(tokens.len(), 20);
    assert!(tokens.is_sorted_by(|a, b| a < b), "{tokens:?}");
}

pub(crate) fn a_waiter_goes_on_as_soon_as_the_lock_is_free(backend: Backend) {
    let world = World::on(backend);
    let running = world.start(&[], "exec sleep 600");
    let waiting = world.fencelock().args(["run", "lock", "--", "true"]).spawn().unwrap();
    running.stop();
    assert!(waiting.wait_with_output().unwrap().status.success());
}

#[test]
fn who_waits_for_the_lock_waits_for_a_busy_file_too() {
    let world = World::new();
    assert_eq!(world.run(["run", "lock", "--", "true"]).code, Some(0));
    // As many others do together.
    let others = rusqlite::Connection::open(world.path("locks.db")).unwrap();
    others.execute_batch("BEGIN IMMEDIATE").unwrap();
    let mut patient = world.fencelock().args(["run", "lock", "--", "true"]).spawn().unwrap();
    let done = world.run(["run", "-n", "lock", "--", "true"]);
    assert!(done.one_line(69).contains("did not answer within"), "{done:?}");
    assert!(patient.try_wait().unwrap().is_none());
    others.execute_batch("COMMIT").unwrap();
    assert!(patient.wait().unwrap().success());
}

#[test]
fn who_does_not_wait_does_not_wait_for_a_file_that_nobody_writes_to() {
    let world = World::new();
    assert_eq!(world.run(["run", "lock", "--", "true"]).code, Some(0));
    let others = rusqlite::Connection::open(world.path("locks.db")).unwrap();
    others.execute_batch("BEGIN IMMEDIATE").unwrap();
    // Much longer than the test waits.
    let url = format!("{}?op_timeout=1h", world.url());
    let mut command = world.fencelock();
    command.args(["run", "-n", "--url", &url, "lock", "--", "true"]);
    let mut run = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    wait_for(&mut run);
    let done = Done::from(run.wait_with_output().unwrap());
    assert!(done.one_line(69).contains("did not answer within"), "{done:?}");
}
