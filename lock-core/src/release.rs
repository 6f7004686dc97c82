//! A claim that is being released, and how many releases are under way at once.

use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Semaphore, SemaphorePermit, oneshot};
use tokio::time::timeout;
use tokio_util::sync::DropGuard;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

use crate::call::call;
use crate::process::ExitDelay;
use crate::stats::Gauge;
use crate::{Claim, Lease, LockError, Released, Stamp};

/// A claim whose release is not confirmed.
pub(crate) struct Release {
    pub(crate) claim: Claim,
    pub(crate) reservation: Reservation,
    /// The lease, if other locks may keep it alive.
    pub(crate) shared: Option<Lease>,
    /// The caller that waits for the first response.
    pub(crate) reply: Option<Reply>,
    /// By then the lease has ended at the server, unless it is shared.
    pub(crate) until: Stamp,
    /// The claim never became a guard. Its release undoes whatever the server may have done with it.
    pub(crate) is_clean_up: bool,
    /// Lets those go on that wait for the first response about a claim that was kept.
    pub(crate) kept: Option<DropGuard>,
    pub(crate) _counted: Releasing,
}

impl Release {
    /// Whether the claim must have ended at the server by now.
    pub(crate) fn is_over(&self, now: Stamp) -> bool {
        let is_kept = self.shared.as_ref().is_some_and(|lease| lease.is_valid(now));
        now >= self.until && !is_kept
    }
}

/// The caller that waits for the response to a release.
pub(crate) type Reply = oneshot::Sender<Result<Released, LockError>>;

/// What the server may have reserved for a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reservation {
    None,
    /// It was requested, without a response: whatever the server did is to be undone.
    Requested,
    /// It was made, and stays until then.
    Until(Stamp),
}

/// A release that is under way: for [`Stats`](crate::Stats), for [`Locks::drain`](crate::Locks::drain), and for the end of the process.
pub(crate) struct Releasing {
    pub(crate) _counted: Gauge,
    pub(crate) _drained: TaskTrackerToken,
    pub(crate) _exit: ExitDelay,
}

/// Bounds the releases that are under way. Each backend works on its requests one after the other in the end, and a request that waits
/// there uses up its own time limit: with thousands at once most would run out of time.
#[derive(Debug)]
pub(crate) struct ReleaseSlots {
    free: Semaphore,
    /// How many releases were answered so far.
    answered: AtomicU64,
}

impl ReleaseSlots {
    pub(crate) fn new(count: usize) -> Self {
        Self {
            free: Semaphore::new(count),
            answered: AtomicU64::new(0),
        }
    }

    /// Sends a release, once there is a slot.
    ///
    /// # Errors
    ///
    /// [`LockError::Unavailable`] also if none was free for `limit`, and no other release was answered in that time.
    pub(crate) async fn run<T>(
        &self,
        limit: Duration,
        release: impl Future<Output = Result<T, LockError>>,
    ) -> Result<T, LockError> {
        let _slot = match self.free.try_acquire() {
            Ok(slot) => slot,
            Err(_) => self.wait(limit).await?,
        };
        let outcome = call("release", limit, release).await;
        if outcome.is_ok() {
            self.answered.fetch_add(1, Ordering::Relaxed);
        }
        outcome
    }

    async fn wait(&self, limit: Duration) -> Result<SemaphorePermit<'_>, LockError> {
        let mut free = pin!(self.free.acquire());
        loop {
            let before = self.answered.load(Ordering::Relaxed);
            match timeout(limit, &mut free).await {
                Ok(Ok(slot)) => return Ok(slot),
                Err(_) if self.answered.load(Ordering::Relaxed) != before => {}
                _ => return Err(LockError::no_answer("release", limit)),
            }
        }
    }
}

/// The releases that are under way.
#[derive(Debug, Default)]
pub(crate) struct Releases(Mutex<Vec<TaskTracker>>);

impl Releases {
    /// Counts a release as under way for as long as the result lives.
    pub(crate) fn begin(&self) -> TaskTrackerToken {
        let mut trackers = self.lock();
        if trackers.is_empty() {
            trackers.push(TaskTracker::new());
        }
        trackers[trackers.len() - 1].token()
    }

    /// Waits for those that are under way. What begins later is counted apart, so that this ends under steady releases.
    pub(crate) async fn drain(&self) {
        let before = {
            let mut trackers = self.lock();
            trackers.retain(|tracker| !tracker.is_empty());
            let before = trackers.clone();
            trackers.push(TaskTracker::new());
            before
        };
        for tracker in before {
            tracker.close();
            tracker.wait().await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<TaskTracker>> {
        // Nothing here panics while holding the mutex.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
