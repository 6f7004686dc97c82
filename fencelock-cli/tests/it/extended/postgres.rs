//! What only a Postgres can do to a command.

use std::net::TcpListener;

use conformance_tests::servers::Data;
use rustix::process::Signal;

use super::{SECRET, misconfigured, unavailable};
use crate::world::{Backend, ClosedPort, World, wait_until};

#[test]
fn a_server_that_is_not_there_is_69() {
    let closed = ClosedPort::new();
    let url = format!("postgres://joe:{SECRET}@{}/shop", closed.address());
    unavailable(&url, "cannot be reached");
}

#[test]
fn all_servers_that_are_not_there_are_named() {
    let closed = [(); 2].map(|()| ClosedPort::new());
    let [one, two] = closed.each_ref().map(ClosedPort::address);
    let url = format!("postgres://joe:{SECRET}@{one},{two}/shop");
    unavailable(&url, &format!("cannot be reached at {one}: "));
    unavailable(&url, &format!("cannot be reached at {two}: "));
}

#[test]
fn a_server_that_never_answers_is_69_within_the_limit() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = silent.local_addr().unwrap().port();
    unavailable(
        &format!("postgres://joe:{SECRET}@127.0.0.1:{port}/shop?op_timeout=300ms"),
        "300ms",
    );
}

#[test]
fn a_database_that_does_not_exist_is_78() {
    let world = World::on(Backend::Postgres);
    misconfigured(
        &world.url().replace("/postgres?", "/nowhere?"),
        "correct it in the address",
    );
}

#[test]
fn a_killed_fencelock_frees_its_lock_at_once_and_takes_the_command_along() {
    let world = World::on(Backend::Postgres);
    let mut running = world.start(&["--ttl", "1h", "--grace", "1s"], "trap '' TERM; exec sleep 600");
    running.locker().signal(Signal::KILL);
    // Its connection has ended with it, long before its time.
    wait_until("a free lock", || {
        world.run(["run", "-n", "lock", "--", "true"]).code == Some(0)
    });
    wait_until("the end of the command", || !running.command.is_alive());
    running.child.wait().unwrap();
}

#[test]
fn a_server_that_dies_ends_the_command_at_once() {
    let world = World::on_own(Backend::Postgres);
    let running = world.start(&["--ttl", "1h"], "exec sleep 600");
    let command = running.command;
    world.server().kill();
    let line = running.end().one_line(76).to_owned();
    assert!(!command.is_alive());
    assert!(line.contains("ended the session or lease that kept the lock"), "{line}");
}

#[test]
fn a_server_that_restarts_has_a_free_lock_and_a_higher_token() {
    let world = World::on_own(Backend::Postgres);
    let token = |world: &World| {
        let done = world.run(["run", "lock", "--", "sh", "-c", "echo $FENCELOCK_TOKEN"]);
        assert_eq!((done.code, done.stderr.as_str()), (Some(0), ""));
        done.stdout.trim().parse::<u64>().unwrap()
    };
    let first = token(&world);
    let running = world.start(&["--ttl", "30s"], "exec sleep 600");
    world.server().restart(Data::Kept);
    assert!(token(&world) > first);
    let command = running.command;
    running.end().one_line(76);
    assert!(!command.is_alive());
}
