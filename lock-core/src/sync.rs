//! Where synchronization comes from.

pub(crate) use std::sync::{Mutex, MutexGuard, atomic};
pub(crate) use tokio::sync::{Notify, Semaphore, SemaphorePermit, oneshot};
pub(crate) use tokio::time;
pub(crate) use tokio_util::sync::CancellationToken;
pub(crate) use tokio_util::task::TaskTracker;
