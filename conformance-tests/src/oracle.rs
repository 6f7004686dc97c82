//! Judges what happened: was the whole history one that locks may have?
//!
//! Many parties work at once, and faults come and go; no single assertion in between could say whether that was right.
//! So everything is written down with its time, and the invariants look at it afterwards. An operation that failed
//! is *unknown*, not undone: the server may have done it.
//!
//! A history of locks, from this suite or from elsewhere, can be judged:
//!
//! ```
//! use std::time::Duration;
//! use conformance_tests::oracle::{Event, Record, judge};
//! use lock_core::{FencingToken, LockName};
//!
//! let (name, token) = (LockName::new("stock")?, FencingToken::new(5)?);
//! let at = |ms, actor, event| Record::new(Duration::from_millis(ms), actor, name.clone(), event);
//! let verdict = judge(&[
//!     at(1, 0, Event::Invoke),
//!     at(2, 0, Event::Ok(token)),
//!     at(3, 1, Event::Ok(FencingToken::new(6)?)), // while the other one ...
//!     at(4, 0, Event::Held(token)), // ... still believes
//!     at(5, 0, Event::Released(token)),
//!     at(6, Record::NOBODY, Event::Healed),
//!     at(7, 0, Event::Ok(FencingToken::new(7)?)),
//! ]);
//! assert_eq!(verdict.violations.len(), 1);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! With serde a [`Record`] is text: docs/torture.md has its JSON.

mod belief;
mod healing;
mod log;
mod loss;
mod register;
mod token_order;

use std::collections::HashMap;
use std::fmt;
use std::time::Duration;

use lock_core::{FencingToken, LockName};
use serde::{Deserialize, Serialize};

pub(crate) use log::Log;

/// How many violations are shown; the first ones tell the most.
const SHOWN: usize = 10;

/// One thing that happened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Record {
    /// When, since the start of the history. For what was done, not before it was done; for a look at what is believed,
    /// not after the look.
    #[serde(rename = "at_ns", with = "nanos")]
    pub at: Duration,
    /// Who saw it; an actor does one thing at a time. [`Record::NOBODY`] for what no actor saw.
    #[serde(default = "nobody", skip_serializing_if = "is_nobody")]
    pub actor: usize,
    /// The lock; `None` for what concerns all of them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<LockName>,
    /// What happened.
    pub event: Event,
}

impl Record {
    /// The actor of what concerns all of them, such as a fault of the server.
    pub const NOBODY: usize = usize::MAX;

    /// What happened to that lock, or to all of them.
    #[must_use]
    pub fn new(at: Duration, actor: usize, name: impl Into<Option<LockName>>, event: Event) -> Self {
        let name = name.into();
        Self { at, actor, name, event }
    }
}

/// What can happen.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Event {
    /// The actor asks for the name.
    Invoke,
    /// It was granted.
    Ok(FencingToken),
    /// Another client held it to the end of the wait.
    Busy,
    /// The operation failed or was given up: nothing is known.
    Unknown,
    /// The actor looked and believed to hold it.
    Held(FencingToken),
    /// The actor looked and learnt that it holds it no more.
    Lost(FencingToken),
    /// The actor is about to let go.
    Released(FencingToken),
    /// The server acknowledged a request of that grant.
    Refreshed {
        /// The grant.
        token: FencingToken,
        /// When the request was sent.
        #[serde(rename = "sent_ns", with = "nanos")]
        sent: Duration,
        /// For how long from then on the server keeps the grant.
        #[serde(rename = "ttl_ns", with = "nanos")]
        ttl: Duration,
    },
    /// A fenced register took a write, or refused it.
    Write {
        /// What came with the write.
        token: FencingToken,
        /// Whether it was taken.
        accepted: bool,
    },
    /// A fault was injected: into the actor, or into what serves all of them.
    Fault {
        /// Which one, for people.
        what: String,
        /// Whether two may believe because of it.
        overlap: bool,
    },
    /// The fault that was injected into the actor is over.
    Over {
        /// Which one.
        what: String,
    },
    /// All faults are over. From here on every name can be acquired again.
    Healed,
}

fn nobody() -> usize {
    Record::NOBODY
}

fn is_nobody(actor: &usize) -> bool {
    *actor == Record::NOBODY
}

/// Times as whole numbers of nanoseconds.
mod nanos {
    use std::time::Duration;

    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(time: &Duration, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_u64(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX))
    }

    pub(super) fn deserialize<'a, D: Deserializer<'a>>(from: D) -> Result<Duration, D::Error> {
        u64::deserialize(from).map(Duration::from_nanos)
    }
}

impl Event {
    /// A fault in spite of which no two may believe.
    #[must_use]
    pub fn fault(what: impl Into<String>) -> Self {
        let (what, overlap) = (what.into(), false);
        Self::Fault { what, overlap }
    }
}

/// What the oracle says of a history.
///
/// Shows itself as `operations / faults / seconds / violations`, and the first violations.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Verdict {
    /// Locks that were asked for or released, and writes.
    pub operations: usize,
    /// Faults that were injected.
    pub faults: usize,
    /// The time from the start to the last record.
    pub seconds: f64,
    /// How often two believed at once because a fault had permitted it.
    pub permitted_overlaps: usize,
    /// What must not have happened, a sentence each.
    pub violations: Vec<String>,
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
#[must_use]
pub fn judge(records: &[Record]) -> Verdict {
    let count = |is: fn(&Event) -> bool| records.iter().filter(|r| is(&r.event)).count();
    let overlaps = belief::overlaps(records);
    let mut found = vec![overlaps.violations];
    found.extend(
        [
            token_order::violations,
            register::violations,
            loss::violations,
            healing::violations,
        ]
        .map(|invariant| invariant(records)),
    );
    // Some of each kind first, as not all are shown.
    let each = SHOWN / found.len();
    let (first, rest): (Vec<_>, Vec<_>) = found
        .into_iter()
        .map(|mut of_a_kind| {
            let rest = of_a_kind.split_off(of_a_kind.len().min(each));
            (of_a_kind, rest)
        })
        .unzip();
    Verdict {
        operations: count(|e| matches!(e, Event::Invoke | Event::Released(_) | Event::Write { .. })),
        faults: count(|e| matches!(e, Event::Fault { .. })),
        seconds: records.last().map_or(0.0, |r| r.at.as_secs_f64()),
        permitted_overlaps: overlaps.permitted,
        violations: first.into_iter().chain(rest).flatten().collect(),
    }
}

/// The records, name by name.
fn by_name(records: &[Record]) -> impl Iterator<Item = (&LockName, Vec<&Record>)> {
    let mut names: HashMap<&LockName, Vec<&Record>> = HashMap::new();
    for record in records {
        if let Some(name) = &record.name {
            names.entry(name).or_default().push(record);
        }
    }
    // The same history gets the same verdict, word for word.
    let mut names: Vec<_> = names.into_iter().collect();
    names.sort_unstable_by_key(|(name, _)| name.as_str());
    names.into_iter()
}

#[cfg(test)]
mod hand_made {
    //! Histories for the invariants' own tests.

    use super::*;

    pub(super) fn at(ms: u64, actor: usize, event: Event) -> Record {
        Record::new(Duration::from_millis(ms), actor, LockName::new("n").unwrap(), event)
    }

    pub(super) fn token(value: u64) -> FencingToken {
        FencingToken::new(value).unwrap()
    }

    /// For 100 ms.
    pub(super) fn refreshed(value: u64, sent_ms: u64) -> Event {
        Event::Refreshed {
            token: token(value),
            sent: Duration::from_millis(sent_ms),
            ttl: Duration::from_millis(100),
        }
    }

    pub(super) fn write(value: u64, accepted: bool) -> Event {
        let token = token(value);
        Event::Write { token, accepted }
    }

    pub(super) fn failover(overlap: bool) -> Event {
        let what = "failover".to_owned();
        Event::Fault { what, overlap }
    }

    #[test]
    fn a_good_history_has_no_violation_and_is_counted() {
        let history = [
            at(1, 1, Event::Invoke),
            at(2, 1, refreshed(5, 1)),
            at(2, 1, Event::Ok(token(5))),
            at(3, 2, Event::Invoke),
            at(4, 1, write(5, true)),
            at(5, 1, Event::Held(token(5))),
            at(6, 1, Event::fault("pause")),
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

    #[test]
    fn a_record_is_read_as_it_was_written() {
        for (record, text) in [
            (
                at(1, 0, Event::Ok(token(5))),
                r#"{"at_ns":1000000,"actor":0,"name":"n","event":{"ok":5}}"#,
            ),
            (
                Record::new(Duration::from_secs(1), Record::NOBODY, None, Event::Healed),
                r#"{"at_ns":1000000000,"event":"healed"}"#,
            ),
            (
                Record::new(Duration::from_nanos(7), 1, None, refreshed(5, 2)),
                r#"{"at_ns":7,"actor":1,"event":{"refreshed":{"token":5,"sent_ns":2000000,"ttl_ns":100000000}}}"#,
            ),
        ] {
            assert_eq!(serde_json::to_string(&record).unwrap(), text);
            assert_eq!(serde_json::from_str::<Record>(text).unwrap(), record);
        }
    }
}
