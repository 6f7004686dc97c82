//! Where a client's tasks run.

use std::fmt;
use std::future::Future;
use std::sync::Arc;

use tokio::runtime::Handle;

use crate::LockError;
use crate::process::Process;

/// Runs a client's tasks: on the runtime that the user chose, or on the [background thread](crate::background()).
///
/// A backend that keeps connections has one of these, and opens every connection in a task that it [spawns](Self::spawn). Cloning is cheap.
#[derive(Clone)]
pub struct Executor {
    runtime: Option<Handle>,
    process: Arc<Process>,
}

impl Default for Executor {
    fn default() -> Self {
        Self::new(None)
    }
}

impl Executor {
    /// Runs tasks on `runtime`, or on the background thread if it is `None`.
    #[must_use]
    pub fn new(runtime: Option<Handle>) -> Self {
        Self {
            runtime,
            process: Process::current(),
        }
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
        match self.handle()?.spawn(work).await {
            Ok(done) => Ok(done),
            Err(error) if error.is_panic() => Err(panicked(operation)),
            Err(_) => Err(self.dropped(operation)),
        }
    }

    /// Why a task was dropped before its end: [`LockError::Configuration`] if there is a chosen runtime, which has ended then.
    #[must_use]
    pub fn dropped(&self, operation: &'static str) -> LockError {
        match self.runtime {
            Some(_) => LockError::configuration(format!(
                "{operation}: the runtime that this client was given has ended; connect a new client"
            )),
            None => panicked(operation),
        }
    }

    /// The runtime of the tasks.
    pub(crate) fn handle(&self) -> Result<Handle, LockError> {
        match &self.runtime {
            Some(runtime) => Ok(runtime.clone()),
            None => self.process.background(),
        }
    }

    /// Whether the caller runs where [`spawn`](Self::spawn) would start a task.
    #[must_use]
    pub fn is_current(&self) -> bool {
        let Ok(here) = Handle::try_current() else {
            return false;
        };
        let there = self.runtime.clone().or_else(|| self.process.started());
        there.is_some_and(|there| there.id() == here.id())
    }
}

fn panicked(operation: &'static str) -> LockError {
    LockError::unavailable(operation, "the task panicked; please report it".to_owned())
}

impl fmt::Debug for Executor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.runtime {
            Some(_) => "Executor::Chosen",
            None => "Executor::Background",
        })
    }
}
