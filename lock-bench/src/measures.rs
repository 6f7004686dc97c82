//! What is measured, one file each.

mod crowd;
mod growth;
mod hand_over;
mod held;
mod instructions;
mod pair;

use std::time::Duration;

use clap::ValueEnum;

pub(crate) use instructions::repeat;
pub(crate) use pair::PAIR;

use crate::backend::{Backend, Site};
use crate::contestant::{Contestant, OURS, OURS_HERE, Result};
use crate::report::Report;

/// The ttl where it does not matter.
const TTL: Duration = Duration::from_secs(30);

/// How many tasks are at work at the same time, where there are many.
const TASKS: usize = 64;

/// A kind of measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Measure {
    Pair,
    Crowd,
    HandOver,
    Held,
    Growth,
    Instructions,
}

/// What all measures work on.
pub(crate) struct Bench {
    pub(crate) site: Site,
    pub(crate) quick: bool,
}

/// A contestant with its name.
type Entry = (&'static str, Contestant);

impl Bench {
    pub(crate) async fn run(&self, measure: Measure, report: &mut Report) -> Result {
        let is_in_memory = self.backend() == Backend::Memory;
        match measure {
            Measure::Pair => pair::measure(self, report).await,
            Measure::Crowd => crowd::measure(self, report).await,
            Measure::Growth => growth::measure(self, report).await,
            Measure::HandOver if !is_in_memory => hand_over::measure(self, report).await,
            Measure::Held => held::measure(self, report).await,
            Measure::Instructions if is_in_memory => instructions::measure(report),
            Measure::HandOver | Measure::Instructions => Ok(()),
        }
    }

    fn backend(&self) -> Backend {
        self.site.place.backend
    }

    fn floor(&self) -> &'static str {
        self.backend().floor()
    }

    /// Full or quick.
    fn either<T>(&self, full: T, quick: T) -> T {
        if self.quick { quick } else { full }
    }

    /// fencelock both ways, and the other libraries.
    fn locks(&self) -> Vec<&'static str> {
        [&[OURS, OURS_HERE], self.backend().peers()].concat()
    }

    /// A client of each.
    async fn connect(&self, names: &[&'static str]) -> Result<Vec<Entry>> {
        let mut entries = Vec::new();
        for who in names {
            entries.push((*who, self.site.place.connect(who, TTL).await?));
        }
        Ok(entries)
    }
}

/// A name of a lock that no two contestants share, since some keep their locks at the same place.
fn name(what: &str, who: &str) -> String {
    let who: String = who.chars().filter(char::is_ascii_alphanumeric).collect();
    format!("{what}-{who}")
}
