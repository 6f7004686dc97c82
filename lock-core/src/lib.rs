//! The heart of fencelock: distributed locks with fencing tokens, over any backend.
//!
//! Users depend on the `fencelock` crate, which re-exports what they need from here. This crate is for authors of
//! backends: implement [`DistributedLock`] and prove it with the `conformance-tests` crate.
//!
//! [`Locks`] turns a backend into a client: it queues the requests of one process, renews what is held, notices what is
//! lost, and cleans up what was abandoned. [`MemoryLock`] is the backend for tests and single processes. [`fence`]
//! is the resource's side.

pub mod fence;

mod acquire;
mod acquire_options;
mod backend;
mod call;
mod capabilities;
mod claim;
mod client;
mod clock;
mod error;
mod executor;
mod grant;
mod guard;
mod held;
mod holder;
mod lead;
mod lease;
mod lock_all;
mod locks;
mod loss;
mod memory;
mod name;
mod name_state;
mod name_task;
mod names;
mod observe;
mod options;
mod outages;
mod owner;
mod process;
mod queue;
mod release;
mod renew;
mod request;
mod run_once_per;
mod semaphore;
mod server_info;
mod stats;
mod token;
mod wait;
mod watchdog;

pub use acquire_options::Renew;
pub use async_trait::async_trait;
pub use backend::DistributedLock;
pub use capabilities::{Capabilities, Scope};
pub use claim::{Claim, Mode};
pub use clock::{Clock, ManualClock, Stamp};
pub use error::{ErrorInfo, LockError, Source};
pub use executor::Executor;
pub use grant::{Attempt, Busy, Grant, Released, Renewal};
pub use guard::{LockGuard, ReleaseOutcome};
pub use holder::Holder;
pub use lead::Term;
pub use lease::{Lease, LeaseId};
pub use lock_all::{LockAllRequest, LockGuards};
pub use locks::Locks;
pub use loss::{LossReason, LossSignal, Revocation, Revoker};
pub use memory::MemoryLock;
pub use name::{InvalidName, LockName};
pub use observe::{Leadership, Observation};
pub use options::Options;
pub use outages::{Outage, Outages};
pub use owner::{OwnerId, ParseOwnerIdError};
pub use process::{ExitDelay, background};
pub use request::LockRequest;
pub use semaphore::{Permit, SemaphoreRequest};
pub use server_info::ServerInfo;
pub use stats::Stats;
pub use token::{FencingToken, InvalidToken};
pub use wait::Wait;
