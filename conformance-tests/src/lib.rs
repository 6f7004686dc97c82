//! What every fencelock backend must show, as a suite that anyone's backend can run.
//!
//! Write a [`Harness`] that makes clients of your backend, and call [`run`] from a test with `harness = false`:
//!
//! ```no_run
//! use std::process::ExitCode;
//! use std::sync::{Arc, Mutex};
//!
//! use async_trait::async_trait;
//! use conformance_tests::{Harness, Namespace};
//! use lock_core::{DistributedLock, LockError, MemoryLock};
//!
//! #[derive(Default)]
//! struct Memory(Mutex<std::collections::HashMap<String, MemoryLock>>);
//!
//! #[async_trait]
//! impl Harness for Memory {
//!     fn name(&self) -> &str {
//!         "memory"
//!     }
//!
//!     async fn client(&self, namespace: &Namespace) -> Result<Arc<dyn DistributedLock>, LockError> {
//!         let mut stores = self.0.lock().unwrap();
//!         Ok(Arc::new(stores.entry(namespace.name().to_owned()).or_default().client()))
//!     }
//! }
//!
//! fn main() -> ExitCode {
//!     conformance_tests::run(Memory::default())
//! }
//! ```
//!
//! Every case gets a fresh [`Namespace`], a runtime of its own and a time limit, and at its end nothing may be left on
//! the server. A case that the backend's capabilities or the harness's means rule out is *reported* as not applicable,
//! with its reason, and counted. Besides the cases, the run plants bugs into the backend, one after the other, and
//! passes only if a case fails on each.
//!
//! Where a step of the backend takes several requests, [`Harness::committing_request`] tells which of them counts;
//! where a server also says what answers nothing, [`Harness::is_reply`].
//!
//! The arguments are those of every Rust test: a filter, `--skip`, `--exact`, `--list`, `--test-threads`.
//!
//! The feature `faults` has a fault-injecting TCP proxy, and with it one more group of cases, `network`, for harnesses that say
//! where their server is.
//!
//! A history of locks, from wherever it is, is judged by the [`oracle`].

mod admission;
#[cfg(feature = "faults")]
mod background;
mod broken;
mod case;
mod cases;
mod child;
#[cfg(all(test, feature = "faults"))]
mod counts;
#[cfg(feature = "faults")]
pub mod faults;
mod harness;
mod history;
mod hunt;
mod link;
pub mod oracle;
mod outcome;
#[cfg(feature = "faults")]
mod port;
mod report;
mod row;
mod run_case;
mod skips;
mod suite;
mod summary;
mod writers;

pub use harness::{Fault, Harness, Injection, Namespace, Resource};
pub use suite::{Suite, run, run_without_bugs};

// Compiles and runs what authors of backends are shown.
#[cfg(doctest)]
#[doc = include_str!("../../docs/writing-a-backend.md")]
struct WritingABackend;
