//! The backend on real servers of etcd: what the suite of all backends does not show.
//!
//! What stands in `extended` takes longer, or needs a cluster.

#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a test may fail")]

mod again;
mod bad_input;
mod contract;
mod extended;
mod late;
mod reservations;
mod server;
#[cfg(feature = "tls")]
mod tls;
mod tokens;
