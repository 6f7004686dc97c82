//! What a run came to.

use std::fmt;
use std::time::Duration;

use conformance_tests::oracle::{History, Verdict, judge};
use conformance_tests::torture::{Figures, HandOvers};

/// How many violations are shown; the first ones tell the most.
const SHOWN: usize = 20;

/// A history, and what is to be said about it.
pub(super) struct Outcome {
    pub(super) history: History,
    pub(super) verdict: Verdict,
    pub(super) figures: Figures,
}

impl Outcome {
    pub(super) fn of(history: History) -> Self {
        Self {
            verdict: judge(&history.records),
            figures: Figures::of(&history.records),
            history,
        }
    }

    pub(super) fn is_good(&self) -> bool {
        self.verdict.violations.is_empty()
    }

    /// `operations / faults / seconds / violations`.
    pub(super) fn headline(&self) -> String {
        let verdict = &self.verdict;
        format!(
            "{} operations / {} faults / {:.1} seconds / {} violations",
            verdict.operations,
            verdict.faults,
            verdict.seconds,
            verdict.violations.len()
        )
    }

    /// The rest, with the names of the figures.
    pub(super) fn rows(&self) -> Vec<(&'static str, String)> {
        let figures = &self.figures;
        let faults: Vec<_> = figures
            .faults
            .iter()
            .map(|(kind, count)| format!("{kind} {count}"))
            .collect();
        let margin = match figures.smallest_margin {
            Some(margin) => format!("{} (of {} losses)", millis(margin), figures.losses),
            None => format!("none ({} losses)", figures.losses),
        };
        vec![
            ("grants", figures.grants.to_string()),
            (
                "faults",
                if faults.is_empty() {
                    "none".to_owned()
                } else {
                    faults.join(", ")
                },
            ),
            ("smallest loss margin", margin),
            ("hand-over, calm", hand_overs(&figures.calm)),
            ("hand-over, in faults", hand_overs(&figures.stormy)),
            ("stale writes refused", figures.refused.to_string()),
            ("permitted overlaps", self.verdict.permitted_overlaps.to_string()),
        ]
    }
}

/// For people at a terminal.
impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.headline())?;
        for (name, value) in self.rows() {
            writeln!(f, "  {name:22}{value}")?;
        }
        if let Some((_, seed)) = self.history.about.iter().find(|(name, _)| name == "seed") {
            writeln!(f, "  {:22}{seed}", "seed")?;
        }
        let violations = &self.verdict.violations;
        for violation in violations.iter().take(SHOWN) {
            writeln!(f, "violation: {violation}")?;
        }
        if violations.len() > SHOWN {
            writeln!(f, "and {} violations more", violations.len() - SHOWN)?;
        }
        Ok(())
    }
}

fn hand_overs(times: &HandOvers) -> String {
    match (times.percentile(50), times.percentile(99)) {
        (Some(half), Some(most)) => format!("p50 {}, p99 {} (of {})", millis(half), millis(most), times.count()),
        _ => "none".to_owned(),
    }
}

fn millis(time: Duration) -> String {
    format!("{:.1} ms", time.as_secs_f64() * 1_000.0)
}
