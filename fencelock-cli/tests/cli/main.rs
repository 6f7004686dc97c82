//! The `fencelock` command as its users meet it.

#![allow(clippy::unwrap_used, reason = "clippy sees no tests in the helpers of a test")]

mod bad_input;
mod exit_codes;
mod inspection;
mod losing;
mod session;
mod signals;
mod surroundings;
mod terminal;
mod turns;
mod world;
