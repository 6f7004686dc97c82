//! The tests of this crate, in one program. What does not run with every change is in [`extended`].

#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a test may fail")]

mod abandoned;
mod bad_input;
mod connection;
mod extended;
mod fence;
mod inquiry;
mod planted;
mod read_only;
mod reserve;
mod server;
#[cfg(feature = "tls")]
mod tls;
mod tokens;
mod transaction;
mod waiting;
