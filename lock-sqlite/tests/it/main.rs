//! The backend on real files: what the suite of all backends does not show.
//!
//! What stands in `extended` takes longer, or needs what not every machine has.

#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a test may fail")]

mod bad_input;
mod contract;
mod extended;
mod file;
mod read_only;
mod replaced;
mod tokens;
mod waiting;
