//! What is counted in a trace of the queue, and how such a trace is falsified.

use std::collections::BTreeSet;

use models::redis_queue::server::{Answer, Push, Renewal};
use models::redis_queue::trace::{Script, Step};

use crate::edits::Edit;

/// How many steps of each kind there must be at least.
pub(crate) const LEAST: [(&str, usize); 13] = [
    ("acquire: busy", 50),
    ("acquire: granted", 5),
    ("acquire: late", 1),
    ("grant", 50),
    ("lease ended", 1),
    ("push", 30),
    ("release: lost", 5),
    ("release: released", 5),
    ("renew: renewed", 2),
    ("token seen again", 1),
    ("unheard", 1),
    ("waiter asks again", 20),
    ("waiter gives up", 5),
];

/// What has been seen of the name before a step.
#[derive(Default)]
pub(crate) struct Seen {
    holder: Option<String>,
    queue: BTreeSet<String>,
}

impl Seen {
    /// What kinds of steps the step is.
    pub(crate) fn kinds(&mut self, step: &Step) -> Vec<&'static str> {
        let mut kinds = Vec::new();
        let mut taken = is_fresh(step);
        match &step.script {
            Script::Acquire {
                owner, waits, answer, ..
            } => {
                kinds.push(match answer {
                    Answer::Granted { .. } => "acquire: granted",
                    Answer::Busy => "acquire: busy",
                    Answer::Late => "acquire: late",
                });
                if *waits && *answer == Answer::Busy && !self.queue.insert(owner.clone()) {
                    kinds.push("waiter asks again");
                }
            }
            Script::Renew { answer, .. } => kinds.push(match answer {
                Renewal::Renewed => "renew: renewed",
                Renewal::Late => "renew: late",
                Renewal::Lost => "renew: lost",
            }),
            Script::Release { owner, released } => {
                kinds.push(if *released {
                    "release: released"
                } else {
                    "release: lost"
                });
                kinds.extend(self.queue.remove(owner).then_some("waiter gives up"));
            }
        }
        if let Script::Release { released: true, .. } = step.script {
            self.holder = None;
        }
        if let Some(push) = &step.push {
            kinds.push("push");
            self.queue.remove(&push.owner);
            taken = true;
        }
        if taken {
            kinds.push("grant");
            kinds.extend(self.holder.is_some().then_some("lease ended"));
            self.holder = step
                .push
                .as_ref()
                .map(|push| push.owner.clone())
                .or_else(|| asks(&step.script));
        } else if granted(step).is_some() {
            kinds.push("token seen again");
        }
        kinds.extend(step.unheard.iter().map(|_| "unheard"));
        kinds.extend(step.swept.iter().map(|_| "swept"));
        kinds
    }
}

/// The claim that asks for the name.
fn asks(script: &Script) -> Option<String> {
    match script {
        Script::Acquire { owner, .. } => Some(owner.clone()),
        _ => None,
    }
}

/// The token that was granted to the claim that asked.
fn granted(step: &Step) -> Option<u64> {
    match answer(&step.script)? {
        Answer::Granted { token, .. } => Some(*token),
        _ => None,
    }
}

/// Whether a token was drawn for the claim that asked.
fn is_fresh(step: &Step) -> bool {
    granted(step) == Some(step.at)
}

fn answer(script: &Script) -> Option<&Answer> {
    match script {
        Script::Acquire { answer, .. } => Some(answer),
        _ => None,
    }
}

fn answer_mut(step: &mut Step) -> Option<&mut Answer> {
    match &mut step.script {
        Script::Acquire { answer, .. } => Some(answer),
        _ => None,
    }
}

fn token(step: &mut Step, change: impl Fn(u64) -> u64) -> bool {
    match answer_mut(step) {
        Some(Answer::Granted { token, .. }) => *token = change(*token),
        _ => return false,
    }
    true
}

fn push(step: &mut Step, change: impl Fn(&mut Push<String>)) -> bool {
    step.push.as_mut().map(change).is_some()
}

/// Replaces the answer if it is such a one.
fn replace(step: &mut Step, is: impl Fn(&Answer) -> bool, new: Answer) -> bool {
    match answer_mut(step) {
        Some(answer) if is(answer) => *answer = new,
        _ => return false,
    }
    true
}

fn renewal(step: &mut Step, from: Renewal, to: Renewal) -> bool {
    match &mut step.script {
        Script::Renew { answer, .. } if *answer == from => *answer = to,
        _ => return false,
    }
    true
}

/// Whether the step shows that its claim held the name before.
fn shows_who_holds(step: &Step) -> bool {
    match &step.script {
        Script::Release { released, .. } => *released,
        Script::Renew { answer, .. } => *answer == Renewal::Renewed,
        Script::Acquire { .. } => granted(step).is_some() && !is_fresh(step),
    }
}

fn edit(change: fn(&mut Step) -> bool) -> Edit<Step> {
    Edit::Change(change)
}

pub(crate) fn edits() -> Vec<(&'static str, Edit<Step>)> {
    vec![
        ("a token is one higher", edit(|step| token(step, |token| token + 1))),
        ("a token is one lower", edit(|step| token(step, |token| token - 1))),
        (
            "a lease is longer",
            edit(|step| match answer_mut(step) {
                Some(Answer::Granted { life, .. }) => {
                    *life += 1;
                    true
                }
                _ => false,
            }),
        ),
        (
            "a grant was refused",
            edit(|step| replace(step, |answer| matches!(answer, Answer::Granted { .. }), Answer::Busy)),
        ),
        (
            "a refusal was a grant",
            edit(|step| {
                let (token, life) = (step.at, 300);
                replace(step, |answer| *answer == Answer::Busy, Answer::Granted { token, life })
            }),
        ),
        (
            "a late request was carried out",
            edit(|step| replace(step, |answer| *answer == Answer::Late, Answer::Busy)),
        ),
        (
            "a request in time was late",
            edit(|step| replace(step, |answer| *answer == Answer::Busy, Answer::Late)),
        ),
        (
            "a renewal was refused",
            edit(|step| renewal(step, Renewal::Renewed, Renewal::Lost)),
        ),
        (
            "a release did the opposite",
            edit(|step| match &mut step.script {
                Script::Release { released, .. } => {
                    *released = !*released;
                    true
                }
                _ => false,
            }),
        ),
        ("a push is missing", edit(|step| step.push.take().is_some())),
        (
            "a push is too many",
            edit(|step| {
                let owner = "nobody".to_owned();
                let (token, sent, life) = (step.at, 1, 300);
                let before = step.push.replace(Push {
                    owner,
                    token,
                    sent,
                    life,
                });
                before.is_none()
            }),
        ),
        (
            "a pushed token is one higher",
            edit(|step| push(step, |push| push.token += 1)),
        ),
        (
            "a pushed token is one lower",
            edit(|step| push(step, |push| push.token -= 1)),
        ),
        (
            "a push answers another request",
            edit(|step| push(step, |push| push.sent += 1)),
        ),
        (
            "a pushed lease is longer",
            edit(|step| push(step, |push| push.life += 1)),
        ),
        (
            "a push goes to another claim",
            edit(|step| push(step, |push| push.owner.push('x'))),
        ),
        (
            "a waiter was removed",
            edit(|step| {
                let waiter = step.push.as_ref().map(|push| push.owner.clone());
                step.unheard.extend(waiter);
                step.push.is_some()
            }),
        ),
        (
            "the clock of a grant is behind",
            edit(|step| {
                let fresh = is_fresh(step);
                step.at -= 1;
                fresh
            }),
        ),
        (
            "a grant is missing",
            Edit::Remove(|trace, at| {
                let (step, next) = (&trace[at], trace.get(at + 1));
                let refuses = |next: &Step| answer(&next.script) == Some(&Answer::Busy);
                let asked = matches!(step.script, Script::Acquire { .. });
                is_fresh(step) && next.is_some_and(|next| shows_who_holds(next) || asked && refuses(next))
            }),
        ),
        (
            "a release is missing",
            Edit::Remove(|trace, at| {
                let released = matches!(trace[at].script, Script::Release { released: true, .. });
                released && trace[at].push.is_some() && trace.get(at + 1).is_some_and(shows_who_holds)
            }),
        ),
        (
            "two claims came in another order",
            Edit::Swap(|one, two| {
                let is = |step: &Step, answer: Answer| matches!(&step.script, Script::Acquire { answer: other, .. } if *other == answer);
                let swapped = is_fresh(one) && matches!(one.script, Script::Acquire { .. }) && is(two, Answer::Busy);
                std::mem::swap(&mut one.script, &mut two.script);
                swapped
            }),
        ),
    ]
}
