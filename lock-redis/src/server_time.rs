//! What this client knows of the server's clock.

use std::time::Duration;

use lock_core::Stamp;

/// The latest usable reading of the server's clock.
///
/// A reading was taken between the sending of the request and the arrival of the answer. So at any later stamp the server's
/// clock shows at the most the reading plus the time since the sending. That bound is what is used: with it a lease is never
/// given less than it was asked for merely because the answer took long.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ServerTime {
    micros: u64,
    sent: Stamp,
    received: Stamp,
}

/// A reading that is older gives way to a less narrow one: clocks drift, and may be set.
const STALE: Duration = Duration::from_secs(10);

impl ServerTime {
    pub(crate) fn new(micros: u64, sent: Stamp, received: Stamp) -> Self {
        Self { micros, sent, received }
    }

    /// The most that the server's clock can show at `stamp`, in microseconds of Unix time.
    pub(crate) fn latest(&self, stamp: Stamp) -> u64 {
        self.micros.saturating_add(micros(stamp.since(self.sent)))
    }

    /// The least that the server's clock can show at `stamp`, in microseconds of Unix time.
    pub(crate) fn earliest(&self, stamp: Stamp) -> u64 {
        self.micros.saturating_add(micros(stamp.since(self.received)))
    }

    /// The better one of two readings.
    pub(crate) fn improved_by(self, newer: Self) -> Self {
        let now = newer.received;
        let narrower = newer.latest(now) <= self.latest(now);
        let was_set = newer.earliest(now) > self.latest(now);
        if narrower || was_set || now.since(self.received) > STALE {
            newer
        } else {
            self
        }
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use lock_core::Clock;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn a_slow_answer_does_not_spoil_what_is_known_unless_that_is_old_or_wrong() {
        let (clock, _) = Clock::manual();
        let start = clock.now();
        let good = ServerTime::new(1_000_000, start, start + MS);
        assert_eq!(
            (good.latest(start + 15 * MS), good.earliest(start + 15 * MS)),
            (1_015_000, 1_014_000)
        );
        let at = |micros, sent, received| ServerTime::new(micros, start + sent * MS, start + received * MS);
        for (reading, is_better) in [
            (at(1_900_000, 500, 1000), false),
            (at(20_900_000, 19_500, 20_000), true),
            // The server's clock was set forward, or back.
            (at(9_000_000, 500, 1000), true),
            (at(500_000, 500, 1000), true),
        ] {
            let known = good.improved_by(reading).micros;
            assert_eq!(known, if is_better { reading.micros } else { good.micros });
        }
    }
}
