//! The end of the process waits for the releases that are under way.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::background;

/// Longest delay of the end of the process, as when the server answers nothing.
const LONGEST: Duration = Duration::from_millis(500);

const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// A poll that took longer counts as this: the machine or the process stood still, and no release went on either.
const LONGEST_POLL: Duration = Duration::from_millis(20);

/// Enough turns at the background thread for every task there that was woken before.
const TURNS: usize = 8;

/// The delays of this process. A forked child has none of its parent's.
static DELAYS: Delays = Delays::new();

/// Delays the end of the process while it lives, for at most half a second, not counting time in which the process stood still.
///
/// A process ends when `main` returns or when `std::process::exit` is called. Without this, the background thread would end in the
/// middle of a release. A process that is killed or aborted ends at once.
///
/// The core has one for each release. A backend has one for what else it frees in the background when its client is dropped.
#[derive(Debug)]
pub struct ExitDelay {
    process: u32,
}

impl ExitDelay {
    /// Delays the end of the process from now on.
    #[must_use]
    pub fn begin() -> Self {
        let process = std::process::id();
        DELAYS.begin(process);
        Self { process }
    }
}

impl Drop for ExitDelay {
    fn drop(&mut self) {
        DELAYS.end(self.process);
    }
}

/// How many delays are under way, and of which process: what was under way before a fork is under way in the parent only. Both in one
/// value, the process in its upper half, so that threads that begin together agree on who was first.
#[derive(Debug)]
struct Delays(AtomicU64);

impl Delays {
    const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    fn begin(&self, process: u32) {
        let first = u64::from(process) << u32::BITS;
        self.update(|state| Some(if of(state) == process { state } else { first } + 1));
    }

    fn end(&self, process: u32) {
        self.update(|state| (of(state) == process && count(state) > 0).then(|| state - 1));
    }

    /// None: that process has had no delay so far.
    fn under_way(&self, process: u32) -> Option<u32> {
        let state = self.0.load(Ordering::Acquire);
        (of(state) == process).then_some(count(state))
    }

    fn update(&self, change: impl Fn(u64) -> Option<u64>) {
        let _ = self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, change);
    }
}

fn of(state: u64) -> u32 {
    (state >> u32::BITS) as u32
}

fn count(state: u64) -> u32 {
    state as u32
}

/// Has the end of this process wait for releases, from now on.
pub(crate) fn watch() {
    drop(ExitDelay::begin());
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
    let process = std::process::id();
    if DELAYS.under_way(process).is_none() {
        return;
    }
    let noticed = Arc::new(AtomicBool::new(true));
    if let Some(background) = background::started() {
        noticed.store(false, Ordering::Release);
        let notices = Arc::clone(&noticed);
        background.spawn(async move {
            after_others().await;
            notices.store(true, Ordering::Release);
        });
    }
    let mut waited = Duration::ZERO;
    while !(noticed.load(Ordering::Acquire) && DELAYS.under_way(process) == Some(0)) && waited < LONGEST {
        let slept = Instant::now();
        thread::sleep(POLL_INTERVAL);
        waited += slept.elapsed().min(LONGEST_POLL);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    #[test]
    fn delays_that_begin_together_are_all_counted() {
        const THREADS: u32 = 4;
        for round in 0..2_000 {
            let (delays, together) = (Delays::new(), Barrier::new(THREADS as usize));
            thread::scope(|scope| {
                for _ in 0..THREADS {
                    scope.spawn(|| {
                        together.wait();
                        delays.begin(7);
                    });
                }
            });
            assert_eq!(delays.under_way(7), Some(THREADS), "round {round}");
        }
    }

    #[test]
    fn a_forked_child_has_no_delay_of_its_parent() {
        let delays = Delays::new();
        assert_eq!(delays.under_way(7), None);
        delays.begin(7);
        delays.begin(7);
        assert_eq!((delays.under_way(7), delays.under_way(8)), (Some(2), None));
        delays.begin(8);
        // One of the parent that is dropped in the child.
        delays.end(7);
        assert_eq!((delays.under_way(7), delays.under_way(8)), (None, Some(1)));
        delays.end(8);
        delays.end(8);
        assert_eq!(delays.under_way(8), Some(0));
    }
}
