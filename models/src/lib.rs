//! Exhaustive models of the protocols of fencelock, and a check of recorded traces against them.
//!
//! Each module has one protocol. A model visits *every* state that is reachable within its bounds. Each model has planted bugs; the
//! tests require that each of them violates a property.
//!
//! [`redis_queue`] also checks traces: the transition function of the server is the same code in the model and in the check, so a trace
//! of a real server shows whether that server does what the model assumes.

pub mod etcd_queue;
pub mod guard_deadline;
pub mod local_runs;
pub mod postgres_epoch;
pub mod redis_queue;
pub mod redlock;
