//! What a run came to.

use std::fmt;
use std::time::Duration;

use conformance_tests::oracle::{History, Verdict, judge};
use conformance_tests::torture::{Figures, HandOvers};
use serde_json::{Map, Value, json};

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
            "{} / {} / {:.1} seconds / {}",
            counted(verdict.operations, "operation"),
            counted(verdict.faults, "fault"),
            verdict.seconds,
            counted(verdict.violations.len(), "violation")
        )
    }

    /// For programs: times in milliseconds, null for what did not happen.
    pub(super) fn in_json(&self) -> Value {
        let (verdict, figures) = (&self.verdict, &self.figures);
        let hand_overs = |times: &HandOvers| {
            json!({
                "count": times.count(),
                "p50_ms": times.percentile(50).map(in_millis),
                "p99_ms": times.percentile(99).map(in_millis),
            })
        };
        let faults: Map<_, _> = figures
            .faults
            .iter()
            .map(|(kind, count)| (kind.to_string(), json!(count)))
            .collect();
        let about: Map<_, _> = self.history.about.iter().map(|(k, v)| (k.clone(), json!(v))).collect();
        json!({
            "ok": self.is_good(),
            "violations": verdict.violations.iter().map(ToString::to_string).collect::<Vec<_>>(),
            "operations": verdict.operations,
            "seconds": verdict.seconds,
            "grants": figures.grants,
            "faults": faults,
            "losses": figures.losses,
            "smallest_loss_margin_ms": figures.smallest_margin.map(in_millis),
            "hand_over_calm": hand_overs(&figures.calm),
            "hand_over_in_faults": hand_overs(&figures.stormy),
            "stale_writes_refused": figures.refused,
            "permitted_overlaps": verdict.permitted_overlaps,
            "about": about,
        })
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
            Some(margin) => format!("{} (of {})", millis(margin), counted(figures.losses, "loss")),
            None => format!("none ({})", counted(figures.losses, "loss")),
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
            writeln!(f, "and {} more", counted(violations.len() - SHOWN, "violation"))?;
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
    format!("{:.1} ms", in_millis(time))
}

fn in_millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1_000.0
}

/// `1 violation`, `2 violations`.
fn counted(count: usize, what: &str) -> String {
    match (count, what) {
        (1, what) => format!("1 {what}"),
        (n, "loss") => format!("{n} losses"),
        (n, what) => format!("{n} {what}s"),
    }
}
