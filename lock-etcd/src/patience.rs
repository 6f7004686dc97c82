//! How long a member may be silent before it is left for another.

use std::sync::Arc;
use std::time::Duration;

use lock_core::Stamp;

use crate::table::Table;

/// The time after which a member that does not answer is given up, for all connections of a client.
///
/// It follows from the shortest ttl of the leases that the client keeps: a renewal is due when a third of the ttl is over, so a fifth for
/// the member that hangs leaves almost half of the ttl for the next one. A quarter would be too long: so long the core waits for a
/// renewal before it sends another one.
#[derive(Clone)]
pub(crate) struct Patience {
    /// Without any lease.
    longest: Duration,
    table: Arc<Table>,
}

impl Patience {
    /// For requests that may take that long, of a client with these leases.
    pub(crate) fn new(op_timeout: Duration, table: Arc<Table>) -> Self {
        Self {
            // The other half of the request's time is for the next member.
            longest: op_timeout / 2,
            table,
        }
    }

    /// The shortest ttl of the leases that the client keeps at `now`, if the limit follows from it.
    pub(crate) fn deciding_ttl(&self, now: Stamp) -> Option<Duration> {
        self.table.shortest(now).filter(|ttl| *ttl / 5 < self.longest)
    }

    /// How long a request may be without an answer. When half of that or a second is over, the member is asked whether it is there.
    pub(crate) fn limit(&self, now: Stamp) -> Duration {
        self.deciding_ttl(now).map_or(self.longest, |ttl| ttl / 5)
    }
}

#[cfg(test)]
mod tests {
    use lock_core::Clock;

    use super::*;
    use crate::leases::Kept;

    #[test]
    fn the_shortest_ttl_decides_for_as_long_as_its_lease_and_half_of_a_request_s_time_is_left() {
        let table = Arc::new(Table::default());
        let patience = Patience::new(Duration::from_secs(4), Arc::clone(&table));
        let now = Clock::system().now();
        let limit = |later: u64| patience.limit(now + Duration::from_secs(later)).as_millis();
        let deciding = |later: u64| patience.deciding_ttl(now + Duration::from_secs(later));
        assert_eq!((limit(0), deciding(0)), (2000, None));
        for (id, ttl) in [(1, 600), (2, 5), (3, 3)] {
            let kept = Kept::new(id, Duration::from_secs(ttl), now, Err(format!("ns:lease/{id}")), 1);
            table.add(&kept, Some(ttl), now);
        }
        assert_eq!((limit(0), deciding(0)), (600, Some(Duration::from_secs(3))));
        assert_eq!((limit(4), deciding(4)), (1000, Some(Duration::from_secs(5))));
        // A fifth of the longest would be more than the request has.
        assert_eq!((limit(6), deciding(6)), (2000, None));
    }
}
