//! `Locks` over a scripted server, in paused time.

mod acquiring;
mod linger;
mod releasing;
mod renewing;
mod rough;
mod runs;
pub(crate) mod scripted;
mod waiters;
