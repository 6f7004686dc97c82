//! `Locks` over a scripted server, in paused time.

mod acquiring;
mod forwarding;
mod linger;
mod model;
mod releasing;
mod renewing;
mod runs;
pub(crate) mod scripted;
mod trouble;
mod waiters;
