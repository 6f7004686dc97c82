//! When a command has to go so that it is gone before its lock is.

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
        let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
        Self(
            seconds
                .saturating_mul(1_000_000_000)
                .saturating_add(u64::try_from(now.tv_nsec).unwrap_or(0)),
        )
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

/// How a command is ended: SIGTERM, then SIGKILL after `grace`, and the last `margin` of the lease for SIGKILL to do its
/// work.
///
/// **Invariant.** `grace + margin` is at most a third of the ttl. A renewal is due when two thirds are left, so it may
/// fail and be tried again for a third of the ttl before the command has to be told.
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
        let margin = margin(ttl);
        let largest = largest_grace(ttl);
        let grace = match grace {
            Some(grace) if grace > largest => {
                return Err(Failure::usage(format!(
                    "a grace of {} does not fit into a ttl of {}: at most {}, or a ttl of at least {}",
                    shown(grace),
                    shown(ttl),
                    shown(largest),
                    shown(smallest_ttl(grace)),
                )));
            }
            Some(grace) => grace,
            None => USUAL_GRACE.min(largest),
        };
        Ok(Self { grace, margin })
    }

    /// When the command is told to go if the lease still ends at `deadline`.
    pub(crate) fn term_at(self, deadline: Instant) -> Instant {
        self.kill_at(deadline).before(self.grace)
    }

    /// When it is killed at the latest.
    pub(crate) fn kill_at(self, deadline: Instant) -> Instant {
        deadline.before(self.margin)
    }
}

fn margin(ttl: Duration) -> Duration {
    (ttl / 10).clamp(Duration::from_millis(20), Duration::from_secs(1))
}

fn largest_grace(ttl: Duration) -> Duration {
    whole_millis((ttl / 3).saturating_sub(margin(ttl)))
}

/// The next whole second of a ttl into which that grace fits.
fn smallest_ttl(grace: Duration) -> Duration {
    let mut ttl = Duration::from_secs(grace.as_secs().saturating_mul(3));
    while largest_grace(ttl) < grace && ttl < Duration::MAX / 2 {
        ttl += Duration::from_secs(1);
    }
    ttl
}

/// A time as people write it, to the millisecond: `1d 1h 1m 1s 1ms`. The options take it in the same form.
pub(crate) fn shown(d: Duration) -> String {
    let (seconds, millis) = (d.as_secs(), u64::from(d.subsec_millis()));
    let parts = [
        (seconds / 86_400, "d"),
        (seconds / 3_600 % 24, "h"),
        (seconds / 60 % 60, "m"),
        (seconds % 60, "s"),
        (millis, "ms"),
    ];
    let parts = parts.iter().filter(|(count, _)| *count > 0);
    let parts: Vec<String> = parts.map(|(count, unit)| format!("{count}{unit}")).collect();
    if parts.is_empty() {
        return "0s".to_owned();
    }
    parts.join(" ")
}

fn whole_millis(d: Duration) -> Duration {
    Duration::new(d.as_secs(), d.subsec_millis() * 1_000_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    #[test]
    fn the_usual_grace_is_cut_to_what_fits() {
        for (ttl, grace) in [(30_000, 5_000), (15_000, 4_000), (1_000, 233), (100, 13), (1, 0)] {
            assert_eq!(Timing::fit(ms(ttl), None).unwrap().grace, ms(grace), "{ttl}");
        }
    }

    #[test]
    fn a_grace_that_does_not_fit_is_refused_with_the_largest_that_does() {
        assert_eq!(Timing::fit(ms(30_000), Some(ms(9_000))).unwrap().grace, ms(9_000));
        let refused = Timing::fit(ms(30_000), Some(ms(20_000))).unwrap_err();
        assert_eq!(refused.code, 64);
        assert_eq!(
            refused.to_string(),
            "a grace of 20s does not fit into a ttl of 30s: at most 9s, or a ttl of at least 1m 3s"
        );
        assert!(Timing::fit(ms(63_000), Some(ms(20_000))).is_ok());
        assert!(Timing::fit(ms(62_000), Some(ms(20_000))).is_err());
    }

    #[test]
    fn everything_is_over_before_the_deadline_and_leaves_a_third_for_renewals() {
        for ttl in [100, 500, 1_000, 7_000, 30_000, 600_000] {
            let ttl = ms(ttl);
            let timing = Timing::fit(ttl, Some(largest_grace(ttl))).unwrap();
            let deadline = Instant::now().after(ttl);
            assert!(timing.kill_at(deadline) < deadline);
            assert!(timing.term_at(deadline) <= timing.kill_at(deadline));
            assert!(deadline.since(timing.term_at(deadline)) <= ttl / 3, "{ttl:?}");
        }
    }

    #[test]
    fn a_time_is_shown_in_units_that_the_options_take() {
        for (millis, text) in [
            (0, "0s"),
            (100, "100ms"),
            (63_000, "1m 3s"),
            (86_400_000, "1d"),
            (90_061_001, "1d 1h 1m 1s 1ms"),
            (863_999_913_600_000, "9999999d"),
        ] {
            assert_eq!(shown(ms(millis)), text);
            assert_eq!(crate::arguments::time(text), Ok(ms(millis)));
        }
    }

    #[test]
    fn an_absurd_grace_is_refused_at_once() {
        assert!(Timing::fit(ms(1_000), Some(Duration::MAX)).is_err());
    }
}
