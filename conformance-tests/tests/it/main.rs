//! What stands beside the cases: the proxy that they put before a server, and the servers themselves.

#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a test may fail")]

mod extended;
mod faults;
