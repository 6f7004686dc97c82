//! The Redis backend on servers of the tests' own.
//!
//! What is in `extended` takes several servers or their clocks, many clients, or more time.

#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a test may fail")]

mod bad_input;
mod contract;
mod extended;
mod fence;
mod full_server;
mod kills;
mod reservations;
mod scripts;
mod server;
mod tokens;
mod warnings;
