//! What all clients of a process share: the background thread, the news of revocations, and the end of the process.
//!
//! A forked child has a state of its own from its first client on. That of its parent may be locked there for ever, and is not touched.

use std::process;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use arc_swap::ArcSwapOption;
use tokio::runtime::{Builder, Handle};
use tokio::sync::{broadcast, oneshot};

use crate::LockError;

/// The standard library locks a mutex while a thread starts, and tokio (with its feature `signal`) a `Once` while the first runtime is
/// built: in a child that was forked in the middle of that, no thread comes up any more.
const LONGEST_START: Duration = Duration::from_secs(5);

/// Longest delay of the end of the process, as when the server answers nothing.
const LONGEST_END: Duration = Duration::from_millis(500);

const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// A poll that took longer counts as this: the machine or the process stood still, and no release went on either.
const LONGEST_POLL: Duration = Duration::from_millis(20);

/// Not behind a mutex: in a forked child the thread that held it might not exist.
static CURRENT: ArcSwapOption<Process> = ArcSwapOption::const_empty();

/// Tells leases and grants apart within a process: the number of the lease, and that of the grant, or zero for the lease itself. The holds of
/// a grant, of which there is one at a time, have its serial.
pub(crate) type Serial = (u64, u64);

pub(crate) struct Process {
    id: u32,
    background: OnceLock<Background>,
    /// What is revoked. Revocations are rare, so all clients are told of each, and look whether they have such a hold. A client that is late by
    /// more than the channel keeps looks at everything that it holds.
    pub(crate) revocations: broadcast::Sender<Serial>,
    /// How many [`ExitDelay`]s there are.
    delays: AtomicUsize,
    clients: Mutex<Vec<Weak<dyn AtExit>>>,
}

struct Background {
    handle: Handle,
    /// The thread ends when this is dropped.
    _keep: oneshot::Sender<()>,
}

/// What a client does at the end of its process, on the background thread.
pub(crate) trait AtExit: Send + Sync {
    fn at_exit(&self);
}

impl Process {
    /// The state of this process.
    pub(crate) fn current() -> Arc<Self> {
        if let Some(found) = Self::existing() {
            return found;
        }
        let new = Arc::new(Self {
            id: process::id(),
            background: OnceLock::new(),
            revocations: broadcast::Sender::new(256),
            delays: AtomicUsize::new(0),
            clients: Mutex::default(),
        });
        // Another thread may have been faster.
        let before = CURRENT.rcu(|found| {
            let other = found.as_ref().filter(|other| other.is_current());
            Some(Arc::clone(other.unwrap_or(&new)))
        });
        if let Some(parents) = before.filter(|before| !before.is_current()) {
            // To drop it would lock it.
            std::mem::forget(parents);
        }
        Self::existing().unwrap_or(new)
    }

    /// The same, if there is one.
    pub(crate) fn existing() -> Option<Arc<Self>> {
        CURRENT.load_full().filter(|found| found.is_current())
    }

    /// Whether the caller runs in it, and not in a forked child. A system call.
    pub(crate) fn is_current(&self) -> bool {
        self.id == process::id()
    }

    fn background(&self) -> Result<Handle, LockError> {
        let started = match self.background.get() {
            Some(started) => started,
            // If another caller was faster, that one's thread is used, and this one ends.
            None => {
                let new = Background::start()?;
                self.background.get_or_init(|| new)
            }
        };
        Ok(started.handle.clone())
    }

    /// Has [`AtExit::at_exit`] called for that client.
    pub(crate) fn at_exit(&self, client: Weak<dyn AtExit>) {
        // Nothing here panics while holding the mutex.
        let mut clients = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
        clients.retain(|client| client.strong_count() > 0);
        clients.push(client);
    }
}

impl Background {
    fn start() -> Result<Self, LockError> {
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
        let handle = told.recv_timeout(LONGEST_START).map_err(|_| {
            LockError::unavailable(
                "starting the background thread",
                format!(
                    "it has not come up within {LONGEST_START:?}; if this process was forked while its parent started a thread, \
                     the standard library or tokio is locked here for ever: fork at another moment"
                ),
            )
        })?;
        Ok(Self {
            handle: handle.map_err(failed)?,
            _keep: keep,
        })
    }
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
    Process::current().background()
}

/// The background thread's runtime, if this process has started it.
pub(crate) fn started() -> Option<Handle> {
    Some(Process::existing()?.background.get()?.handle.clone())
}

/// Blocks the thread until `work` has ended. Panics in a task of a runtime of tokio.
#[track_caller]
pub(crate) fn block_on<T>(work: impl Future<Output = T>) -> Result<T, LockError> {
    Ok(background()?.block_on(work))
}

/// Delays the end of the process while it lives, for at most half a second.
///
/// A process ends when `main` returns or when `std::process::exit` is called. Without this, the background thread would end in the
/// middle of a release. A process that is killed or aborted ends at once.
///
/// The core has one for each release. A backend has one for what else it frees in the background when its client is dropped.
#[must_use = "dropping it ends the delay"]
pub struct ExitDelay(Arc<Process>);

impl ExitDelay {
    /// Delays the end of the process from now on.
    pub fn begin() -> Self {
        Self::of(&Process::current())
    }

    pub(crate) fn of(process: &Arc<Process>) -> Self {
        process.delays.fetch_add(1, Ordering::AcqRel);
        Self(Arc::clone(process))
    }
}

impl Drop for ExitDelay {
    fn drop(&mut self) {
        self.0.delays.fetch_sub(1, Ordering::AcqRel);
    }
}

impl std::fmt::Debug for ExitDelay {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ExitDelay").finish_non_exhaustive()
    }
}

/// Runs after `main` or in `exit`, while other threads still run. Thread-local storage may have been destroyed, so it uses none: it polls.
#[dtor::dtor(unsafe)]
fn wait_for_releases() {
    // A forked child that has no client of its own waits for nothing.
    let Some(process) = Process::existing() else { return };
    if let Some(background) = process.background.get() {
        let delay = ExitDelay::of(&process);
        background.handle.spawn(async move {
            let clients = delay.0.clients.lock().unwrap_or_else(PoisonError::into_inner).clone();
            clients
                .iter()
                .filter_map(Weak::upgrade)
                .for_each(|client| client.at_exit());
        });
    }
    let mut waited = Duration::ZERO;
    while process.delays.load(Ordering::Acquire) > 0 && waited < LONGEST_END {
        let slept = Instant::now();
        thread::sleep(POLL_INTERVAL);
        waited += slept.elapsed().min(LONGEST_POLL);
    }
}
