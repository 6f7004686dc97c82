//! How a trace of several nodes is falsified.

use models::redis_queue::server::Push;
use models::redlock::node::Answer;
use models::redlock::trace::{Run, Script, Step};

use crate::edits::Edit;

fn run(step: &mut Step, change: impl FnOnce(&mut Run) -> bool) -> bool {
    match step {
        Step::Ran(run) => change(run),
        _ => false,
    }
}

fn answer(run: &mut Run) -> Option<&mut Answer<u64>> {
    match &mut run.script {
        Script::Acquire { answer, .. } | Script::Renew { answer, .. } => Some(answer),
        _ => None,
    }
}

fn token(step: &mut Step, change: impl Fn(u64) -> u64) -> bool {
    run(step, |run| match answer(run) {
        Some(Answer::Granted(token)) => {
            *token = change(*token);
            true
        }
        _ => false,
    })
}

/// Replaces the answer if it is such a one.
fn replace(step: &mut Step, is: impl Fn(&Answer<u64>) -> bool, new: impl Fn(u64) -> Answer<u64>) -> bool {
    run(step, |run| {
        let at = run.at;
        match answer(run) {
            Some(answer) if is(answer) => *answer = new(at),
            _ => return false,
        }
        true
    })
}

fn push(step: &mut Step, change: impl Fn(&mut Push<String>)) -> bool {
    run(step, |run| run.push.as_mut().map(change).is_some())
}

fn given(step: &mut Step, change: impl Fn(&mut u64, &mut Vec<(usize, u64)>)) -> bool {
    match step {
        Step::Given { token, q1, .. } => change(token, q1),
        _ => return false,
    }
    true
}

/// Turns what a script did into its opposite.
fn flip(step: &mut Step, find: fn(&mut Script) -> Option<&mut bool>) -> bool {
    run(step, |run| {
        let Some(done) = find(&mut run.script) else {
            return false;
        };
        *done = !*done;
        true
    })
}

/// Whether the node says since when it has its data, or that it lacks some.
fn tells_its_age(trace: &[Step], node: usize) -> bool {
    let tells = |script: &Script| match script {
        Script::Born { .. } => true,
        Script::Acquire { answer, .. } => *answer == Answer::Young,
        _ => false,
    };
    let ran = |step: &Step| matches!(step, Step::Ran(run) if run.node == node && tells(&run.script));
    trace.iter().any(ran)
}

/// Whether the run released that acquisition.
fn releases(step: &Step, name: &str) -> bool {
    let Step::Ran(run) = step else { return false };
    match &run.script {
        Script::Release { owner, released, .. } => *released && owner == name,
        _ => false,
    }
}

/// Whether the step is a confirmation without which there is no majority for the token that is given next.
fn confirmation<const MAJORITY: usize>(trace: &[Step], at: usize) -> bool {
    let Step::Ran(run) = &trace[at] else { return false };
    let Script::Confirm {
        owner: confirmed,
        presented,
        token: wanted,
        confirmed: true,
    } = &run.script
    else {
        return false;
    };
    let next = trace[at..].iter().find_map(|step| match step {
        Step::Given { owner, token, q1, .. } => Some((owner, token, q1)),
        _ => None,
    });
    next.is_some_and(|(owner, token, q1)| {
        let counts = presented != token && q1.contains(&(run.node, *presented));
        (owner, token) == (confirmed, wanted) && counts && q1.len() == MAJORITY
    })
}

fn edit(change: fn(&mut Step) -> bool) -> Edit<Step> {
    Edit::Change(change)
}

pub(crate) fn edits(nodes: usize) -> Vec<(&'static str, Edit<Step>)> {
    [answers(), pushes(), coordinators(nodes)]
        .into_iter()
        .flatten()
        .collect()
}

fn answers() -> Vec<(&'static str, Edit<Step>)> {
    vec![
        ("a token is one higher", edit(|step| token(step, |token| token + 1))),
        ("a token is one lower", edit(|step| token(step, |token| token - 1))),
        (
            "a lease is longer",
            edit(|step| {
                run(step, |run| match &mut run.script {
                    Script::Acquire {
                        life,
                        answer: Answer::Granted(_),
                        ..
                    } => {
                        *life += 1;
                        true
                    }
                    _ => false,
                })
            }),
        ),
        (
            "a grant was refused",
            edit(|step| replace(step, |answer| matches!(answer, Answer::Granted(_)), |_| Answer::Busy)),
        ),
        (
            "a refusal was a grant",
            edit(|step| replace(step, |answer| *answer == Answer::Busy, Answer::Granted)),
        ),
        (
            "a late request was carried out",
            edit(|step| replace(step, |answer| *answer == Answer::Late, |_| Answer::Busy)),
        ),
        (
            "a node without data granted",
            edit(|step| replace(step, |answer| *answer == Answer::Young, Answer::Granted)),
        ),
        (
            "a renewal was refused",
            edit(|step| replace(step, |answer| *answer == Answer::Renewed, |_| Answer::Lost)),
        ),
        (
            "a refused renewal was made",
            edit(|step| replace(step, |answer| *answer == Answer::Lost, |_| Answer::Renewed)),
        ),
        (
            "a release did the opposite",
            edit(|step| {
                flip(step, |script| match script {
                    Script::Release { released, .. } => Some(released),
                    _ => None,
                })
            }),
        ),
        (
            "a confirmation did the opposite",
            edit(|step| {
                flip(step, |script| match script {
                    Script::Confirm { confirmed, .. } => Some(confirmed),
                    _ => None,
                })
            }),
        ),
        (
            "a node opened that had not, or the other way round",
            edit(|step| {
                flip(step, |script| match script {
                    Script::Born { is_new, .. } => Some(is_new),
                    _ => None,
                })
            }),
        ),
        (
            "a node has its data since another moment",
            edit(|step| {
                run(step, |run| match &mut run.script {
                    Script::Born { since, .. } => {
                        *since += 1;
                        true
                    }
                    _ => false,
                })
            }),
        ),
    ]
}

fn pushes() -> Vec<(&'static str, Edit<Step>)> {
    vec![
        (
            "a push is missing",
            edit(|step| run(step, |run| run.push.take().is_some())),
        ),
        (
            "a push is too many",
            edit(|step| {
                run(step, |run| {
                    let owner = "nobody".to_owned();
                    let (token, sent, life) = (run.at, 1, 300);
                    let before = run.push.replace(Push {
                        owner,
                        token,
                        sent,
                        life,
                    });
                    before.is_none()
                })
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
            "a push goes to another acquisition",
            edit(|step| push(step, |push| push.owner.push('x'))),
        ),
        (
            "a waiter was removed",
            edit(|step| {
                run(step, |run| {
                    let waiter = run.push.as_ref().map(|push| push.owner.clone());
                    run.unheard.extend(waiter);
                    run.push.is_some()
                })
            }),
        ),
    ]
}

fn coordinators(nodes: usize) -> Vec<(&'static str, Edit<Step>)> {
    vec![
        (
            "a token that was given is one higher",
            edit(|step| given(step, |token, _| *token += 1)),
        ),
        (
            "a token that was given is one lower",
            edit(|step| given(step, |token, _| *token -= 1)),
        ),
        (
            "a token was given without its nodes",
            edit(|step| given(step, |token, q1| q1.retain(|(_, granted)| granted != token))),
        ),
        ("a node counts twice", edit(|step| given(step, |_, q1| q1.push(q1[0])))),
        (
            "a node counts with another grant",
            edit(|step| {
                given(step, |token, q1| {
                    q1.iter_mut().for_each(|(_, granted)| *granted = *token + 1)
                })
            }),
        ),
        (
            "another acquisition was given the token",
            edit(|step| match step {
                Step::Given { owner, .. } => {
                    owner.push('x');
                    true
                }
                _ => false,
            }),
        ),
        (
            "the end of a holder is missing",
            Edit::Remove(|trace, at| {
                let Step::Ended { owner, .. } = &trace[at] else {
                    return false;
                };
                let given = |step: &&Step| matches!(step, Step::Given { .. });
                let last = trace[..at].iter().rfind(given);
                let held = matches!(last, Some(Step::Given { owner: holder, .. }) if holder == owner);
                held && trace[at..].iter().any(|step| given(&step) || releases(step, owner))
            }),
        ),
        (
            "the loss of data is missing",
            Edit::Remove(
                |trace, at| matches!(&trace[at], Step::Emptied { node, .. } if tells_its_age(&trace[at..], *node)),
            ),
        ),
        (
            "the restart is missing",
            Edit::Remove(
                |trace, at| matches!(&trace[at], Step::Restarted { node, .. } if tells_its_age(&trace[at..], *node)),
            ),
        ),
        (
            "a confirmation is missing",
            Edit::Remove(if nodes == 3 {
                confirmation::<2>
            } else {
                confirmation::<3>
            }),
        ),
        (
            "two runs on a node came in another order",
            Edit::Swap(|one, two| {
                let (Step::Ran(one), Step::Ran(two)) = (one, two) else {
                    return false;
                };
                let at = one.at;
                let fresh = answer(one) == Some(&mut Answer::Granted(at));
                let swapped = one.node == two.node && fresh && answer(two) == Some(&mut Answer::Busy);
                std::mem::swap(&mut one.script, &mut two.script);
                std::mem::swap(&mut one.proposal, &mut two.proposal);
                std::mem::swap(&mut one.place, &mut two.place);
                swapped
            }),
        ),
    ]
}
