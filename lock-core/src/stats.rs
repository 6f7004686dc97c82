//! Counters.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Makes [`Stats`] and its live side, [`Counters`].
macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident: $counter:ty,)+) => {
        /// Counters of a client since its creation, for all clones and scopes of one [`Locks`](crate::Locks) together.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[cfg_attr(feature = "serde", derive(serde::Serialize))]
        #[non_exhaustive]
        pub struct Stats {
            $($(#[$doc])* pub $name: u64,)+
        }

        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            $(pub(crate) $name: $counter,)+
            /// Releases that were given up; the server frees these locks when their ttl is over.
            pub(crate) unreleased: Counter,
        }

        impl Counters {
            pub(crate) fn snapshot(&self) -> Stats {
                Stats {
                    $($name: self.$name.get(),)+
                }
            }
        }
    };
}

counters! {
    /// Locks granted.
    acquired: Counter,
    /// Of these, handed over from one holder of this client to the next without a request to the server.
    handed_over: Counter,
    /// Requests that ended because the lock stayed busy.
    timed_out: Counter,
    /// Requests that ended with any other error.
    failed: Counter,
    /// Requests whose future was dropped before they ended.
    cancelled: Counter,
    /// Claims that were released because their request was dropped or failed.
    abandoned: Counter,
    /// Locks that the server freed at a release, or that were handed over without a request.
    released: Counter,
    /// Locks lost while they were held.
    lost: Counter,
    /// Leases renewed. One lease may keep many locks.
    renewed: Counter,
    /// Renewals that failed and were tried again.
    renewal_errors: Counter,
    /// Releases that failed and were tried again.
    release_errors: Counter,
    // The last three in the order in which a lock passes through them: a reading misses none.
    /// Requests under way now.
    waiting: Arc<Counter>,
    /// Locks held now.
    held: Counter,
    /// Releases and clean-ups under way now.
    releasing: Arc<Counter>,
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
