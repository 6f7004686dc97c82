//! What was measured.

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

use crate::backend::Backend;
use crate::clock::Processors;
use crate::contestant::Failure;

/// All that one run showed of one backend.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Report {
    pub(crate) backend: Backend,
    pub(crate) server: String,
    pub(crate) machine: Machine,
    /// Whether less was measured than a comparison needs.
    pub(crate) quick: bool,
    pub(crate) checks: Vec<Check>,
    pub(crate) measures: Vec<Measure>,
    pub(crate) bars: Vec<Bar>,
}

/// What it ran on.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Machine {
    pub(crate) processor: String,
    pub(crate) cores: usize,
    pub(crate) kernel: String,
    /// The mean number of processes that ran or wanted to, over the last minute, before the run and after it.
    pub(crate) load: [f64; 2],
    /// Which part of the processors' time other machines of the same host took during the run.
    pub(crate) stolen: Option<f64>,
}

/// What a contestant does with a lock that is held.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Check {
    pub(crate) who: String,
    /// Whether a second client is kept out.
    pub(crate) clients: Finding,
    /// Whether a second task of the same client is kept out.
    pub(crate) tasks: Finding,
    /// Whether who comes second waits and gets the lock.
    pub(crate) waits: Finding,
}

/// What a check found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Finding {
    Yes,
    /// With what was seen instead.
    No(String),
    /// Such a case does not arise.
    NotApplicable,
}

impl Check {
    /// Whether it takes part where many tasks of a client want one lock.
    pub(crate) fn is_fit_for_tasks(&self) -> bool {
        self.is_fit_for_processes() && self.tasks == Finding::Yes
    }

    /// Whether it takes part where many processes want one lock.
    pub(crate) fn is_fit_for_processes(&self) -> bool {
        self.clients == Finding::Yes && self.waits == Finding::Yes
    }

    /// Whether it is a lock at all.
    pub(crate) fn excludes(&self) -> bool {
        !matches!(self.clients, Finding::No(_)) && !matches!(self.tasks, Finding::No(_))
    }
}

/// One kind of measurement.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Measure {
    pub(crate) id: String,
    pub(crate) title: String,
    /// What the values of a row are, the first of which is drawn.
    pub(crate) columns: Vec<Column>,
    pub(crate) rows: Vec<Row>,
    pub(crate) notes: Vec<String>,
}

/// What the values below each other are.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Column {
    pub(crate) name: String,
    pub(crate) unit: String,
}

/// What one contestant did in one case.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Row {
    pub(crate) who: String,
    pub(crate) kind: Kind,
    /// Empty where there is one only.
    pub(crate) case: String,
    pub(crate) values: Vec<Option<f64>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Kind {
    Ours,
    Peer,
    Floor,
}

impl Measure {
    pub(crate) fn new(id: &str, title: &str, columns: &[(&str, &str)]) -> Self {
        let columns = columns.iter().map(|(name, unit)| Column {
            name: (*name).to_owned(),
            unit: (*unit).to_owned(),
        });
        Self {
            id: id.to_owned(),
            title: title.to_owned(),
            columns: columns.collect(),
            rows: Vec::new(),
            notes: Vec::new(),
        }
    }

    pub(crate) fn row(&mut self, who: &str, kind: Kind, case: &str, values: &[Option<f64>]) {
        self.rows.push(Row {
            who: who.to_owned(),
            kind,
            case: case.to_owned(),
            values: values.to_vec(),
        });
    }

    /// The value of that contestant in that case, in the column of that number.
    pub(crate) fn value(&self, who: &str, case: &str, column: usize) -> Option<f64> {
        let row = self.rows.iter().find(|row| row.who == who && row.case == case)?;
        row.values.get(column).copied().flatten()
    }

    /// The values of all peers in that case.
    pub(crate) fn of_peers(&self, case: &str, column: usize) -> Vec<f64> {
        let rows = self
            .rows
            .iter()
            .filter(|row| row.kind == Kind::Peer && row.case == case);
        rows.filter_map(|row| row.values.get(column).copied().flatten())
            .collect()
    }
}

/// What a figure should be at least, or at most.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Bar {
    pub(crate) of: String,
    pub(crate) figure: String,
    pub(crate) value: f64,
    pub(crate) bar: String,
    pub(crate) met: bool,
}

/// Times, in nanoseconds.
pub(crate) struct Times(Histogram<u64>);

impl Times {
    pub(crate) fn new() -> Result<Self, Failure> {
        Ok(Self(Histogram::new(3)?))
    }

    pub(crate) fn add(&mut self, nanoseconds: u64) -> Result<(), Failure> {
        Ok(self.0.record(nanoseconds)?)
    }

    /// Adds all that the other has.
    pub(crate) fn append(&mut self, other: &Self) -> Result<(), Failure> {
        Ok(self.0.add(&other.0)?)
    }

    pub(crate) fn count(&self) -> u64 {
        self.0.len()
    }

    /// The quantile, in units of that many nanoseconds; None if there was nothing.
    pub(crate) fn quantile(&self, quantile: f64, unit: f64) -> Option<f64> {
        (!self.0.is_empty()).then(|| self.0.value_at_quantile(quantile) as f64 / unit)
    }
}

/// Nanoseconds in a microsecond, and in a millisecond.
pub(crate) const MICRO: f64 = 1e3;
pub(crate) const MILLI: f64 = 1e6;

/// Of numbers in any order; None if there are none.
pub(crate) fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_unstable_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

impl Machine {
    /// At the end of a run that began with that load, and when the processors had been used that much.
    pub(crate) fn look(load_before: f64, before: Option<Processors>) -> Self {
        let text = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let processor = text("/proc/cpuinfo")
            .lines()
            .find_map(|line| line.strip_prefix("model name")?.split_once(':'))
            .map_or("a processor of unknown model".to_owned(), |(_, name)| {
                name.trim().to_owned()
            });
        let stolen = Processors::look().zip(before);
        Self {
            processor,
            cores: std::thread::available_parallelism().map_or(0, Into::into),
            kernel: text("/proc/sys/kernel/osrelease").trim().to_owned(),
            load: [load_before, load()],
            stolen: stolen.map(|(after, before)| after.stolen_since(&before)),
        }
    }
}

/// The load of the machine over the last minute; zero where the system does not tell.
pub(crate) fn load() -> f64 {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().and_then(|load| load.parse().ok()).unwrap_or(0.0)
}
