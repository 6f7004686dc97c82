//! For whoever writes a backend, or wraps one: the trait and what passes through it.
//!
//! [`Locks::new`](crate::Locks::new) takes anything that implements [`DistributedLock`]. Prove yours with the
//! `conformance-tests` crate.

pub use lock_core::{
    Attempt, Busy, BusySignal, ChangeSender, Changes, Claim, DistributedLock, Executor, ExitDelay, Grant, HandOver,
    Lease, LeaseId, Outage, Outages, Released, Renewal, Revocation, Revoker, Stamp, async_trait, background,
};
