//! One backend under the suite: its trials, and what they showed.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use libtest_mimic::{Completion, Failed, Trial};

use crate::admission;
use crate::broken::Bug;
use crate::cases::{self, Entry, GROUPS};
use crate::harness::Harness;
use crate::hunt::{Hunt, capabilities, hunt};
use crate::outcome::{Outcome, Stop};
use crate::report;
use crate::run_case::{Limits, run_case};
use crate::skips::Skips;
use crate::summary::Summary;

/// What names of trials of planted bugs begin with.
const BUGS: &str = "planted_bugs::";

/// When a trial is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// It waits for most of its time, so many run at once.
    Many,
    /// It keeps processors busy for as long as it takes, so only a few run at once.
    Few,
}

/// One backend.
pub(crate) struct Row {
    /// What trials of this backend begin with, among others.
    pub(crate) key: Arc<str>,
    pub(crate) harness: Arc<dyn Harness>,
    pub(crate) cases: Vec<(&'static str, Entry)>,
    pub(crate) bugs: Vec<Bug>,
    pub(crate) setting: Mutex<Option<String>>,
    pub(crate) summary: Mutex<Summary>,
}

impl Row {
    /// With every case and no planted bug.
    pub(crate) fn new(key: &str, harness: Arc<dyn Harness>) -> Self {
        let cases = GROUPS
            .iter()
            .flat_map(|group| group.cases.iter().map(|&entry| (group.name, entry)));
        Self {
            key: key.into(),
            harness,
            cases: cases.collect(),
            bugs: Vec::new(),
            setting: Mutex::default(),
            summary: Mutex::default(),
        }
    }

    pub(crate) fn setting(&self) -> MutexGuard<'_, Option<String>> {
        locked(&self.setting)
    }

    pub(crate) fn summary(&self) -> MutexGuard<'_, Summary> {
        locked(&self.summary)
    }

    /// What the harness's list of skips names that is no trial of the row; of planted bugs, if the row has some.
    pub(crate) fn unknown_skips(&self) -> Vec<String> {
        let cases = self.cases.iter().map(|&(_, entry)| cases::full_name(entry));
        let known = cases.chain(self.bugs.iter().map(|bug| bug_name(*bug)));
        let mut unknown = Skips::of(self.harness.known_skips()).unknown(known);
        if self.bugs.is_empty() {
            unknown.retain(|name| !name.starts_with(BUGS));
        }
        unknown
    }

    /// Its trials, each with the name that it has in a run of several backends or, without a prefix, of this one.
    pub(crate) fn trials(self: &Arc<Self>, prefixed: bool) -> Vec<(Phase, String, Trial)> {
        let named = |name: &str| match prefixed {
            true => format!("{}::{name}", self.key),
            false => name.to_owned(),
        };
        let mut trials = Vec::new();
        for &(group, entry) in &self.cases {
            let (row, name) = (Arc::clone(self), format!("{group}::{}", entry.sentence));
            let full = named(&name);
            let trial = Trial::ignorable_test(full.clone(), move || row.run(&name, entry));
            let phase = if cases::is_heavy(entry) {
                Phase::Few
            } else {
                Phase::Many
            };
            trials.push((phase, full, trial));
        }
        for &bug in &self.bugs {
            let row = Arc::clone(self);
            let full = named(&bug_name(bug));
            let trial = Trial::ignorable_test(full.clone(), move || row.hunt(bug));
            let is_heavy = bug.case().is_some_and(cases::is_heavy);
            let phase = if is_heavy { Phase::Few } else { Phase::Many };
            trials.push((phase, full, trial));
        }
        trials
    }

    fn run(&self, name: &str, entry: Entry) -> Result<Completion, Failed> {
        let _running = admission::enter();
        let mut ran = run_case(&self.key, &self.harness, entry, Limits::GENEROUS, None);
        ran.outcome = self.judged(name, ran.outcome);
        self.summary().case(name, &ran);
        match ran.outcome {
            Ok(()) => Ok(Completion::Completed),
            Err(Stop::NotApplicable(reason)) => Ok(Completion::ignored_with(format!("not applicable: {reason}"))),
            Err(Stop::NotJudged(reason)) => Err(Failed::from(format!("not judged: {reason}\n{}", ran.history))),
            Err(Stop::Failed(message)) => Err(Failed::from(format!("{message}\n{}", ran.history))),
        }
    }

    /// The outcome of a case. If no client can be made any more, its failure says nothing of the backend; and it may be
    /// skipped only if the list of skips says so.
    fn judged(&self, name: &str, outcome: Outcome) -> Outcome {
        let skipped = match outcome {
            Ok(()) => None,
            Err(Stop::NotApplicable(ref reason)) => Some(&**reason),
            Err(Stop::NotJudged(_)) => return outcome,
            Err(Stop::Failed(why)) => {
                return Err(match capabilities(&self.harness) {
                    Ok(_) => Stop::Failed(why),
                    Err(silence) => Stop::NotJudged(format!(
                        "no client can be made: {}; the case ended with: {why}",
                        silence.reason()
                    )),
                });
            }
        };
        match Skips::of(self.harness.known_skips()).object(name, skipped) {
            Some(objection) => Err(Stop::Failed(objection)),
            None => outcome,
        }
    }

    fn hunt(&self, bug: Bug) -> Result<Completion, Failed> {
        let _running = admission::enter();
        let mut hunted = hunt(&self.key, &self.harness, bug);
        let skips = Skips::of(self.harness.known_skips());
        let objection = match &hunted {
            Hunt::NotApplicable(reason) => skips.object(&bug_name(bug), Some(reason)),
            Hunt::Caught { .. } => skips.object(&bug_name(bug), None),
            Hunt::Escaped(_) | Hunt::NotJudged(_) => None,
        };
        if let Some(objection) = objection {
            hunted = Hunt::NotJudged(objection);
        }
        self.summary().bug(bug, &hunted);
        match hunted {
            Hunt::Caught { .. } => Ok(Completion::Completed),
            Hunt::NotApplicable(reason) => Ok(Completion::ignored_with(format!("not applicable: {reason}"))),
            Hunt::NotJudged(reason) => Err(Failed::from(format!("not judged: {reason}"))),
            Hunt::Escaped(why) => Err(Failed::from(format!("the bug was not caught: {why}"))),
        }
    }

    /// Prints the summary, and writes the report unless only a part of the row was run.
    pub(crate) fn tell(&self, whole: bool) -> std::io::Result<()> {
        let (summary, setting) = (self.summary(), self.setting());
        let name = self.harness.name();
        println!("{}", summary.render(name, setting.as_deref()));
        if whole {
            report::write(name, &summary.report(name, setting.as_deref()))?;
        }
        Ok(())
    }
}

fn bug_name(bug: Bug) -> String {
    format!("{BUGS}{}", bug.name())
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
