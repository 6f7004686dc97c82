//! Telling once that waits go on although the server cannot be asked.

use std::fmt::Display;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The waits of one client that fail at present.
///
/// A wait that found its lock busy goes on through failures that may pass. People should know: the first wait that fails is
/// told by an event with the reason, at the level `WARN`, with the target `fencelock` and a field `outage`; and the first answer
/// after the last of them, at the level `INFO`. What fails in between is not told again.
///
/// The core tells of each request that fails in a wait. A backend needs this only for what it repeats by itself in
/// [`acquire`](crate::DistributedLock::acquire).
#[derive(Clone, Debug, Default)]
pub struct Outages {
    failing: Arc<AtomicUsize>,
}

/// A wait that fails at present. Dropping it takes it out of the count and tells nobody.
#[derive(Debug)]
pub struct Outage {
    /// None once it is out of the count.
    failing: Option<Arc<AtomicUsize>>,
}

impl Outages {
    /// A wait has failed, and goes on.
    pub fn begin(&self, reason: &impl Display) -> Outage {
        if self.failing.fetch_add(1, Ordering::Relaxed) == 0 {
            tracing::warn!(target: "fencelock", outage = true, "waiting goes on after a failure that may pass: {reason:#}");
        } else {
            tracing::debug!(target: "fencelock", outage = true, "one more wait goes on after a failure: {reason:#}");
        }
        Outage {
            failing: Some(Arc::clone(&self.failing)),
        }
    }
}

impl Outage {
    /// The server has answered the wait.
    pub fn end(mut self) {
        if self.is_last() {
            tracing::info!(target: "fencelock", outage = true, "the server answers those who wait again");
        }
    }

    /// Takes it out of the count, and tells whether it was the last one there.
    fn is_last(&mut self) -> bool {
        let failing = self.failing.take();
        // In one step: of two that end at once, one tells.
        failing.is_some_and(|failing| failing.fetch_sub(1, Ordering::Relaxed) == 1)
    }
}

impl Drop for Outage {
    fn drop(&mut self) {
        self.is_last();
    }
}
