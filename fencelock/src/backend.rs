//! For authors of backends, and of what wraps one: the trait and what passes through it.
//!
//! [`Locks::new`](crate::Locks::new) takes anything that implements [`DistributedLock`]. Prove yours with the
//! `conformance-tests` crate.

pub use lock_core::{
    Attempt, Busy, Claim, DistributedLock, Executor, ExitDelay, Grant, Lease, LeaseId, Outage, Outages, Released,
    Renewal, Revocation, Revoker, Stamp, Wait, async_trait, background,
};
