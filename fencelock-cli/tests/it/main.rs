//! The `fencelock` command as its users meet it: on SQLite, and once on each server. What else is shown is in `extended`.

#![allow(clippy::unwrap_used, reason = "clippy sees no tests in the helpers of a test")]

mod certificates;
mod documentation;
mod ending;
mod extended;
mod input;
mod locks;
mod modes;
mod run;
mod server;
mod session;
mod signals;
mod smoke;
mod terminal;
mod world;
