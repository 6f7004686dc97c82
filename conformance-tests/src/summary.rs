//! What a run showed, on one screen.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::time::Duration;

use serde_json::{Value, json};

use crate::broken::Bug;
use crate::outcome::Stop;
use crate::runner::{Hunt, Ran};

#[derive(Default)]
pub(crate) struct Summary {
    cases: Vec<Value>,
    passed: usize,
    failed: usize,
    not_applicable: Vec<(String, String)>,
    caught: Vec<(&'static str, String)>,
    escaped: Vec<&'static str>,
    not_plantable: Vec<(&'static str, String)>,
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
        }
        let (outcome, reason) = match &ran.outcome {
            Ok(()) => ("passed", None),
            Err(Stop::Failed(why)) => ("failed", Some(why)),
            Err(Stop::NotApplicable(reason)) => ("not applicable", Some(reason)),
        };
        self.cases
            .push(json!({ "case": name, "outcome": outcome, "reason": reason, "seconds": ran.took.as_secs_f64() }));
        self.margin = [self.margin, ran.findings.margin].into_iter().flatten().min();
        self.overlaps.extend(&ran.findings.overlaps);
        self.remarks.extend(ran.findings.remarks.iter().cloned());
    }

    pub(crate) fn bug(&mut self, bug: Bug, hunt: &Hunt) {
        match hunt {
            Hunt::Caught { by } => self.caught.push((bug.words(), by.clone())),
            Hunt::Escaped(_) => self.escaped.push(bug.words()),
            Hunt::NotApplicable(reason) => self.not_plantable.push((bug.words(), reason.clone())),
        }
    }

    /// The same for programs: what the run of the whole suite writes down for the table of all backends.
    pub(crate) fn report(&self, backend: &str, setting: Option<&str>) -> Value {
        let caught = self.caught.iter();
        let caught = caught.map(|(bug, by)| json!({ "bug": bug, "outcome": "caught", "by": by }));
        let escaped = self.escaped.iter();
        let escaped = escaped.map(|bug| json!({ "bug": bug, "outcome": "escaped" }));
        let not_plantable = self.not_plantable.iter();
        let not_plantable =
            not_plantable.map(|(bug, reason)| json!({ "bug": bug, "outcome": "not applicable", "reason": reason }));
        json!({
            "backend": backend,
            "setting": setting,
            "cases": self.cases,
            "planted_bugs": caught.chain(escaped).chain(not_plantable).collect::<Vec<_>>(),
            "overlaps_after": self.overlaps,
            "smallest_margin_ms": self.margin.map(|margin| margin.as_secs_f64() * 1000.0),
        })
    }

    pub(crate) fn render(&self, backend: &str, setting: Option<&str>) -> String {
        let planted = self.caught.len() + self.escaped.len();
        let mut text = format!(
            "{backend}: {} passed, {} failed, {} not applicable; planted bugs ",
            self.passed,
            self.failed,
            self.not_applicable.len(),
        );
        if planted == 0 {
            text.push_str("none");
        } else {
            let _ = write!(text, "{} of {planted} caught", self.caught.len());
        }
        if !self.not_plantable.is_empty() {
            let _ = write!(text, ", {} not applicable", self.not_plantable.len());
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
        for (bug, by) in &self.caught {
            let _ = writeln!(text, "  caught: {bug}: by {by}");
        }
        for (bug, reason) in &self.not_plantable {
            let _ = writeln!(text, "  not plantable here: {bug}: {reason}");
        }
        for bug in &self.escaped {
            let _ = writeln!(text, "  ESCAPED: {bug}");
        }
        text
    }
}
