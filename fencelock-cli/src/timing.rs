//! When a command has to go so that it is gone before its lock is.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use crate::exit::Failure;

/// A reading of the clock that leases are measured with, in nanoseconds since boot; it counts suspend. All processes of
/// one `fencelock run` read the same one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Instant(pub(crate) u64);

impl Instant {
    pub(crate) fn now() -> Self {
        let now = clock_gettime(ClockId::Boottime);
        Self(now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64)
    }

    pub(crate) fn after(self, by: Duration) -> Self {
        Self(self.0.saturating_add(nanos(by)))
    }

    pub(crate) fn before(self, by: Duration) -> Self {
        Self(self.0.saturating_sub(nanos(by)))
    }

    pub(crate) fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

fn nanos(d: Duration) -> u64 {
    u64::try_from(d.as_nanos()).unwrap_or(u64::MAX)
}

/// When a command gets SIGTERM, and when SIGKILL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Times {
    pub(crate) term_at: Instant,
    pub(crate) kill_at: Instant,
}

impl Times {
    /// Both now or earlier than so far: SIGTERM at once, and the same grace as so far.
    pub(crate) fn now(self) -> Self {
        let term_at = Instant::now();
        let grace = self.kill_at.since(self.term_at);
        Self {
            term_at,
            kill_at: self.kill_at.min(term_at.after(grace)),
        }
    }

    /// The same end, without SIGTERM before it.
    pub(crate) fn without_grace(self) -> Self {
        Self {
            term_at: self.kill_at,
            ..self
        }
    }
}

impl fmt::Display for Times {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.term_at.0, self.kill_at.0)
    }
}

impl FromStr for Times {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (term_at, kill_at) = text.split_once(' ').ok_or(())?;
        Ok(Self {
            term_at: Instant(term_at.parse().map_err(drop)?),
            kill_at: Instant(kill_at.parse().map_err(drop)?),
        })
    }
}

/// How a command is ended: SIGTERM, then SIGKILL after `grace`, and the last `margin` of the lease for SIGKILL to do its
/// work.
///
/// **Invariant.** `grace + margin` is at most a third of the ttl. A renewal is due when two thirds are left, so it may
/// fail and be tried again for a third of the ttl before the command gets SIGTERM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Timing {
    pub(crate) grace: Duration,
    pub(crate) margin: Duration,
}

/// As long as most commands need to tidy up.
const USUAL_GRACE: Duration = Duration::from_secs(5);

impl Timing {
    /// The timing for a ttl: with the grace given if it fits, or else with the usual one, cut to what fits.
    pub(crate) fn fit(ttl: Duration, grace: Option<Duration>) -> Result<Self, Failure> {
        let largest = largest_grace(ttl);
        match grace {
            Some(grace) if grace > largest => Err(Failure::usage(format!(
                "a grace of {} does not fit into {}: give at most {}, or a longer --ttl (and --max-hold)",
                shown(grace),
                shown(ttl),
                shown(largest),
            ))),
            _ => Ok(Self {
                grace: grace.unwrap_or(USUAL_GRACE.min(largest)),
                margin: margin(ttl),
            }),
        }
    }

    /// The times for a lock that ends at `end` unless it is renewed.
    pub(crate) fn times(self, end: Instant) -> Times {
        let kill_at = end.before(self.margin);
        Times {
            term_at: kill_at.before(self.grace),
            kill_at,
        }
    }
}

fn margin(ttl: Duration) -> Duration {
    (ttl / 10).clamp(Duration::from_millis(20), Duration::from_secs(1))
}

fn largest_grace(ttl: Duration) -> Duration {
    let grace = (ttl / 3).saturating_sub(margin(ttl));
    Duration::new(grace.as_secs(), grace.subsec_millis() * 1_000_000)
}

/// A time as people write it, to the second, or to the millisecond if it is shorter: `1m 3s`. The options take the same form.
pub(crate) fn shown(d: Duration) -> String {
    let whole = match d.as_secs() {
        0 => Duration::from_millis(u64::from(d.subsec_millis())),
        seconds => Duration::from_secs(seconds),
    };
    humantime::format_duration(whole).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    #[test]
    fn a_grace_is_cut_to_what_fits_or_refused_with_the_largest_that_does() {
        for (ttl, grace) in [(30_000, 5_000), (15_000, 4_000), (1_000, 233), (100, 13), (1, 0)] {
            assert_eq!(Timing::fit(ms(ttl), None).unwrap().grace, ms(grace), "{ttl}");
        }
        assert_eq!(Timing::fit(ms(30_000), Some(ms(9_000))).unwrap().grace, ms(9_000));
        let refused = Timing::fit(ms(30_000), Some(ms(20_000))).unwrap_err();
        assert_eq!(refused.code, 64);
        assert!(refused.to_string().contains("at most 9s"), "{refused}");
        assert!(Timing::fit(ms(63_000), Some(ms(20_000))).is_ok());
        assert!(Timing::fit(ms(62_000), Some(ms(20_000))).is_err());
        assert!(Timing::fit(ms(1_000), Some(Duration::MAX)).is_err());
    }

    #[test]
    fn everything_is_over_before_the_end_and_leaves_a_third_for_renewals() {
        for ttl in [100, 500, 1_000, 7_000, 30_000, 600_000] {
            let timing = Timing::fit(ms(ttl), Some(largest_grace(ms(ttl)))).unwrap();
            let end = Instant::now().after(ms(ttl));
            let times = timing.times(end);
            assert!(times.term_at <= times.kill_at && times.kill_at < end);
            assert!(end.since(times.term_at) <= ms(ttl) / 3, "{ttl}");
            let now = times.now();
            assert!(now.kill_at <= times.kill_at && now.term_at <= now.kill_at);
            assert_eq!(times.to_string().parse(), Ok(times));
        }
    }
}
