//! The primitives under the checker.

pub(crate) mod oneshot;
pub(crate) mod time;

use std::future::Future;
use std::ops::Deref;
use std::thread;

use shuttle::sync::atomic::{AtomicBool, Ordering};
pub(crate) use shuttle::sync::{Mutex, MutexGuard};
pub(crate) use tokio::sync::SemaphorePermit;

pub(crate) mod atomic {
    pub(crate) use shuttle::sync::atomic::{AtomicU8, AtomicU64, Ordering, fence};
}

pub(crate) type CancellationToken = Visible<tokio_util::sync::CancellationToken>;
pub(crate) type Notify = Visible<tokio::sync::Notify>;
pub(crate) type Semaphore = Visible<tokio::sync::Semaphore>;
pub(crate) type TaskTracker = Visible<tokio_util::task::TaskTracker>;

/// A primitive of tokio, which runs under any executor. The checker may run another task before each use of it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Visible<T>(T);

impl<T> Deref for Visible<T> {
    type Target = T;

    fn deref(&self) -> &T {
        scheduling_point();
        &self.0
    }
}

impl Notify {
    pub(crate) fn new() -> Self {
        Self::default()
    }
}

impl Semaphore {
    pub(crate) fn new(permits: usize) -> Self {
        Self(tokio::sync::Semaphore::new(permits))
    }
}

impl TaskTracker {
    pub(crate) fn new() -> Self {
        Self::default()
    }
}

/// Lets the checker run another task first.
pub(crate) fn scheduling_point() {
    // Destructors also come here while a failed execution is torn down.
    if is_running() && !thread::panicking() {
        // The checker schedules before each access to an atomic of its own.
        AtomicBool::new(false).load(Ordering::SeqCst);
    }
}

/// Whether the caller is a task of the checker.
pub(crate) fn is_running() -> bool {
    shuttle::current::try_get_current_task().is_some()
}

/// Starts a task of the checker, which an execution does not wait for.
pub(crate) fn spawn(work: impl Future<Output = ()> + Send + 'static) {
    drop(shuttle::future::spawn(work));
}
