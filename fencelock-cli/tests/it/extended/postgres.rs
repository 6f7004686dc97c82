//! What only a Postgres can do to a command.

use crate::world::{Backend, World};

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
