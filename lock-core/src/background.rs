//! The thread that keeps locks alive.

use std::sync::{Mutex, PoisonError};
use std::thread;

use tokio::runtime::{Builder, Handle, Runtime};

use crate::LockError;
use crate::process::PerProcess;

type Started = Mutex<Option<Handle>>;

/// A forked child has none of its parent's threads, and starts its own.
static STARTED: PerProcess<Started> = PerProcess::new();

/// The runtime on which locks are kept alive, started at the first call and shared by all clients of the process. A forked child
/// gets one of its own.
///
/// It is one thread of its own: a user's runtime that is blocked, or that ends, neither delays a renewal nor takes a
/// shared connection with it. Backends spawn here whatever a lease depends on.
///
/// # Errors
///
/// [`LockError::Unavailable`] if the system refuses another thread; the next call tries again.
pub fn background() -> Result<Handle, LockError> {
    STARTED.with(start)
}

/// The same for a caller that knows the process it is in.
pub(crate) fn background_in(process: u32) -> Result<Handle, LockError> {
    match started_in(process) {
        Some(handle) => Ok(handle),
        None => background(),
    }
}

fn start(started: &Started) -> Result<Handle, LockError> {
    let mut started = started.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(handle) = &*started {
        return Ok(handle.clone());
    }
    let failed = |e| LockError::failed("starting the background thread", e);
    let runtime = Builder::new_current_thread().enable_all().build().map_err(failed)?;
    let handle = runtime.handle().clone();
    let runtime = DroppedAnywhere(Some(runtime));
    thread::Builder::new()
        .name("fencelock".to_owned())
        .spawn(move || runtime.run())
        .map_err(failed)?;
    *started = Some(handle.clone());
    Ok(handle)
}

/// A runtime without a thread so far. If the system refuses the thread, the runtime is dropped with what the thread was to run: on
/// the caller's thread, where a plain [`Runtime`] panics if the caller is on a runtime itself.
struct DroppedAnywhere(Option<Runtime>);

impl DroppedAnywhere {
    fn run(mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.block_on(std::future::pending::<()>());
        }
    }
}

impl Drop for DroppedAnywhere {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

/// The runtime of that process, which is this one, unless it has not been started.
pub(crate) fn started_in(process: u32) -> Option<Handle> {
    let handle = |started: &Started| started.lock().unwrap_or_else(PoisonError::into_inner).clone();
    STARTED.peek(process, handle).flatten()
}
