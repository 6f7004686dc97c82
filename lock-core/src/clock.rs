//! The clock of leases.

use std::fmt;
use std::ops::{Add, Sub};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The clock that measures leases. Cloning is cheap. Tests use [`Clock::manual`].
///
/// It is monotonic, and counts the time for which the machine is suspended (`CLOCK_BOOTTIME` on Linux and Android), as the server does. Where the
/// system has no such clock, a client that was suspended may count on its locks for too long; the fencing token still protects the
/// resource.
#[derive(Clone, Default)]
pub struct Clock(Source);

#[derive(Clone, Default)]
enum Source {
    #[default]
    System,
    Manual(Arc<AtomicU64>),
}

impl Clock {
    /// The system's clock.
    #[must_use]
    pub fn system() -> Self {
        Self(Source::System)
    }

    /// A clock that stands still until it is advanced, and the handle that advances it. Timers still follow the runtime, so that advancing the
    /// clock alone looks like a suspended machine.
    #[must_use]
    pub fn manual() -> (Self, ManualClock) {
        // Not zero, so that stamps before the start can be expressed.
        let nanos = Arc::new(AtomicU64::new(Duration::from_secs(60 * 60).as_nanos() as u64));
        (Self(Source::Manual(Arc::clone(&nanos))), ManualClock(nanos))
    }

    /// Reads the clock.
    #[must_use]
    pub fn now(&self) -> Stamp {
        match &self.0 {
            Source::System => Stamp(system_nanos()),
            Source::Manual(nanos) => Stamp(nanos.load(Ordering::SeqCst)),
        }
    }
}

impl fmt::Debug for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            Source::System => "Clock::System",
            Source::Manual(_) => "Clock::Manual",
        })
    }
}

/// Advances a clock made by [`Clock::manual`].
#[derive(Clone, Debug)]
pub struct ManualClock(Arc<AtomicU64>);

impl ManualClock {
    /// Moves the clock forward.
    pub fn advance(&self, by: Duration) {
        let _ = self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |now| {
            Some(now.saturating_add(nanos(by)))
        });
    }
}

/// A reading of a [`Clock`], meaningful only beside readings of the same clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Stamp(u64);

impl Stamp {
    /// The beginning of time.
    pub(crate) const ZERO: Self = Self(0);

    /// The end of time.
    pub(crate) const MAX: Self = Self(u64::MAX);

    /// The time from `earlier` to this reading; zero if `earlier` is in fact later.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }

    /// The last multiple of `step` until then.
    pub(crate) fn rounded_down(self, step: Duration) -> Self {
        Self(self.0 - self.0 % nanos(step).max(1))
    }

    pub(crate) fn as_nanos(self) -> u64 {
        self.0
    }

    pub(crate) fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }
}

impl Add<Duration> for Stamp {
    type Output = Self;

    /// Saturates: a stamp beyond the end of time is the end of time.
    fn add(self, by: Duration) -> Self {
        Self(self.0.saturating_add(nanos(by)))
    }
}

impl Sub<Duration> for Stamp {
    type Output = Self;

    /// Saturates at the clock's origin.
    fn sub(self, by: Duration) -> Self {
        Self(self.0.saturating_sub(nanos(by)))
    }
}

fn nanos(d: Duration) -> u64 {
    u64::try_from(d.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(unix)]
fn system_nanos() -> u64 {
    use rustix::time::{ClockId, clock_gettime};
    // macOS's CLOCK_MONOTONIC counts sleep; the other systems have no clock that does.
    #[cfg(any(
        target_os = "linux",
        target_os = "android",
        target_os = "fuchsia",
        target_os = "openbsd"
    ))]
    const ID: ClockId = ClockId::Boottime;
    #[cfg(not(any(
        target_os = "linux",
        target_os = "android",
        target_os = "fuchsia",
        target_os = "openbsd"
    )))]
    const ID: ClockId = ClockId::Monotonic;
    let t = clock_gettime(ID);
    (t.tv_sec as u64)
        .saturating_mul(1_000_000_000)
        .saturating_add(t.tv_nsec as u64)
}

#[cfg(not(unix))]
fn system_nanos() -> u64 {
    use std::sync::LazyLock;
    use std::time::Instant;
    static ORIGIN: LazyLock<Instant> = LazyLock::new(Instant::now);
    nanos(ORIGIN.elapsed()).saturating_add(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arithmetic_saturates() {
        let (clock, _) = Clock::manual();
        assert!(clock.now() + Duration::MAX > clock.now());
        assert!(clock.now() - Duration::MAX < clock.now());
    }
}
