//! What a run showed, on one screen.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::time::Duration;

use serde_json::{Value, json};

use crate::broken::Bug;
use crate::hunt::Hunt;
use crate::outcome::Stop;
use crate::run_case::Ran;

#[derive(Default)]
pub(crate) struct Summary {
    cases: Vec<Value>,
    passed: usize,
    failed: usize,
    not_judged: Vec<(String, String)>,
    not_applicable: Vec<(String, String)>,
    /// Which case caught it, and how that failed.
    caught: Vec<(Bug, String, String)>,
    escaped: Vec<(Bug, String)>,
    not_hunted: Vec<(Bug, String)>,
    not_plantable: Vec<(Bug, String)>,
    /// What could be judged only on a machine that is less busy.
    too_slow: Vec<String>,
    margin: Option<Duration>,
    overlaps: BTreeSet<&'static str>,
    remarks: Vec<String>,
}

impl Summary {
    pub(crate) fn case(&mut self, name: &str, ran: &Ran) {
        match &ran.outcome {
            Ok(()) => self.passed += 1,
            Err(Stop::Failed(_)) => self.failed += 1,
            Err(Stop::NotApplicable(reason)) => self.not_applicable.push((name.to_owned(), reason.clone())),
            Err(Stop::NotJudged(reason)) => self.not_judged.push((name.to_owned(), reason.clone())),
        }
        let (outcome, reason) = match &ran.outcome {
            Ok(()) => ("passed", None),
            Err(Stop::Failed(why)) => ("failed", Some(why)),
            Err(Stop::NotApplicable(reason)) => ("not applicable", Some(reason)),
            Err(Stop::NotJudged(reason)) => ("not judged", Some(reason)),
        };
        self.cases
            .push(json!({ "case": name, "outcome": outcome, "reason": reason, "seconds": ran.took.as_secs_f64() }));
        let too_slow = ran.findings.too_slow.iter();
        self.too_slow.extend(too_slow.map(|what| format!("{name}: {what}")));
        self.margin = [self.margin, ran.findings.margin].into_iter().flatten().min();
        self.overlaps.extend(&ran.findings.overlaps);
        self.remarks.extend(ran.findings.remarks.iter().cloned());
    }

    /// No server was there for any of so many trials.
    pub(crate) fn not_run(&mut self, trials: usize, reason: &str) {
        let reason = reason.to_owned();
        self.not_judged
            .extend((0..trials).map(|_| (String::new(), reason.clone())));
    }

    pub(crate) fn bug(&mut self, bug: Bug, hunt: &Hunt) {
        match hunt {
            Hunt::Caught { by, why } => self.caught.push((bug, by.clone(), why.clone())),
            Hunt::Escaped(why) => self.escaped.push((bug, why.clone())),
            Hunt::NotJudged(reason) => self.not_hunted.push((bug, reason.clone())),
            Hunt::NotApplicable(reason) => self.not_plantable.push((bug, reason.clone())),
        }
    }

    /// The same for programs: what the run of the whole suite writes down for the table of all backends.
    pub(crate) fn report(&self, backend: &str, setting: Option<&str>) -> Value {
        let caught = self
            .caught
            .iter()
            .map(|(bug, by, why)| json!({ "bug": bug.words(), "outcome": "caught", "by": by, "reason": why }));
        let others = [
            ("escaped", &self.escaped),
            ("not judged", &self.not_hunted),
            ("not applicable", &self.not_plantable),
        ];
        let others = others.into_iter().flat_map(|(outcome, bugs)| {
            let row = move |(bug, reason): &(Bug, String)| {
                json!({ "bug": bug.words(), "outcome": outcome, "reason": reason })
            };
            bugs.iter().map(row)
        });
        json!({
            "backend": backend,
            "setting": setting,
            "cases": self.cases,
            "planted_bugs": caught.chain(others).collect::<Vec<_>>(),
            "overlaps_after": self.overlaps,
            "smallest_margin_ms": self.margin.map(|margin| margin.as_secs_f64() * 1000.0),
        })
    }

    pub(crate) fn render(&self, backend: &str, setting: Option<&str>) -> String {
        let planted = self.caught.len() + self.escaped.len() + self.not_hunted.len();
        let mut text = format!(
            "{backend}: {} passed, {} failed, {} not applicable",
            self.passed,
            self.failed,
            self.not_applicable.len(),
        );
        if !self.not_judged.is_empty() {
            let _ = write!(text, ", {} NOT JUDGED", self.not_judged.len());
        }
        if !self.too_slow.is_empty() {
            let _ = write!(text, ", {} too slow to judge", self.too_slow.len());
        }
        text.push_str("; planted bugs ");
        if planted == 0 {
            text.push_str("none");
        } else {
            let _ = write!(text, "{} of {planted} caught", self.caught.len());
        }
        if !self.not_plantable.is_empty() {
            let _ = write!(text, ", {} not applicable", self.not_plantable.len());
        }
        if !self.not_hunted.is_empty() {
            let _ = write!(text, ", {} NOT JUDGED", self.not_hunted.len());
        }
        text.push('\n');
        if let Some(setting) = setting {
            let _ = writeln!(text, "  on {setting}");
        }
        if let Some(margin) = self.margin {
            let _ = writeln!(
                text,
                "  smallest margin between the end of a holder's belief and the next grant: {margin:.1?}"
            );
        }
        if !self.overlaps.is_empty() {
            let faults: Vec<_> = self.overlaps.iter().copied().collect();
            let _ = writeln!(
                text,
                "  two believed at once, and the fence decided, after: {}",
                faults.join(", ")
            );
        }
        for remark in &self.remarks {
            let _ = writeln!(text, "  {remark}");
        }
        for (name, reason) in &self.not_applicable {
            let _ = writeln!(text, "  not applicable: {name}: {reason}");
        }
        if cfg!(not(feature = "faults")) {
            text.push_str("  not applicable: network: the suite was built without its feature `faults`\n");
        }
        for (bug, by, _) in &self.caught {
            let _ = writeln!(text, "  caught: {}: by {by}", bug.words());
        }
        for (bug, reason) in &self.not_plantable {
            let _ = writeln!(text, "  not applicable: planted_bugs::{}: {reason}", bug.name());
        }
        for (bug, why) in &self.escaped {
            let _ = writeln!(text, "  ESCAPED: {}: {why}", bug.words());
        }
        for what in &self.too_slow {
            let _ = writeln!(text, "  too slow to judge: {what}");
        }
        // One line for a server that was never there.
        let mut not_judged: Vec<_> = self.not_judged.iter().collect();
        not_judged.dedup();
        for (name, reason) in not_judged {
            let _ = writeln!(text, "  NOT JUDGED: {name}: {reason}");
        }
        for (bug, reason) in &self.not_hunted {
            let _ = writeln!(text, "  NOT JUDGED: planted_bugs::{}: {reason}", bug.name());
        }
        text
    }
}
