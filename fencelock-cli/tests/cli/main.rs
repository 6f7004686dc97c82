//! The `fencelock` command as its users meet it.

#![allow(clippy::unwrap_used, reason = "clippy sees no tests in the helpers of a test")]

#[macro_use]
mod backends;

mod at_least;
mod bad_input;
#[cfg(target_os = "linux")]
mod containers;
#[cfg(feature = "etcd")]
mod etcd;
mod exit_codes;
mod inspection;
mod losing;
#[cfg(target_os = "linux")]
mod overlay;
#[cfg(feature = "postgres")]
mod postgres;
mod read_only;
#[cfg(feature = "redis")]
mod redis;
#[cfg(feature = "postgres")]
mod schema;
#[cfg(feature = "redis")]
mod sentinel;
#[cfg(feature = "redis")]
mod server;
mod session;
mod signals;
mod surroundings;
mod terminal;
#[cfg(feature = "torture")]
mod torture;
mod turns;
mod world;
