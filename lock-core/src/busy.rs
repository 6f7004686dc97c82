//! Telling that a name is busy before the wait for it is over.

use std::fmt;

use crate::Busy;

/// How a backend tells, in the middle of [`try_then_wait`](crate::DistributedLock::try_then_wait), that the name is busy and
/// the wait has begun.
///
/// It says so once; what is said later changes nothing. Dropping it says nothing.
pub struct BusySignal {
    tell: Option<Box<dyn FnOnce(Busy) + Send>>,
}

impl BusySignal {
    /// Calls `tell` when the name is found busy.
    pub fn new(tell: impl FnOnce(Busy) + Send + 'static) -> Self {
        Self {
            tell: Some(Box::new(tell)),
        }
    }

    /// The server said busy.
    pub fn tell(&mut self, busy: &Busy) {
        if let Some(tell) = self.tell.take() {
            tell(busy.clone());
        }
    }
}

impl fmt::Debug for BusySignal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BusySignal")
            .field("told", &self.tell.is_none())
            .finish()
    }
}
