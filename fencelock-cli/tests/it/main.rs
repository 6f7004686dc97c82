//! The `fencelock` command as its users meet it: on SQLite, and once on each server. What else is shown is in `extended`.

#![allow(clippy::unwrap_used, reason = "clippy sees no tests in the helpers of a test")]

#[macro_use]
mod backends;

mod at_least;
mod bad_input;
#[cfg(all(feature = "etcd", feature = "postgres", feature = "redis"))]
mod certificates;
mod documentation;
mod exit_codes;
mod extended;
mod inspection;
mod losing;
mod read_only;
#[cfg(feature = "postgres")]
mod schema;
#[cfg(any(feature = "etcd", feature = "postgres", feature = "redis"))]
#[cfg_attr(
    not(all(feature = "etcd", feature = "postgres", feature = "redis")),
    allow(dead_code, reason = "each kind of server needs some of it")
)]
mod server;
mod session;
mod signals;
#[cfg(any(feature = "etcd", feature = "postgres", feature = "redis"))]
mod smoke;
mod surroundings;
mod terminal;
mod turns;
mod world;

mod on_sqlite {
    tests_of_every_backend!(Sqlite);
}
