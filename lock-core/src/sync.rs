//! Mutexes, atomics, channels, timers and other primitives that the tasks of a client share.
//!
//! They are those of std and tokio. Tests that are compiled with `--cfg shuttle` use those in `checked` instead: there the checker decides
//! at each use which task runs next.

#[cfg(all(test, shuttle))]
pub(crate) mod checked;

#[cfg(all(test, shuttle))]
pub(crate) use checked::{
    CancellationToken, Mutex, MutexGuard, Notify, Semaphore, SemaphorePermit, TaskTracker, atomic, oneshot, time,
};

#[cfg(not(all(test, shuttle)))]
pub(crate) use {
    std::sync::{Mutex, MutexGuard, atomic},
    tokio::sync::{Notify, Semaphore, SemaphorePermit, oneshot},
    tokio::time,
    tokio_util::sync::CancellationToken,
    tokio_util::task::TaskTracker,
};
