//! The end of the process waits for the releases that are under way.

use std::process;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use arc_swap::ArcSwapOption;

use crate::background::started;

/// Longest delay of the end of the process, as when the server answers nothing.
const LONGEST: Duration = Duration::from_millis(500);

const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// A poll that took longer counts as this: the machine or the process stood still, and no release went on either.
const LONGEST_POLL: Duration = Duration::from_millis(20);

/// How many [`ExitDelay`]s there are, and the process that has made them.
static DELAYS: AtomicUsize = AtomicUsize::new(0);
static PROCESS: AtomicU32 = AtomicU32::new(0);
/// Clients that have something to do at the end. Not behind a mutex, which a forked child could find locked.
static CLIENTS: ArcSwapOption<Vec<Weak<dyn AtExit>>> = ArcSwapOption::const_empty();

/// What a client does at the end of its process, on the background thread.
pub(crate) trait AtExit: Send + Sync {
    fn at_exit(&self);
}

/// Delays the end of the process while it lives, for at most half a second.
///
/// A process ends when `main` returns or when `std::process::exit` is called. Without this, the background thread would end in the
/// middle of a release. A process that is killed or aborted ends at once.
///
/// The core has one for each release. A backend has one for what else it frees in the background when its client is dropped.
#[derive(Debug)]
pub struct ExitDelay(());

impl ExitDelay {
    /// Delays the end of the process from now on.
    #[must_use]
    pub fn begin() -> Self {
        belongs_to(process::id());
        Self::of_client()
    }

    /// The same for a client, which has told its process when it was made.
    pub(crate) fn of_client() -> Self {
        DELAYS.fetch_add(1, Ordering::AcqRel);
        Self(())
    }
}

impl Drop for ExitDelay {
    fn drop(&mut self) {
        DELAYS.fetch_sub(1, Ordering::AcqRel);
    }
}

/// What is counted belongs to this process. What a forked child inherits does not delay its end, unless it makes a client of its own.
pub(crate) fn belongs_to(process: u32) {
    PROCESS.store(process, Ordering::Release);
}

/// Has [`AtExit::at_exit`] called for that client.
pub(crate) fn at_exit(client: &Weak<dyn AtExit>) {
    CLIENTS.rcu(|clients| {
        let clients = clients.iter().flat_map(|clients| clients.iter());
        let alive = clients.filter(|client| client.strong_count() > 0);
        Some(Arc::new(alive.chain([client]).cloned().collect::<Vec<_>>()))
    });
}

/// Runs after `main` or in `exit`, while other threads still run.
///
/// Thread-local storage may have been destroyed, so it uses none: it polls.
#[dtor::dtor(unsafe)]
fn wait_for_releases() {
    if PROCESS.load(Ordering::Acquire) != process::id() {
        return;
    }
    let noticed = Arc::new(AtomicBool::new(true));
    if let Some(background) = started() {
        noticed.store(false, Ordering::Release);
        let notices = Arc::clone(&noticed);
        background.spawn(async move {
            for client in CLIENTS.load_full().iter().flat_map(|clients| clients.iter()) {
                client.upgrade().into_iter().for_each(|client| client.at_exit());
            }
            notices.store(true, Ordering::Release);
        });
    }
    let ended = || noticed.load(Ordering::Acquire) && DELAYS.load(Ordering::Acquire) == 0;
    let mut waited = Duration::ZERO;
    while !ended() && waited < LONGEST {
        let slept = Instant::now();
        thread::sleep(POLL_INTERVAL);
        waited += slept.elapsed().min(LONGEST_POLL);
    }
}
