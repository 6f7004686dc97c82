//! The Redis backend on servers of the tests' own: what the suite, which has cases for every backend, does not show.
//!
//! What is in `extended` takes several servers or their clocks, many clients, or more time.

#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a test may fail")]

mod connections;
mod costs;
mod extended;
mod fence;
mod refusals;
mod rights;
mod scripts;
mod server;
#[cfg(feature = "tls")]
mod tls;
mod tokens;
mod warnings;
