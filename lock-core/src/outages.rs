//! One event for the begin, and one for the end, of the time in which waits or releases fail.

use std::fmt::Display;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The waits of one client that fail at present.
///
/// A wait goes on through failures that may pass. The first wait that fails causes an event with the reason, at the level `WARN`, with the target
/// `fencelock` and a field `outage`; and the first response after the last of them causes one at the level `INFO`. Further failures in between
/// are events at the level `DEBUG`.
///
/// The core does it for each request that fails in a wait. A backend needs this only for what it repeats by itself in
/// [`acquire`](crate::DistributedLock::acquire).
#[derive(Clone, Debug, Default)]
pub struct Outages {
    failing: Arc<AtomicUsize>,
    /// Releases instead of waits: their events have no field `outage`, as a user at a terminal need not know of them.
    of_releases: bool,
}

/// A wait that fails at present. Dropping it takes it out of the count without an event.
#[derive(Debug)]
pub struct Outage(Option<Outages>);

impl Outages {
    /// The releases that fail at present.
    pub(crate) fn of_releases() -> Self {
        let (failing, of_releases) = (Arc::default(), true);
        Self { failing, of_releases }
    }

    /// A wait has failed, and goes on.
    pub fn begin(&self, reason: &impl Display) -> Outage {
        match (self.failing.fetch_add(1, Ordering::Relaxed), self.of_releases) {
            (0, false) => {
                tracing::warn!(target: "fencelock", outage = true, "waiting goes on after a failure that may pass: {reason:#}");
            }
            (0, true) => {
                tracing::warn!(target: "fencelock", "releases are tried again after a failure that may pass: {reason:#}");
            }
            _ => tracing::debug!(target: "fencelock", "goes on after a failure that may pass: {reason:#}"),
        }
        Outage(Some(self.clone()))
    }
}

impl Outage {
    /// The server has responded.
    pub fn end(mut self) {
        let Some(outages) = self.0.take() else { return };
        // In one step: of two that end at once, one is the last.
        let is_last = outages.failing.fetch_sub(1, Ordering::Relaxed) == 1;
        match (is_last, outages.of_releases) {
            (true, false) => {
                tracing::info!(target: "fencelock", outage = true, "the server answers those who wait again");
            }
            (true, true) => tracing::info!(target: "fencelock", "the releases that had failed are done"),
            (false, _) => {}
        }
    }
}

impl Drop for Outage {
    fn drop(&mut self) {
        if let Some(outages) = &self.0 {
            outages.failing.fetch_sub(1, Ordering::Relaxed);
        }
    }
}
