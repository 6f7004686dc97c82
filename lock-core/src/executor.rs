//! Where a client's tasks run.

use std::fmt;
use std::future::Future;
use std::sync::OnceLock;

use tokio::runtime::Handle;
use tokio::task::JoinError;
use tokio_util::task::AbortOnDropHandle;

use crate::LockError;
use crate::process::{background, started};

/// Runs a client's tasks: on the runtime that the user chose, or on the [background thread](crate::background()).
///
/// A backend that keeps connections has one of these, and opens every connection in a task that it [spawns](Self::spawn). Cloning is cheap.
#[derive(Clone, Default)]
pub struct Executor {
    /// Empty until the background thread is needed.
    handle: OnceLock<Handle>,
    is_chosen: bool,
}

impl Executor {
    /// Runs tasks on `runtime`, or on the background thread if it is `None`.
    #[must_use]
    pub fn new(runtime: Option<Handle>) -> Self {
        let is_chosen = runtime.is_some();
        let handle = runtime.map(OnceLock::from).unwrap_or_default();
        Self { handle, is_chosen }
    }

    /// Starts a task. Callable from any thread. If the chosen runtime has ended, the task is dropped.
    ///
    /// # Errors
    ///
    /// [`LockError::Unavailable`] if the system refuses to start the background thread.
    pub fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) -> Result<(), LockError> {
        self.handle()?.spawn(work);
        Ok(())
    }

    /// Starts a task and waits for its result. Dropping the future does not stop the task.
    ///
    /// # Errors
    ///
    /// [`LockError::Unavailable`] if the task panicked, or as [`spawn`](Self::spawn). [`LockError::Configuration`] if the chosen runtime ended
    /// before the task did.
    pub async fn run<T: Send + 'static>(
        &self,
        operation: &'static str,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Result<T, LockError> {
        self.joined(operation, self.handle()?.spawn(work).await)
    }

    /// The same, for a task that ends when the future is dropped.
    pub(crate) async fn run_for_caller<T: Send + 'static>(
        &self,
        operation: &'static str,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Result<T, LockError> {
        self.joined(operation, AbortOnDropHandle::new(self.handle()?.spawn(work)).await)
    }

    fn joined<T>(&self, operation: &'static str, done: Result<T, JoinError>) -> Result<T, LockError> {
        done.map_err(|error| match error.is_panic() {
            true => panicked(operation),
            false => self.dropped(operation),
        })
    }

    /// Why a task was dropped before its end: [`LockError::Configuration`] if there is a chosen runtime, which has ended then.
    #[must_use]
    pub fn dropped(&self, operation: &'static str) -> LockError {
        if !self.is_chosen {
            return panicked(operation);
        }
        LockError::configuration(format!(
            "{operation}: the runtime that this client was given has ended; connect a new client"
        ))
    }

    /// The runtime of the tasks.
    pub(crate) fn handle(&self) -> Result<&Handle, LockError> {
        match self.handle.get() {
            Some(handle) => Ok(handle),
            None => background().map(|started| self.handle.get_or_init(|| started)),
        }
    }

    /// Whether the caller runs where [`spawn`](Self::spawn) would start a task.
    #[must_use]
    pub fn is_current(&self) -> bool {
        let there = self.handle.get().cloned().or_else(started);
        let here = Handle::try_current();
        here.is_ok_and(|here| there.is_some_and(|there| there.id() == here.id()))
    }
}

fn panicked(operation: &'static str) -> LockError {
    LockError::unavailable(operation, "the task panicked; please report it".to_owned())
}

impl fmt::Debug for Executor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_chosen {
            "Executor::Chosen"
        } else {
            "Executor::Background"
        })
    }
}
