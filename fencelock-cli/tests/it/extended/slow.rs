//! What takes several ttl, and what is shown on every backend.

use crate::ending::{
    one_that_is_killed_takes_its_command_along,
    one_that_is_stopped_loses_command_and_lock_and_exits_with_76_when_it_wakes,
    the_lock_of_one_that_is_killed_is_free_long_before_its_ttl,
};
use crate::world::{Backend, World};

fn a_command_that_runs_for_many_ttls_keeps_its_lock(backend: Backend) {
    World::on(backend).run("run --ttl 4s lock -- sleep 14").is(0, "", "");
}

/// Makes a test of each function, on each backend.
macro_rules! on_every_backend {
    ($($test:ident),* $(,)?) => {
        on_every_backend! { $($test)*; sqlite: Sqlite; etcd: Etcd; postgres: Postgres; redis: Redis; }
    };
    ($($test:ident)*; $name:ident: $backend:ident; $($rest:tt)*) => {
        mod $name {
            $(
                #[test]
                fn $test() {
                    super::$test(crate::world::Backend::$backend);
                }
            )*
        }
        on_every_backend! { $($test)*; $($rest)* }
    };
    ($($test:ident)*;) => {};
}

on_every_backend! {
    one_that_is_killed_takes_its_command_along,
    one_that_is_stopped_loses_command_and_lock_and_exits_with_76_when_it_wakes,
    the_lock_of_one_that_is_killed_is_free_long_before_its_ttl,
    a_command_that_runs_for_many_ttls_keeps_its_lock,
}

#[test]
fn a_postgres_that_dies_ends_the_command_at_once() {
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
