//! The end of the process waits for the releases that are under way.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::process::Process;

/// Longest delay of the end of the process, as when the server answers nothing.
const LONGEST: Duration = Duration::from_millis(500);

const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// A poll that took longer counts as this: the machine or the process stood still, and no release went on either.
const LONGEST_POLL: Duration = Duration::from_millis(20);

/// Enough turns at the background thread for every task there that was woken before.
const TURNS: usize = 8;

/// Delays the end of the process while it lives, for at most half a second, not counting time in which the process stood still.
///
/// A process ends when `main` returns or when `std::process::exit` is called. Without this, the background thread would end in the
/// middle of a release. A process that is killed or aborted ends at once.
///
/// The core has one for each release. A backend has one for what else it frees in the background when its client is dropped.
#[derive(Debug)]
pub struct ExitDelay(Arc<Process>);

impl ExitDelay {
    /// Delays the end of the process from now on.
    #[must_use]
    pub fn begin() -> Self {
        Self::of(Process::current())
    }

    /// The same for a caller that knows its process.
    pub(crate) fn of(process: Arc<Process>) -> Self {
        process.delays.fetch_add(1, Ordering::AcqRel);
        Self(process)
    }
}

impl Drop for ExitDelay {
    fn drop(&mut self) {
        self.0.delays.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Lets the tasks run that were woken before, so that they notice requests that were dropped.
pub(crate) async fn after_others() {
    for _ in 0..TURNS {
        tokio::task::yield_now().await;
    }
}

/// Runs after `main` or in `exit`, while other threads still run.
///
/// Thread-local storage may have been destroyed, so it uses none: it polls.
#[dtor::dtor(unsafe)]
fn wait_for_releases() {
    let Some(process) = Process::with_clients() else {
        return;
    };
    let noticed = Arc::new(AtomicBool::new(true));
    if let Some(background) = process.started() {
        noticed.store(false, Ordering::Release);
        let (notices, clients) = (Arc::clone(&noticed), process.clients_at_exit());
        background.spawn(async move {
            for client in clients {
                client.at_exit();
            }
            after_others().await;
            notices.store(true, Ordering::Release);
        });
    }
    let ended = || noticed.load(Ordering::Acquire) && process.delays.load(Ordering::Acquire) == 0;
    let mut waited = Duration::ZERO;
    while !ended() && waited < LONGEST {
        let slept = Instant::now();
        thread::sleep(POLL_INTERVAL);
        waited += slept.elapsed().min(LONGEST_POLL);
    }
}
