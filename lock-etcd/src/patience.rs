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

    /// How long a request may be without an answer. When half of that or a second is over, the member is asked whether it is there.
    pub(crate) fn limit(&self, now: Stamp) -> Duration {
        let shortest = self.table.shortest(now);
        shortest.map_or(self.longest, |ttl| self.longest.min(ttl / 5))
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
        assert_eq!(limit(0), 2000);
        for (id, ttl) in [(1, 600), (2, 5), (3, 3)] {
            let kept = Kept::new(id, Duration::from_secs(ttl), now, Err(format!("ns:lease/{id}")), 1);
            table.add(&kept, Some(ttl), now);
        }
        assert_eq!(limit(0), 600);
        assert_eq!(limit(4), 1000);
        // A fifth of the longest would be more than the request has.
        assert_eq!(limit(6), 2000);
    }
}
