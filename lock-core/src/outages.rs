//! Telling once that waits or releases go on although the server cannot be asked.

use std::fmt::Display;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The waits of one client that fail at present.
///
/// A wait goes on through failures that may pass. People should know: the first wait that fails is told by an event with the reason, at the
/// level `WARN`, with the target `fencelock` and a field `outage`; and the first answer after the last of them, at the level `INFO`. What
/// fails in between is not told again.
///
/// The core tells of each request that fails in a wait. A backend needs this only for what it repeats by itself in
/// [`acquire`](crate::DistributedLock::acquire).
#[derive(Clone, Debug, Default)]
pub struct Outages {
    failing: Arc<AtomicUsize>,
    /// Releases instead of waits: those who wait at a terminal need not know of them, so that their events have no field `outage`.
    of_releases: bool,
}

/// A wait that fails at present. Dropping it takes it out of the count and tells nobody.
#[derive(Debug)]
pub struct Outage {
    /// None once it is out of the count.
    failing: Option<Arc<AtomicUsize>>,
    of_release: bool,
}

impl Outages {
    /// The releases that fail at present.
    pub(crate) fn of_releases() -> Self {
        let of_releases = true;
        Self {
            of_releases,
            ..Self::default()
        }
    }

    /// A wait has failed, and goes on.
    pub fn begin(&self, reason: &impl Display) -> Outage {
        let is_first = self.failing.fetch_add(1, Ordering::Relaxed) == 0;
        match (is_first, self.of_releases) {
            (true, false) => {
                tracing::warn!(target: "fencelock", outage = true, "waiting goes on after a failure that may pass: {reason:#}");
            }
            (true, true) => {
                tracing::warn!(target: "fencelock", "releases are tried again after a failure that may pass: {reason:#}");
            }
            (false, _) => tracing::debug!(target: "fencelock", "goes on after a failure that may pass: {reason:#}"),
        }
        Outage {
            failing: Some(Arc::clone(&self.failing)),
            of_release: self.of_releases,
        }
    }
}

impl Outage {
    /// The server has answered.
    pub fn end(mut self) {
        match (self.is_last(), self.of_release) {
            (true, false) => {
                tracing::info!(target: "fencelock", outage = true, "the server answers those who wait again");
            }
            (true, true) => tracing::info!(target: "fencelock", "the releases that had failed are done"),
            (false, _) => {}
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
