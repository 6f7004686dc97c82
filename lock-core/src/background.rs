//! The thread that keeps locks alive.

use std::process;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use arc_swap::ArcSwapOption;
use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;

use crate::LockError;

/// The standard library locks a mutex while a thread starts, and tokio (with its feature `signal`) a `Once` while the first runtime is
/// built: in a child that was forked in the middle of that, no thread comes up any more.
const LONGEST_START: Duration = Duration::from_secs(5);

/// Not behind a mutex: in a forked child the thread that held it might not exist.
static STARTED: ArcSwapOption<Background> = ArcSwapOption::const_empty();

struct Background {
    process: u32,
    handle: Handle,
    /// The thread ends when this is dropped.
    _keep: oneshot::Sender<()>,
}

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
    match started() {
        Some(handle) => Ok(handle),
        None => Ok(share(start()?)),
    }
}

/// The background thread's runtime, if this process has started it.
pub(crate) fn started() -> Option<Handle> {
    let started = STARTED.load();
    let of_this_process = started.as_ref().filter(|started| started.process == process::id());
    of_this_process.map(|started| started.handle.clone())
}

fn start() -> Result<Background, LockError> {
    let failed = |e| LockError::failed("starting the background thread", e);
    let (tell, told) = mpsc::sync_channel(1);
    let (keep, end) = oneshot::channel();
    thread::Builder::new()
        .name("fencelock".to_owned())
        .spawn(move || match Builder::new_current_thread().enable_all().build() {
            Ok(runtime) if tell.send(Ok(runtime.handle().clone())).is_ok() => {
                let _ = runtime.block_on(end);
            }
            // The caller waits no more.
            Ok(_) => {}
            Err(error) => drop(tell.send(Err(error))),
        })
        .map_err(failed)?;
    let Ok(handle) = told.recv_timeout(LONGEST_START) else {
        return Err(LockError::unavailable(
            "starting the background thread",
            format!(
                "it has not come up within {LONGEST_START:?}; if this process was forked while its parent started a thread, the \
                 standard library or tokio is locked here for ever: fork at another moment"
            ),
        ));
    };
    Ok(Background {
        process: process::id(),
        handle: handle.map_err(failed)?,
        _keep: keep,
    })
}

/// Shares the thread with the whole process. If another caller was faster, that one's is used, and this one ends.
fn share(new: Background) -> Handle {
    let new = Arc::new(new);
    STARTED.rcu(|found| {
        let other = found.as_ref().filter(|other| other.process == new.process);
        Some(Arc::clone(other.unwrap_or(&new)))
    });
    // It is never taken out again.
    started().unwrap_or_else(|| new.handle.clone())
}

/// Blocks the thread until `work` has ended. Panics in a task of a runtime of tokio.
#[track_caller]
pub(crate) fn block_on<T>(work: impl Future<Output = T>) -> Result<T, LockError> {
    Ok(background()?.block_on(work))
}
