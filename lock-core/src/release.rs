//! A claim that is being released, and the releases that are under way.

use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

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
    pub(crate) reply: Option<oneshot::Sender<Result<Released, LockError>>>,
    /// Requests that share the name and wait for the first response. Dropping the senders tells them.
    pub(crate) told: Vec<oneshot::Sender<()>>,
    /// By then the lease has ended at the server, unless it is shared.
    pub(crate) until: Stamp,
    /// No guard has the claim: it was kept without one, or never became one.
    pub(crate) is_clean_up: bool,
    /// A release has failed.
    pub(crate) has_failed: bool,
    pub(crate) _counted: Releasing,
}

impl Release {
    pub(crate) fn new(claim: Claim, lease: Option<&Lease>, now: Stamp, counted: Releasing) -> Self {
        Self {
            until: now + claim.ttl(),
            claim,
            reservation: Reservation::None,
            shared: lease.filter(|lease| lease.claim().is_none()).cloned(),
            reply: None,
            told: Vec::new(),
            is_clean_up: true,
            has_failed: false,
            _counted: counted,
        }
    }

    /// Whether the claim must have ended at the server by now.
    pub(crate) fn is_over(&self, now: Stamp) -> bool {
        now >= self.until && !self.shared.as_ref().is_some_and(|lease| lease.is_valid(now))
    }
}

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
