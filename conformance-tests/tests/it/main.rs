//! What stands beside the cases: the proxy that they put before a server, the servers themselves, and the pages of the repository.

#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a test may fail")]

mod documentation;
mod extended;
mod faults;
