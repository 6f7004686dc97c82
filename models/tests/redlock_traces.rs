//! Traces that the fenced Redlock protocol allows, and traces that it does not.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use models::redlock::node::Answer;
use models::redlock::trace::{Step, accepts};

const NODES: usize = 3;

/// What a recorder writes, one step a line.
const TRACE: &str = r#"
{"step":"node_acquire","node":0,"owner":"x","proposal":1000,"waits":1000,"answer":{"granted":1000}}
{"step":"node_acquire","node":1,"owner":"x","proposal":1000,"waits":1000,"answer":{"granted":998}}
{"step":"node_acquire","node":2,"owner":"y","proposal":1002,"waits":1002,"answer":{"granted":1001}}
{"step":"node_acquire","node":2,"owner":"x","proposal":1000,"waits":1000,"answer":"busy"}
{"step":"node_acquire","node":0,"owner":"y","proposal":1002,"waits":1002,"answer":"busy"}
{"step":"node_acquire","node":1,"owner":"y","proposal":1002,"waits":1002,"answer":"busy"}
{"step":"node_acquire","node":1,"owner":"z","proposal":1003,"waits":1003,"answer":"busy"}
{"step":"node_confirm","node":1,"owner":"x","presented":998,"token":1000,"confirmed":true}
{"step":"given","owner":"x","token":1000,"q1":[[0,1000],[1,998]]}
{"step":"node_renew","node":0,"owner":"x","renewed":true}
{"step":"node_renew","node":2,"owner":"x","renewed":false}
{"step":"ended","owner":"x"}
{"step":"node_release","node":1,"owner":"x","released":true}
{"step":"pushed_grant","node":1,"owner":"y","g":1001}
{"step":"node_release","node":2,"owner":"x","released":false}
{"step":"node_expired","node":0,"owner":"x"}
{"step":"node_acquire","node":0,"owner":"y","proposal":1002,"waits":1002,"answer":{"granted":1001}}
{"step":"given","owner":"y","token":1001,"q1":[[1,1001],[2,1001]]}
{"step":"node_emptied","node":2}
{"step":"node_acquire","node":2,"owner":"z","proposal":1003,"waits":1003,"answer":"young"}
{"step":"ended","owner":"y"}
{"step":"node_release","node":0,"owner":"y","released":true}
{"step":"node_release","node":1,"owner":"y","released":true}
{"step":"pushed_grant","node":1,"owner":"z","g":1002}
{"step":"node_acquire","node":2,"owner":"z","proposal":1003,"waits":1003,"answer":{"granted":1500}}
{"step":"node_confirm","node":1,"owner":"z","presented":1002,"token":1500,"confirmed":true}
{"step":"given","owner":"z","token":1500,"q1":[[1,1002],[2,1500]]}
{"step":"ended","owner":"z"}
"#;

fn trace() -> Vec<Step> {
    let lines = TRACE.lines().filter(|line| !line.is_empty());
    lines.map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The number of the first step for which that is so.
fn find(trace: &[Step], is: impl Fn(&Step) -> bool) -> usize {
    trace.iter().position(is).unwrap()
}

#[track_caller]
fn is_rejected(trace: &[Step], at: usize, reason: &str) {
    let rejected = accepts(NODES, trace).unwrap_err();
    assert_eq!(rejected.at, at, "{rejected}");
    assert!(rejected.reason.contains(reason), "{rejected}");
}

#[test]
fn a_trace_of_the_protocol_is_accepted() {
    assert_eq!(accepts(NODES, &trace()), Ok(()));
}

#[test]
fn steps_are_written_as_they_are_read() {
    for step in trace() {
        let line = serde_json::to_string(&step).unwrap();
        assert!(TRACE.contains(&line), "{line}");
    }
}

#[test]
fn a_token_that_a_node_lowered_is_rejected() {
    let mut trace = trace();
    let at = find(
        &trace,
        |step| matches!(step, Step::NodeAcquire { owner, answer: Answer::Granted(1001), node: 0, .. } if owner == "y"),
    );
    let Step::NodeAcquire { answer, .. } = &mut trace[at] else {
        unreachable!()
    };
    *answer = Answer::Granted(1000);
    is_rejected(&trace, at, "answered Granted(1000)");
}

#[test]
fn a_token_above_clock_and_proposal_is_rejected() {
    let mut trace = trace();
    let at = find(
        &trace,
        |step| matches!(step, Step::NodeAcquire { owner, answer: Answer::Granted(1001), node: 0, .. } if owner == "y"),
    );
    let Step::NodeAcquire { answer, .. } = &mut trace[at] else {
        unreachable!()
    };
    *answer = Answer::Granted(1003);
    is_rejected(&trace, at, "answered Granted(1003)");
}

#[test]
fn a_pushed_token_that_is_not_above_the_counter_is_rejected() {
    let mut trace = trace();
    let at = find(&trace, |step| matches!(step, Step::PushedGrant { .. }));
    let Step::PushedGrant { g, .. } = &mut trace[at] else {
        unreachable!()
    };
    *g = 1000;
    is_rejected(&trace, at, "no step tells so");
}

#[test]
fn a_grant_by_a_node_that_is_held_is_rejected() {
    let mut trace = trace();
    let at = find(
        &trace,
        |step| matches!(step, Step::NodeAcquire { owner, answer: Answer::Busy, node: 0, .. } if owner == "y"),
    );
    let Step::NodeAcquire { answer, .. } = &mut trace[at] else {
        unreachable!()
    };
    *answer = Answer::Granted(1002);
    is_rejected(&trace, at, "the protocol says Busy");
}

#[test]
fn a_grant_before_the_restart_delay_is_rejected() {
    let mut trace = trace();
    let at = find(&trace, |step| {
        matches!(
            step,
            Step::NodeAcquire {
                answer: Answer::Young,
                ..
            }
        )
    });
    let Step::NodeAcquire { answer, .. } = &mut trace[at] else {
        unreachable!()
    };
    *answer = Answer::Granted(1400);
    is_rejected(&trace, at, "the protocol says Young");
}

#[test]
fn a_token_without_a_majority_is_rejected() {
    let mut trace = trace();
    let at = find(&trace, |step| matches!(step, Step::Given { owner, .. } if owner == "y"));
    let Step::Given { q1, .. } = &mut trace[at] else {
        unreachable!()
    };
    q1.pop();
    is_rejected(&trace, at, "a majority is 2");
}

#[test]
fn a_node_that_counts_twice_is_rejected() {
    let mut trace = trace();
    let at = find(&trace, |step| matches!(step, Step::Given { owner, .. } if owner == "y"));
    let Step::Given { q1, .. } = &mut trace[at] else {
        unreachable!()
    };
    q1[1] = q1[0];
    is_rejected(&trace, at, "twice");
}

#[test]
fn a_token_without_its_confirmation_is_rejected() {
    let mut trace = trace();
    trace.remove(find(&trace, |step| matches!(step, Step::NodeConfirm { .. })));
    let at = find(&trace, |step| matches!(step, Step::Given { .. }));
    is_rejected(&trace, at, "a majority is 2");
}

#[test]
fn a_confirmation_by_a_node_that_granted_nothing_is_rejected() {
    let mut trace = trace();
    let at = find(&trace, |step| matches!(step, Step::NodeConfirm { .. }));
    let Step::NodeConfirm { node, .. } = &mut trace[at] else {
        unreachable!()
    };
    *node = 2;
    is_rejected(&trace, at, "the protocol says Lost");
}

#[test]
fn a_confirmation_that_counts_outside_of_q1_is_rejected() {
    let mut trace = trace();
    let at = find(&trace, |step| matches!(step, Step::Given { .. }));
    let Step::Given { q1, .. } = &mut trace[at] else {
        unreachable!()
    };
    q1.remove(1);
    is_rejected(&trace, at, "a majority is 2");
}

#[test]
fn a_node_that_is_counted_without_its_grant_is_rejected() {
    let mut trace = trace();
    let at = find(&trace, |step| matches!(step, Step::Given { .. }));
    let Step::Given { q1, .. } = &mut trace[at] else {
        unreachable!()
    };
    q1[1] = (2, 1000);
    is_rejected(&trace, at, "has not granted");
}

#[test]
fn a_confirmation_of_what_the_node_did_not_grant_is_rejected() {
    let mut trace = trace();
    let at = find(&trace, |step| matches!(step, Step::NodeConfirm { .. }));
    let Step::NodeConfirm { presented, .. } = &mut trace[at] else {
        unreachable!()
    };
    *presented = 997;
    is_rejected(&trace, at, "the protocol says Lost");
}

#[test]
fn a_waiter_that_overtakes_another_is_rejected() {
    let mut trace = trace();
    let at = find(&trace, |step| matches!(step, Step::PushedGrant { .. }));
    let Step::PushedGrant { owner, .. } = &mut trace[at] else {
        unreachable!()
    };
    *owner = "z".to_owned();
    is_rejected(&trace, at, "to the waiter y");
}

#[test]
fn a_release_that_serves_nobody_although_somebody_waits_is_rejected() {
    let mut trace = trace();
    let at = find(&trace, |step| matches!(step, Step::PushedGrant { .. }));
    trace.remove(at);
    is_rejected(&trace, at, "to the waiter y");
}

#[test]
fn a_lease_that_ends_under_its_holder_is_rejected() {
    let mut trace = trace();
    let ended = find(&trace, |step| matches!(step, Step::Ended { .. }));
    let expired = find(&trace, |step| matches!(step, Step::NodeExpired { .. }));
    let step = trace.remove(expired);
    trace.insert(ended, step);
    is_rejected(&trace, ended, "before the holder's deadline");
}

#[test]
fn a_token_given_before_the_other_holder_has_ended_is_rejected() {
    let mut trace = trace();
    let at = find(&trace, |step| matches!(step, Step::Ended { owner } if owner == "y"));
    let ended = trace.remove(at);
    trace.push(ended);
    let at = find(
        &trace,
        |step| matches!(step, Step::NodeRelease { owner, released: true, .. } if owner == "y"),
    );
    is_rejected(&trace, at, "before it ended");
}

#[test]
fn two_holders_are_rejected() {
    let given = |owner: &str, q1: Vec<(usize, u64)>| Step::Given {
        owner: owner.to_owned(),
        token: 5,
        q1,
    };
    let granted = |node, owner: &str| Step::NodeAcquire {
        node,
        owner: owner.to_owned(),
        proposal: 5,
        waits: None,
        answer: Answer::Granted(5),
    };
    let trace = [
        granted(0, "x"),
        granted(1, "x"),
        given("x", vec![(0, 5), (1, 5)]),
        granted(2, "y"),
        given("y", vec![(2, 5)]),
    ];
    is_rejected(&trace, 4, "while x holds");
}
