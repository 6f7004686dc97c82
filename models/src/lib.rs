//! Exhaustive models of the protocols of fencelock.
//!
//! Each module has one protocol. A model visits *every* state that is reachable within its bounds. Each model has planted bugs; the
//! tests require that each of them violates a property.

pub mod etcd_queue;
pub mod local_runs;
pub mod postgres_epoch;
pub mod redlock;
