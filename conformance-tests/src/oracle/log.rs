//! Writes a history while it happens.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use lock_core::{Clock, FencingToken, Grant, Lease, LeaseId, LockGuard, LockName, OwnerId, Stamp};

use super::{Event, Record, Verdict, judge};

/// A history that is being written.
pub(crate) struct Log {
    clock: Clock,
    start: Stamp,
    records: Mutex<Vec<Record>>,
    leases: Mutex<HashMap<LeaseKey, Kept>>,
}

/// Tells leases apart.
#[derive(PartialEq, Eq, Hash)]
enum LeaseKey {
    Owner(OwnerId),
    Shared(String),
}

/// What a lease keeps, and since when it is known to.
struct Kept {
    sent: Duration,
    grants: Vec<(LockName, FencingToken)>,
}

impl LeaseKey {
    fn of(lease: &Lease) -> Self {
        match lease.id() {
            LeaseId::Claim(claim) => Self::Owner(claim.owner()),
            other => Self::Shared(format!("{other:?}")),
        }
    }
}

impl Log {
    pub(crate) fn new() -> Self {
        let clock = Clock::system();
        Self {
            start: clock.now(),
            clock,
            records: Mutex::default(),
            leases: Mutex::default(),
        }
    }

    /// Writes down what happens now.
    pub(crate) fn record(&self, actor: usize, name: &LockName, event: Event) {
        let mut records = self.records.lock().unwrap_or_else(PoisonError::into_inner);
        // Read under the mutex, so that the records are in the order of their times.
        let at = self.clock.now().since(self.start);
        records.push(Record::new(at, actor, name.clone(), event));
    }

    /// Writes down what is learnt now and was true at `then` at the latest.
    pub(crate) fn record_since(&self, then: Stamp, actor: usize, name: &LockName, event: Event) {
        let mut records = self.records.lock().unwrap_or_else(PoisonError::into_inner);
        let at = then.since(self.start);
        let place = records.partition_point(|record| record.at <= at);
        records.insert(place, Record::new(at, actor, name.clone(), event));
    }

    /// Looks whether the actor believes, and writes it down with a time that is no later than the look.
    pub(crate) fn look(&self, actor: usize, guard: &LockGuard) -> bool {
        let mut records = self.records.lock().unwrap_or_else(PoisonError::into_inner);
        let at = self.clock.now().since(self.start);
        let held = guard.is_held();
        let event = if held {
            Event::Held(guard.token())
        } else {
            Event::Lost(guard.token())
        };
        records.push(Record::new(at, actor, guard.name().clone(), event));
        held
    }

    /// A backend granted what was asked for at `sent`.
    pub(crate) fn granted(&self, grant: &Grant, sent: Stamp) {
        let (name, token, ttl) = (grant.claim.name(), grant.token, grant.lease.ttl());
        let sent = {
            let mut leases = self.leases.lock().unwrap_or_else(PoisonError::into_inner);
            let sent = sent.since(self.start);
            let grants = Vec::new();
            let kept = leases
                .entry(LeaseKey::of(&grant.lease))
                .or_insert(Kept { sent, grants });
            if grant.lease.claim().is_some() {
                // Asked for again by its owner, which keeps it anew.
                kept.sent = sent;
            }
            kept.grants.push((name.clone(), token));
            // On a lease that others share already, a new grant adds nothing to what its last renewal promised.
            kept.sent
        };
        self.record(usize::MAX, name, Event::Refreshed { token, sent, ttl });
    }

    /// A backend acknowledged a renewal that was asked for at `sent`.
    pub(crate) fn refreshed(&self, lease: &Lease, sent: Stamp) {
        let (sent, ttl) = (sent.since(self.start), lease.ttl());
        let grants = {
            let mut leases = self.leases.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(kept) = leases.get_mut(&LeaseKey::of(lease)) else {
                return;
            };
            kept.sent = kept.sent.max(sent);
            kept.grants.clone()
        };
        for (name, token) in grants {
            self.record(usize::MAX, &name, Event::Refreshed { token, sent, ttl });
        }
    }

    pub(crate) fn verdict(&self) -> Verdict {
        let records = self.records.lock().unwrap_or_else(PoisonError::into_inner);
        judge(&records)
    }
}

#[cfg(test)]
mod tests {
    use lock_core::Claim;

    use super::super::hand_made::token;
    use super::*;

    fn granted(log: &Log, claim: &Claim, value: u64, lease: &Lease, sent: Stamp) {
        log.granted(&Grant::new(claim.clone(), token(value), lease.clone()), sent);
    }

    fn promises(log: &Log) -> Vec<(u64, Duration)> {
        let promise = |record: &Record| match record.event {
            Event::Refreshed { token, sent, .. } => Some((token.get(), sent)),
            _ => None,
        };
        log.records.lock().unwrap().iter().filter_map(promise).collect()
    }

    #[test]
    fn a_grant_that_is_asked_for_again_is_promised_anew() {
        let (log, ttl) = (Log::new(), Duration::from_secs(1));
        let claim = Claim::new("n".parse().unwrap(), ttl);
        for (value, after) in [(1, 0), (2, 900)] {
            let sent = log.start + Duration::from_millis(after);
            granted(&log, &claim, value, &Lease::for_claim(&claim, sent), sent);
        }
        assert_eq!(promises(&log), [(1, Duration::ZERO), (2, Duration::from_millis(900))]);
    }

    #[test]
    fn on_a_shared_lease_a_grant_is_promised_what_the_last_renewal_was() {
        let (log, ttl) = (Log::new(), Duration::from_secs(1));
        let at = |ms| log.start + Duration::from_millis(ms);
        let lease = Lease::shared("s", ttl, log.start);
        let claims = ["a", "b"].map(|name| Claim::new(name.parse().unwrap(), ttl));
        granted(&log, &claims[0], 1, &lease, at(0));
        granted(&log, &claims[1], 2, &lease, at(300));
        log.refreshed(&lease, at(400));
        let (start, renewed) = (Duration::ZERO, Duration::from_millis(400));
        assert_eq!(promises(&log), [(1, start), (2, start), (1, renewed), (2, renewed)]);
    }
}
