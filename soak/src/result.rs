//! What a run came to, and the file of its history.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Write};
use std::time::Duration;

use conformance_tests::oracle::{Event, Record, Verdict, judge};
use serde::{Deserialize, Serialize};

const FORMAT: &str = "fencelock history 2";

/// Everything that happened, and under which circumstances.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct History {
    format: String,
    /// For people: what was run, where, with which seed.
    pub(crate) about: BTreeMap<String, String>,
    /// In the order of their times.
    pub(crate) records: Vec<Record>,
}

impl History {
    pub(crate) fn new(about: BTreeMap<String, String>, records: Vec<Record>) -> Self {
        let format = FORMAT.to_owned();
        Self { format, about, records }
    }

    /// Reads what [`write`](Self::write) has written, or another program in that format, with the records in any order.
    pub(crate) fn read(text: &str) -> io::Result<Self> {
        let mut history: Self = serde_json::from_str(text)?;
        if history.format != FORMAT {
            return Err(io::Error::other(format!("its \"format\" is not {FORMAT:?}")));
        }
        history.records.sort_by_key(|record| record.at);
        Ok(history)
    }

    /// With a record on each line.
    pub(crate) fn write(&self, mut to: impl Write) -> io::Result<()> {
        let about = serde_json::to_string(&self.about)?;
        write!(to, "{{\"format\": {FORMAT:?}, \"about\": {about}, \"records\": [")?;
        for (i, record) in self.records.iter().enumerate() {
            let comma = if i == 0 { "" } else { "," };
            write!(to, "{comma}\n{}", serde_json::to_string(record)?)?;
        }
        writeln!(to, "\n]}}")
    }
}

/// The verdict and the figures. It shows itself in lines.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) verdict: Verdict,
    grants: usize,
    losses: usize,
    refused: usize,
    /// Acknowledged refreshes: what "believed longer than promised" is judged by.
    refreshes: usize,
    /// For how long no fault permitted two holders.
    exclusive: Duration,
    /// How many faults of each kind there were.
    faults: BTreeMap<String, usize>,
}

impl Outcome {
    pub(crate) fn of(records: &[Record]) -> Self {
        let count = |is: fn(&Event) -> bool| records.iter().filter(|record| is(&record.event)).count();
        let mut faults = BTreeMap::new();
        // The server has one fault at a time.
        let (mut since, mut permitted) = (None, Duration::ZERO);
        for record in records {
            match &record.event {
                Event::Fault { what, overlap } => {
                    let kind = what.split(':').next().unwrap_or_default();
                    *faults.entry(kind.to_owned()).or_default() += 1;
                    let lasts = *overlap && record.actor == Record::NOBODY;
                    since = since.or(lasts.then_some(record.at));
                }
                Event::Over { .. } if record.actor == Record::NOBODY => {
                    permitted += since.take().map_or(Duration::ZERO, |since| record.at - since);
                }
                _ => {}
            }
        }
        let end = records.last().map_or(Duration::ZERO, |record| record.at);
        Self {
            verdict: judge(records),
            grants: count(|event| matches!(event, Event::Ok(_))),
            losses: count(|event| matches!(event, Event::Lost(_))),
            refused: count(|event| matches!(event, Event::Write { accepted: false, .. })),
            refreshes: count(|event| matches!(event, Event::Refreshed { .. })),
            exclusive: end - permitted,
            faults,
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { verdict, faults, .. } = self;
        let faults: Vec<_> = faults.iter().map(|(kind, count)| format!("{kind} ({count})")).collect();
        writeln!(f, "{verdict}")?;
        writeln!(f, "  faults: {}", faults.join("; "))?;
        writeln!(
            f,
            "  {} grants, {} losses, {} stale writes refused, {} permitted overlaps",
            self.grants, self.losses, self.refused, verdict.permitted_overlaps
        )?;
        write!(
            f,
            "  judged: tokens, fences and losses all the time; {} promises of the server; exclusion in {:.1} of {:.1} s",
            self.refreshes,
            self.exclusive.as_secs_f64(),
            verdict.seconds
        )
    }
}
