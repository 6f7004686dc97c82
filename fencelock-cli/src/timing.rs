//! When a command has to end so that it has ended before its lock does.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use crate::exit::Failure;

/// A reading of the clock that leases are measured with: the time since boot, also that in suspend. All processes of one `fencelock run`
/// read the same clock.
pub(crate) type Instant = Duration;

pub(crate) fn now() -> Instant {
    let now = clock_gettime(ClockId::Boottime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
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
        let term_at = now();
        let grace = self.kill_at.saturating_sub(self.term_at);
        Self {
            term_at,
            kill_at: self.kill_at.min(term_at + grace),
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

/// How a command is ended: SIGTERM, then SIGKILL after `grace`, and the last `margin` of the lease for SIGKILL to do its work.
///
/// **Invariant.** `grace + margin` is at most a third of the ttl. A renewal is due when two thirds are left, so it may fail and be tried
/// again for a third of the ttl before the command gets SIGTERM.
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
        let margin = (ttl / 10).clamp(Duration::from_millis(20), Duration::from_secs(1));
        let fits = (ttl / 3).saturating_sub(margin);
        let largest = Duration::new(fits.as_secs(), fits.subsec_millis() * 1_000_000);
        match grace {
            Some(grace) if grace > largest => Err(Failure::usage(format!(
                "a grace of {} does not fit into {}: give at most {}, or a longer --ttl (and --max-hold)",
                shown(grace),
                shown(ttl),
                shown(largest),
            ))),
            _ => Ok(Self {
                grace: grace.unwrap_or(USUAL_GRACE.min(largest)),
                margin,
            }),
        }
    }

    /// The times for a lock that ends at `end` unless it is renewed.
    pub(crate) fn times(self, end: Instant) -> Times {
        let kill_at = end.saturating_sub(self.margin);
        Times {
            term_at: kill_at.saturating_sub(self.grace),
            kill_at,
        }
    }
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

    #[test]
    fn a_grace_is_cut_to_what_fits_or_refused_and_leaves_a_third_of_the_ttl_for_renewals() {
        let ms = Duration::from_millis;
        for (ttl, usual, largest) in [
            (600_000, 5_000, 199_000),
            (30_000, 5_000, 9_000),
            (15_000, 4_000, 4_000),
            (1_000, 233, 233),
            (100, 13, 13),
            (1, 0, 0),
        ] {
            assert_eq!(Timing::fit(ms(ttl), None).unwrap().grace, ms(usual), "{ttl}");
            let refused = Timing::fit(ms(ttl), Some(ms(largest + 1))).unwrap_err();
            assert_eq!(refused.code, 64);
            assert!(refused.to_string().contains(&shown(ms(largest))), "{refused}");
            let end = now() + ms(ttl);
            let times = Timing::fit(ms(ttl), Some(ms(largest))).unwrap().times(end);
            assert!(
                times.kill_at < end && end - times.term_at <= ms(ttl).max(ms(60)) / 3,
                "{ttl}"
            );
            let sooner = times.now();
            assert!(sooner.kill_at <= times.kill_at && sooner.term_at <= now());
        }
        assert!(Timing::fit(ms(1_000), Some(Duration::MAX)).is_err());
    }
}
