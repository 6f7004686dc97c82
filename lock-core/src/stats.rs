//! Counters.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// What a client has done since it was made. Counted for all clones and scopes of one [`Locks`](crate::Locks) together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Stats {
    /// Locks granted.
    pub acquired: u64,
    /// Of these, handed over from one holder of this client to the next without a request to the server.
    pub handed_over: u64,
    /// Requests that ended because the lock stayed busy.
    pub timed_out: u64,
    /// Requests that ended with any other error.
    pub failed: u64,
    /// Requests whose caller went away before they ended.
    pub cancelled: u64,
    /// Claims that were cleaned up because their caller went away or their outcome was unknown.
    pub abandoned: u64,
    /// Locks that the server let go of when asked, or that were handed over without a request.
    pub released: u64,
    /// Locks lost while they were held.
    pub lost: u64,
    /// Leases renewed. One lease may keep many locks.
    pub renewed: u64,
    /// Renewals that failed and were tried again.
    pub renewal_errors: u64,
    /// Releases that failed and were tried again.
    pub release_errors: u64,
    /// Locks held now.
    pub held: u64,
    /// Requests under way now.
    pub waiting: u64,
    /// Releases and clean-ups under way now.
    pub releasing: u64,
}

/// The live side of [`Stats`].
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) acquired: Counter,
    pub(crate) handed_over: Counter,
    pub(crate) timed_out: Counter,
    pub(crate) failed: Counter,
    pub(crate) cancelled: Counter,
    pub(crate) abandoned: Counter,
    pub(crate) released: Counter,
    pub(crate) lost: Counter,
    pub(crate) renewed: Counter,
    pub(crate) renewal_errors: Counter,
    pub(crate) release_errors: Counter,
    pub(crate) held: Counter,
    pub(crate) waiting: Arc<Counter>,
    pub(crate) releasing: Arc<Counter>,
    /// Releases that were given up; the server frees these locks when their ttl is over.
    pub(crate) unreleased: Counter,
}

#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts something as under way for as long as the result lives.
    pub(crate) fn hold(self: &Arc<Self>) -> Gauge {
        self.add();
        Gauge(Arc::clone(self))
    }

    pub(crate) fn subtract(&self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Subtracts again when it is dropped, also by a panic or with a task that never ran.
#[derive(Debug)]
pub(crate) struct Gauge(Arc<Counter>);

impl Drop for Gauge {
    fn drop(&mut self) {
        self.0.subtract();
    }
}

impl Counters {
    pub(crate) fn snapshot(&self) -> Stats {
        Stats {
            acquired: self.acquired.get(),
            handed_over: self.handed_over.get(),
            timed_out: self.timed_out.get(),
            failed: self.failed.get(),
            cancelled: self.cancelled.get(),
            abandoned: self.abandoned.get(),
            released: self.released.get(),
            lost: self.lost.get(),
            renewed: self.renewed.get(),
            renewal_errors: self.renewal_errors.get(),
            release_errors: self.release_errors.get(),
            // In the order in which a lock goes through them, so that it is missed in none.
            waiting: self.waiting.get(),
            held: self.held.get(),
            releasing: self.releasing.get(),
        }
    }
}
