//! The `fencelock` command as its users meet it: on SQLite, and once on each server. What else is shown is in `extended`.

#![allow(clippy::unwrap_used, reason = "clippy sees no tests in the helpers of a test")]

#[cfg(all(feature = "etcd", feature = "postgres", feature = "redis"))]
mod certificates;
mod documentation;
mod ending;
mod extended;
mod input;
mod locks;
mod modes;
mod run;
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
mod terminal;
mod world;
