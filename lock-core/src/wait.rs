//! How an acquisition waits.

use std::fmt;

use crate::{Busy, Stamp};

/// How [`acquire`](crate::DistributedLock::acquire) waits: until when, and what is told as soon as the server has said that another claim
/// holds the name.
pub struct Wait {
    deadline: Option<Stamp>,
    on_busy: Option<Box<dyn FnOnce(Busy) + Send>>,
}

impl Wait {
    /// Waits until `deadline`, or as long as it takes without one.
    #[must_use]
    pub fn until(deadline: Option<Stamp>) -> Self {
        Self {
            deadline,
            on_busy: None,
        }
    }

    /// Calls `tell` when the name is found busy, once.
    #[must_use]
    pub fn on_busy(mut self, tell: impl FnOnce(Busy) + Send + 'static) -> Self {
        self.on_busy = Some(Box::new(tell));
        self
    }

    /// The end of the wait; `None` if it has none.
    #[must_use]
    pub fn deadline(&self) -> Option<Stamp> {
        self.deadline
    }

    /// Whether the deadline has come.
    #[must_use]
    pub fn is_over(&self, now: Stamp) -> bool {
        self.deadline.is_some_and(|deadline| deadline <= now)
    }

    /// Tells that the server has said busy. Only the first call counts.
    pub fn busy(&mut self, busy: &Busy) {
        if let Some(tell) = self.on_busy.take() {
            tell(busy.clone());
        }
    }
}

impl fmt::Debug for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Wait")
            .field("deadline", &self.deadline)
            .field("told", &self.on_busy.is_none())
            .finish()
    }
}
