//! Judges what happened: was the whole history one that locks may have?
//!
//! Many parties work at once, and faults come and go; no single assertion in between could say whether that was right.
//! So everything is written down with its time, and the invariants look at it afterwards. An operation that failed
//! is *unknown*, not undone: the server may have done it.

mod belief;
mod healing;
mod loss;
mod register;
mod token_order;

use std::collections::HashMap;
use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use lock_core::{Clock, FencingToken, Grant, Lease, LeaseId, LockGuard, LockName, OwnerId, Stamp};

/// How many violations are shown; the first ones tell the most.
const SHOWN: usize = 10;

/// One thing that happened.
#[derive(Clone, Debug)]
pub(crate) struct Record {
    /// When, since the start of the log.
    pub(crate) at: Duration,
    /// Which task saw it; a task does one thing at a time.
    pub(crate) actor: usize,
    pub(crate) name: LockName,
    pub(crate) event: Event,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// The actor asks for the name.
    Invoke,
    /// It was granted.
    Ok(FencingToken),
    /// Somebody else held it to the end of the wait.
    Busy,
    /// The operation failed or was given up: nothing is known.
    Unknown,
    /// The actor looked and believed to hold it.
    Held(FencingToken),
    /// The actor looked and learnt that it holds it no more.
    Lost(FencingToken),
    /// The actor is about to let go.
    Released(FencingToken),
    /// The server acknowledged a request that was sent at `sent`, and keeps the grant for `ttl` from then on.
    Refreshed {
        token: FencingToken,
        sent: Duration,
        ttl: Duration,
    },
    /// The fenced register took the write, or refused it.
    Write { token: FencingToken, accepted: bool },
    /// A fault was injected; `overlap` if two may believe because of it.
    Fault { overlap: bool },
    /// All faults are over.
    Healed,
}

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
        let name = name.clone();
        records.push(Record { at, actor, name, event });
    }

    /// Writes down what is learnt now and was true at `then` at the latest.
    pub(crate) fn record_since(&self, then: Stamp, actor: usize, name: &LockName, event: Event) {
        let mut records = self.records.lock().unwrap_or_else(PoisonError::into_inner);
        let at = then.since(self.start);
        let place = records.partition_point(|record| record.at <= at);
        let name = name.clone();
        records.insert(place, Record { at, actor, name, event });
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
        let name = guard.name().clone();
        records.push(Record { at, actor, name, event });
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

/// What the oracle says of a history.
#[derive(Clone, Debug)]
pub(crate) struct Verdict {
    pub(crate) operations: usize,
    pub(crate) faults: usize,
    pub(crate) seconds: f64,
    pub(crate) violations: Vec<String>,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} operations / {} faults / {:.1} seconds / {} violations",
            self.operations,
            self.faults,
            self.seconds,
            self.violations.len()
        )?;
        for violation in self.violations.iter().take(SHOWN) {
            write!(f, "\n  {violation}")?;
        }
        Ok(())
    }
}

/// Looks at a history, whose records are in the order of their times, from every side.
pub(crate) fn judge(records: &[Record]) -> Verdict {
    let count = |is: fn(&Event) -> bool| records.iter().filter(|r| is(&r.event)).count();
    let invariants = [
        token_order::violations,
        register::violations,
        belief::violations,
        loss::violations,
        healing::violations,
    ];
    Verdict {
        operations: count(|e| matches!(e, Event::Invoke | Event::Released(_) | Event::Write { .. })),
        faults: count(|e| matches!(e, Event::Fault { .. })),
        seconds: records.last().map_or(0.0, |r| r.at.as_secs_f64()),
        violations: invariants
            .into_iter()
            .flat_map(|invariant| invariant(records))
            .collect(),
    }
}

/// The records, name by name.
fn by_name(records: &[Record]) -> impl Iterator<Item = (&LockName, Vec<&Record>)> {
    let mut names: HashMap<&LockName, Vec<&Record>> = HashMap::new();
    for record in records {
        names.entry(&record.name).or_default().push(record);
    }
    names.into_iter()
}

#[cfg(test)]
mod hand_made {
    //! Histories for the invariants' own tests.

    use lock_core::Claim;

    use super::*;

    pub(super) fn at(ms: u64, actor: usize, event: Event) -> Record {
        Record {
            at: Duration::from_millis(ms),
            actor,
            name: LockName::new("n").unwrap(),
            event,
        }
    }

    pub(super) fn token(value: u64) -> FencingToken {
        FencingToken::new(value).unwrap()
    }

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

    #[test]
    fn a_good_history_has_no_violation_and_is_counted() {
        let ttl = Duration::from_millis(100);
        let sent = Duration::from_millis(1);
        let history = [
            at(1, 1, Event::Invoke),
            at(
                2,
                1,
                Event::Refreshed {
                    token: token(5),
                    sent,
                    ttl,
                },
            ),
            at(2, 1, Event::Ok(token(5))),
            at(3, 2, Event::Invoke),
            at(
                4,
                1,
                Event::Write {
                    token: token(5),
                    accepted: true,
                },
            ),
            at(5, 1, Event::Held(token(5))),
            at(6, 1, Event::Fault { overlap: false }),
            at(7, 1, Event::Released(token(5))),
            at(8, 2, Event::Unknown),
            at(9, 1, Event::Healed),
            at(10, 2, Event::Invoke),
            at(1000, 2, Event::Ok(token(7))),
        ];
        let verdict = judge(&history);
        assert_eq!(
            verdict.to_string(),
            "5 operations / 1 faults / 1.0 seconds / 0 violations"
        );
    }
}
