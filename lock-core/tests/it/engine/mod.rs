//! `Locks` over a scripted server, in paused time.

mod acquiring;
mod linger;
mod releasing;
mod renewing;
mod runs;
pub(crate) mod scripted;
mod trouble;
mod waiters;
