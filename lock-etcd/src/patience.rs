//! How long a member may be silent before it is left for another.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The time after which a member that does not answer is given up, for all connections of a client.
///
/// It follows from the shortest ttl of the leases that the client keeps: a renewal is due when a third of the ttl is over, so a fifth for
/// the member that hangs leaves almost half of the ttl for the next one.
#[derive(Clone, Debug)]
pub(crate) struct Patience {
    /// Without any lease.
    longest: Duration,
    /// In nanoseconds.
    limit: Arc<AtomicU64>,
}

impl Patience {
    /// For requests that may take that long.
    pub(crate) fn new(op_timeout: Duration) -> Self {
        // The other half of the request's time is for the next member.
        let longest = op_timeout / 2;
        let patience = Self {
            longest,
            limit: Arc::default(),
        };
        patience.keeps(None);
        patience
    }

    /// The shortest ttl of the leases that the client keeps.
    pub(crate) fn keeps(&self, shortest: Option<Duration>) {
        let limit = shortest.map_or(self.longest, |ttl| self.longest.min(ttl / 5));
        let nanos = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
        self.limit.store(nanos, Ordering::Release);
    }

    pub(crate) fn limit(&self) -> Duration {
        Duration::from_nanos(self.limit.load(Ordering::Acquire))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shortest_ttl_decides_and_the_limit_of_a_request_is_never_exceeded() {
        let patience = Patience::new(Duration::from_secs(4));
        let limit = |shortest: Option<u64>| {
            patience.keeps(shortest.map(Duration::from_secs));
            patience.limit()
        };
        assert_eq!(limit(None), Duration::from_secs(2));
        assert_eq!(limit(Some(5)), Duration::from_secs(1));
        assert_eq!(limit(Some(600)), Duration::from_secs(2));
        assert_eq!(limit(None), Duration::from_secs(2));
    }
}
