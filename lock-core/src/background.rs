//! The thread that keeps locks alive.

use std::sync::{PoisonError, TryLockError, mpsc};
use std::thread;
use std::time::Duration;

use tokio::runtime::{Builder, Handle};

use crate::LockError;
use crate::process::Process;

/// The standard library locks a mutex while a thread starts, and tokio (with its feature `signal`) a `Once` while the first runtime is
/// built: in a child that was forked in the middle of that, no thread comes up any more.
const LONGEST_START: Duration = Duration::from_secs(5);

/// The runtime on which locks are kept alive, started at the first call and shared by all clients of the process. A forked child
/// gets one of its own.
///
/// It is one thread of its own: a user's runtime that is blocked, or that ends, neither delays a renewal nor takes a
/// shared connection with it. Backends spawn here whatever a lease depends on.
///
/// # Errors
///
/// [`LockError::Unavailable`] if the system refuses another thread, or tokio another runtime; the next call tries again.
pub fn background() -> Result<Handle, LockError> {
    Process::current().background()
}

/// Blocks the thread until `work` has ended. Panics in a task of a runtime of tokio.
#[track_caller]
pub(crate) fn block_on<T>(work: impl Future<Output = T>) -> Result<T, LockError> {
    Ok(background()?.block_on(work))
}

impl Process {
    /// The same of this process, for a caller that has made sure that it is this one.
    pub(crate) fn background(&self) -> Result<Handle, LockError> {
        let mut started = self.background.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(handle) = &*started {
            return Ok(handle.clone());
        }
        let failed = |e| LockError::failed("starting the background thread", e);
        let (tell, told) = mpsc::sync_channel(1);
        thread::Builder::new()
            .name("fencelock".to_owned())
            .spawn(move || match Builder::new_current_thread().enable_all().build() {
                Ok(runtime) if tell.send(Ok(runtime.handle().clone())).is_ok() => {
                    runtime.block_on(std::future::pending::<()>());
                }
                // Nobody waits for it any more.
                Ok(_) => {}
                Err(error) => drop(tell.send(Err(error))),
            })
            .map_err(failed)?;
        let handle = match told.recv_timeout(LONGEST_START) {
            Ok(built) => built.map_err(failed)?,
            Err(_) => {
                return Err(LockError::unavailable(
                    "starting the background thread",
                    format!(
                        "it has not come up within {LONGEST_START:?}; if this process was forked while its parent started a thread, the \
                         standard library or tokio is locked here for ever: fork at another moment"
                    ),
                ));
            }
        };
        *started = Some(handle.clone());
        Ok(handle)
    }

    /// The background thread's runtime, unless it has not been started.
    pub(crate) fn started(&self) -> Option<Handle> {
        // While a thread has it locked, the runtime is being started and runs nothing; the end of the process shall not wait for that.
        match self.background.try_lock() {
            Ok(started) => started.clone(),
            Err(TryLockError::Poisoned(started)) => started.into_inner().clone(),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}
