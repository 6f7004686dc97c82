//! When a command has to end so that it has ended before its lock does.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// A reading of the clock that leases are measured with: the time since boot, also that in suspend. All processes of one `fencelock run`
/// read the same clock.
pub(crate) type Instant = Duration;

pub(crate) fn now() -> Instant {
    let now = clock_gettime(ClockId::Boottime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// When a command gets SIGTERM, and when SIGKILL.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    pub(crate) term_at: Instant,
    pub(crate) kill_at: Instant,
}

impl Times {
    pub(crate) fn new(kill_at: Instant, grace: Duration) -> Self {
        Self {
            term_at: kill_at.saturating_sub(grace),
            kill_at,
        }
    }

    /// Longer than any release takes.
    pub(crate) fn never() -> Self {
        Self::new(now() + Duration::from_secs(365 * 24 * 60 * 60), Duration::ZERO)
    }

    /// Both now or earlier than so far: SIGTERM at once, and the same grace as so far.
    pub(crate) fn now(self) -> Self {
        let term_at = now();
        let grace = self.kill_at.saturating_sub(self.term_at);
        Self {
            term_at,
            kill_at: self.kill_at.min(term_at + grace),
        }
    }
}

/// How a command is ended: SIGTERM, then SIGKILL after `grace`, and the last `margin` of the lease for SIGKILL to do its work.
///
/// **Invariant.** `grace + margin` is at most a third of the ttl. A renewal is due when two thirds are left, so it may fail and be tried
/// again for a third of the ttl before the command gets SIGTERM.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timing {
    pub(crate) grace: Duration,
    /// The grace of a command that was told to end before: zero, but on a terminal.
    pub(crate) shortest_grace: Duration,
    pub(crate) margin: Duration,
}

/// As long as most commands need to tidy up.
const USUAL_GRACE: Duration = Duration::from_secs(5);

impl Timing {
    /// The timing for a ttl: with the grace given, or else with the usual one, cut to what fits. Fails if the grace given does not fit.
    pub(crate) fn fit(ttl: Duration, grace: Option<Duration>) -> Result<Self, String> {
        let margin = (ttl / 10).clamp(Duration::from_millis(20), Duration::from_secs(1));
        let fits = (ttl / 3).saturating_sub(margin);
        let largest = Duration::new(fits.as_secs(), fits.subsec_millis() * 1_000_000);
        let grace = grace.unwrap_or(USUAL_GRACE.min(largest));
        if grace > largest {
            let [grace, ttl, largest] = [grace, ttl, largest].map(shown);
            return Err(format!(
                "a grace of {grace} does not fit into {ttl}: give at most {largest}, or a longer --ttl (and --max-hold)"
            ));
        }
        Ok(Self {
            grace,
            shortest_grace: Duration::ZERO,
            margin,
        })
    }

    /// The timing where `fencelock` is in the process group of the command, and needs time between SIGTERM and SIGKILL to leave it.
    pub(crate) fn in_shared_group(self) -> Self {
        let shortest_grace = self.margin / 2;
        Self {
            grace: self.grace.max(shortest_grace),
            shortest_grace,
            ..self
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
            assert!(refused.contains(&shown(ms(largest))), "{refused}");
            for grace in [0, largest] {
                let timing = Timing::fit(ms(ttl), Some(ms(grace))).unwrap();
                let shared = timing.in_shared_group();
                assert!(timing.grace == ms(grace) && shared.shortest_grace >= ms(10));
                for timing in [timing, shared] {
                    assert!(timing.shortest_grace <= timing.grace);
                    assert!(timing.grace + timing.margin <= ms(ttl).max(ms(90)) / 3, "{ttl}");
                }
            }
            let times = Times::new(now() + ms(ttl), ms(largest));
            let sooner = times.now();
            assert!(sooner.kill_at <= times.kill_at && sooner.term_at <= now());
        }
        assert!(Timing::fit(ms(1_000), Some(Duration::MAX)).is_err());
    }
}
