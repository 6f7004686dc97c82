//! How an acquisition waits.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::Notify;

use crate::{Busy, Stamp};

/// How [`acquire`](crate::DistributedLock::acquire) waits: its deadline, and what it notifies when the server has said that the name is busy.
#[must_use]
pub struct Wait {
    shared: Arc<SharedWait>,
    on_busy: Option<Box<dyn FnOnce(Busy) + Send>>,
}

/// The side of the client of a wait that goes on for as long as one of its waiters wants the claim.
pub(crate) struct SharedWait {
    /// [`Stamp::MAX`] for a wait without an end.
    deadline: AtomicU64,
    /// The same, before it was put off: a backend may have ended its wait then.
    first_deadline: Stamp,
    busy: Mutex<Option<Busy>>,
    /// Woken when the server has said busy.
    task: Arc<Notify>,
}

impl Wait {
    /// Waits until `deadline`, or as long as it takes without one.
    pub fn until(deadline: Option<Stamp>) -> Self {
        Self::shared(SharedWait::new(deadline.unwrap_or(Stamp::MAX), &Arc::default()))
    }

    pub(crate) fn shared(shared: Arc<SharedWait>) -> Self {
        Self { shared, on_busy: None }
    }

    /// Calls `tell` once, when the name is found busy.
    pub fn on_busy(mut self, tell: impl FnOnce(Busy) + Send + 'static) -> Self {
        self.on_busy = Some(Box::new(tell));
        self
    }

    /// Returns the end of the wait; `None` if it has none. It may be put off during the wait, as another request of the client takes over the
    /// claim. A backend that reads it again at the deadline keeps the place of the claim in the server's queue.
    #[must_use]
    pub fn deadline(&self) -> Option<Stamp> {
        self.shared.deadline()
    }

    /// Returns whether the deadline has passed.
    #[must_use]
    pub fn is_over(&self, now: Stamp) -> bool {
        self.deadline().is_some_and(|deadline| deadline <= now)
    }

    /// Notifies that the server has said busy. Only the first call counts.
    pub fn busy(&mut self, busy: &Busy) {
        if let Some(tell) = self.on_busy.take() {
            tell(busy.clone());
        }
        self.shared.tell(busy);
    }
}

impl SharedWait {
    /// [`Stamp::MAX`] is no deadline.
    pub(crate) fn new(deadline: Stamp, task: &Arc<Notify>) -> Arc<Self> {
        Arc::new(Self {
            deadline: AtomicU64::new(deadline.as_nanos()),
            first_deadline: deadline,
            busy: Mutex::new(None),
            task: Arc::clone(task),
        })
    }

    pub(crate) fn deadline(&self) -> Option<Stamp> {
        let deadline = Stamp::from_nanos(self.deadline.load(Ordering::Acquire));
        Some(deadline).filter(|deadline| *deadline < Stamp::MAX)
    }

    /// Whether the deadline has come that it had at the beginning.
    pub(crate) fn has_been_over(&self, now: Stamp) -> bool {
        self.first_deadline <= now
    }

    /// One of its waiters waits until then.
    pub(crate) fn put_off(&self, deadline: Stamp) {
        self.deadline.fetch_max(deadline.as_nanos(), Ordering::AcqRel);
    }

    fn tell(&self, busy: &Busy) {
        // Nothing here panics while holding the mutex.
        *self.busy.lock().unwrap_or_else(PoisonError::into_inner) = Some(busy.clone());
        self.task.notify_one();
    }

    /// What the server has said, once.
    pub(crate) fn told(&self) -> Option<Busy> {
        self.busy.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl fmt::Debug for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Wait")
            .field("deadline", &self.deadline())
            .finish_non_exhaustive()
    }
}
