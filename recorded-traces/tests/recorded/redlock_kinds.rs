//! What is counted in a trace of several nodes.

use std::collections::BTreeMap;

use models::redlock::node::Answer;
use models::redlock::trace::{OnBusy, Run, Script, Step};

/// How many steps of each kind there must be at least.
pub(crate) const LEAST: [(&str, usize); 20] = [
    ("acquire: busy", 50),
    ("acquire: granted", 30),
    ("acquire: late", 1),
    ("acquire: young", 1),
    ("born", 10),
    ("confirm: confirmed", 2),
    ("emptied", 2),
    ("ended", 20),
    ("given", 20),
    ("lease ended", 2),
    ("push", 30),
    ("release: lost", 20),
    ("release: released", 5),
    ("renew: renewed", 5),
    ("restarted", 1),
    ("token was confirmed", 1),
    ("token was not confirmed", 2),
    ("unheard", 1),
    ("without a node", 5),
    ("yield", 5),
];

/// Who holds each node, as far as seen.
#[derive(Default)]
pub(crate) struct Seen(BTreeMap<usize, String>);

impl Seen {
    /// What kinds of steps the step is. `nodes` is how many nodes there are.
    pub(crate) fn kinds(&mut self, step: &Step, nodes: usize) -> Vec<&'static str> {
        match step {
            Step::Ran(run) => self.ran(run),
            Step::Emptied { node, .. } => {
                self.0.remove(node);
                vec!["emptied"]
            }
            Step::Restarted { .. } => vec!["restarted"],
            Step::Given { token, q1, .. } => {
                let confirmed = q1.iter().any(|(_, granted)| granted != token);
                let mut kinds = vec!["given"];
                kinds.push(if confirmed {
                    "token was confirmed"
                } else {
                    "token was not confirmed"
                });
                kinds.extend((q1.len() < nodes).then_some("without a node"));
                kinds
            }
            Step::Ended { .. } => vec!["ended"],
        }
    }

    fn ran(&mut self, run: &Run) -> Vec<&'static str> {
        let mut kinds = Vec::new();
        let mut taken = run.push.as_ref().map(|push| &push.owner);
        match &run.script {
            Script::Acquire {
                owner, answer, on_busy, ..
            } => {
                kinds.push(match answer {
                    Answer::Granted(_) => "acquire: granted",
                    Answer::Late => "acquire: late",
                    Answer::Young => "acquire: young",
                    _ => "acquire: busy",
                });
                kinds.extend((*on_busy == OnBusy::Yield).then_some("yield"));
                if let Answer::Granted(_) = answer {
                    taken = Some(owner);
                }
                if *on_busy == OnBusy::Yield && self.0.get(&run.node) == Some(owner) {
                    self.0.remove(&run.node);
                }
            }
            Script::Confirm { confirmed: true, .. } => kinds.push("confirm: confirmed"),
            Script::Confirm { .. } => kinds.push("confirm: lost"),
            Script::Renew { answer, .. } => kinds.push(match answer {
                Answer::Renewed => "renew: renewed",
                Answer::Late => "renew: late",
                _ => "renew: lost",
            }),
            Script::Release { released: true, .. } => {
                self.0.remove(&run.node);
                kinds.push("release: released");
            }
            Script::Release { .. } => kinds.push("release: lost"),
            Script::Born { .. } => kinds.push("born"),
        }
        if let Some(owner) = taken {
            let before = self.0.insert(run.node, owner.clone());
            kinds.extend(before.is_some_and(|before| before != *owner).then_some("lease ended"));
        }
        kinds.extend(run.push.iter().map(|_| "push"));
        kinds.extend(run.unheard.iter().map(|_| "unheard"));
        kinds.extend(run.swept.iter().map(|_| "swept"));
        kinds
    }
}
