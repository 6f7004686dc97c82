//! What a run showed: figures of each contestant, several of each kind.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::backend::Backend;
use crate::contestant::Result;

/// How often each figure is measured.
pub(crate) const ROUNDS: usize = 3;

/// One run on one backend.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Report {
    pub(crate) backend: Backend,
    pub(crate) server: String,
    pub(crate) machine: String,
    /// Load of the machine before the run and after it.
    pub(crate) load: [f64; 2],
    pub(crate) contestants: Vec<String>,
    pub(crate) rows: Vec<Row>,
    pub(crate) notes: Vec<String>,
}

/// One kind of figure.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Row {
    pub(crate) title: String,
    pub(crate) unit: String,
    /// The contestant that the others are compared with.
    pub(crate) reference: Option<String>,
    /// By contestant, a value of each round.
    pub(crate) rounds: BTreeMap<String, Vec<f64>>,
}

impl Report {
    /// Adds what one contestant did in the next round.
    pub(crate) fn add(&mut self, title: &str, unit: &str, reference: Option<&str>, who: &str, value: f64) {
        let at = self.rows.iter().position(|row| row.title == title);
        let at = at.unwrap_or_else(|| {
            self.rows.push(Row {
                title: title.to_owned(),
                unit: unit.to_owned(),
                reference: reference.map(str::to_owned),
                rounds: BTreeMap::new(),
            });
            self.rows.len() - 1
        });
        if !self.contestants.iter().any(|known| known == who) {
            self.contestants.push(who.to_owned());
        }
        self.rows[at].rounds.entry(who.to_owned()).or_default().push(value);
    }

    pub(crate) fn row(&self, title: &str) -> Option<&Row> {
        self.rows.iter().find(|row| row.title == title)
    }

    pub(crate) fn note(&mut self, note: String) {
        if !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }
}

impl Row {
    pub(crate) fn median(&self, who: &str) -> Option<f64> {
        quantile(&mut self.rounds.get(who)?.clone(), 0.5).ok()
    }

    /// The median of the quotients of each round; `None` for the reference itself.
    pub(crate) fn ratio(&self, who: &str) -> Option<f64> {
        let reference = self.reference.as_ref().filter(|reference| *reference != who)?;
        let pairs = self.rounds.get(who)?.iter().zip(self.rounds.get(reference)?);
        let mut ratios: Vec<_> = pairs.map(|(value, reference)| value / reference).collect();
        quantile(&mut ratios, 0.5).ok().filter(|ratio| ratio.is_finite())
    }
}

/// Sorts the values, of which there must be one.
pub(crate) fn quantile(values: &mut [f64], quantile: f64) -> Result<f64> {
    values.sort_unstable_by(f64::total_cmp);
    let last = values.len().checked_sub(1).ok_or("there are no values")?;
    Ok(values[(last as f64 * quantile).round() as usize])
}

/// The processor, its cores, and the kernel.
pub(crate) fn machine() -> String {
    let text = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let information = text("/proc/cpuinfo");
    let processor = information
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(": "))
        .map_or("a processor of unknown model", |(_, name)| name);
    let cores = std::thread::available_parallelism().map_or(0, Into::into);
    format!(
        "{processor}, {cores} cores, Linux {}",
        text("/proc/sys/kernel/osrelease").trim()
    )
}

/// The mean number of processes that ran or wanted to, over the last minute; zero if the system does not tell.
pub(crate) fn load() -> f64 {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().and_then(|load| load.parse().ok()).unwrap_or(0.0)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn report() -> Report {
        let mut report = Report {
            backend: Backend::Redis,
            server: "Redis 8.0.2".to_owned(),
            machine: "a machine, 2 cores, Linux 6".to_owned(),
            load: [0.5, 1.0],
            contestants: ["fencelock", "2 x PING", "a & b"].map(str::to_owned).to_vec(),
            rows: Vec::new(),
            notes: Vec::new(),
        };
        for (ours, floor) in [(10.0, 5.0), (30.0, 10.0), (20.0, 20.0)] {
            report.add("pair", "µs", Some("2 x PING"), "fencelock", ours);
            report.add("pair", "µs", Some("2 x PING"), "2 x PING", floor);
        }
        report
    }

    #[test]
    fn a_ratio_is_the_median_of_those_within_a_round() {
        let report = report();
        let pair = report.row("pair").unwrap();
        assert_eq!(
            (pair.median("fencelock"), pair.median("2 x PING")),
            (Some(20.0), Some(10.0))
        );
        assert_eq!(pair.ratio("fencelock"), Some(2.0));
        assert_eq!((pair.ratio("2 x PING"), pair.median("a & b")), (None, None));
    }

    #[test]
    fn quantiles_are_values_that_were_seen() {
        let mut values: Vec<_> = (1..=101).rev().map(f64::from).collect();
        let seen = [0.0, 0.5, 0.99, 1.0].map(|q| quantile(&mut values, q).unwrap());
        assert_eq!(seen, [1.0, 51.0, 100.0, 101.0]);
    }
}
