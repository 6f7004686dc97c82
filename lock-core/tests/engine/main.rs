//! `Locks` over a scripted server, in paused time.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test that cannot go on has failed"
)]

mod acquiring;
mod forwarding;
mod model;
mod queueing;
mod releasing;
mod renewing;
mod scripted;
mod trouble;
