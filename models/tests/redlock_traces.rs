//! Traces that the fenced Redlock protocol allows, and traces that it does not.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use models::redlock::node::Answer;
use models::redlock::trace::{Run, Script, Step, accepts};

const NODES: usize = 3;

/// The restart delay, which is as long as the ttl, in milliseconds.
const DELAY: u64 = 3000;

/// What a recorder writes, one step a line.
const TRACE: &str = r#"
{"step":"ran","at":10000000,"node":0,"proposal":0,"place":0,"script":"born","open":null,"is_new":true,"since":10000000}
{"step":"ran","at":10000000,"node":1,"proposal":0,"place":0,"script":"born","open":null,"is_new":true,"since":10000000}
{"step":"ran","at":10000000,"node":2,"proposal":0,"place":0,"script":"born","open":null,"is_new":true,"since":10000000}
{"step":"ran","at":10000100,"node":0,"proposal":0,"place":0,"script":"born","open":10000000,"is_new":false,"since":10000000}
{"step":"ran","at":10000100,"node":1,"proposal":0,"place":0,"script":"born","open":10000000,"is_new":false,"since":10000000}
{"step":"ran","at":10000100,"node":2,"proposal":0,"place":0,"script":"born","open":10000000,"is_new":false,"since":10000000}
{"step":"ran","at":10001000,"node":0,"proposal":10000900,"place":10000900,"script":"acquire","owner":"x","ttl":3000,"stop":13001,"sent":1,"on_busy":"queue","answer":{"granted":10001000},"life":3000}
{"step":"ran","at":10001010,"node":1,"proposal":10000900,"place":10000900,"script":"acquire","owner":"x","ttl":3000,"stop":13001,"sent":1,"on_busy":"queue","answer":{"granted":10001010},"life":3000}
{"step":"ran","at":10001015,"node":2,"proposal":10000950,"place":10000950,"script":"acquire","owner":"y","ttl":3000,"stop":13001,"sent":1,"on_busy":"queue","answer":{"granted":10001015},"life":3000}
{"step":"ran","at":10001020,"node":2,"proposal":10000900,"place":10000900,"script":"acquire","owner":"x","ttl":3000,"stop":13001,"sent":1,"on_busy":"queue","answer":"busy","life":3000}
{"step":"ran","at":10001030,"node":0,"proposal":10000950,"place":10000950,"script":"acquire","owner":"y","ttl":3000,"stop":13001,"sent":1,"on_busy":"queue","answer":"busy","life":3000}
{"step":"ran","at":10001040,"node":1,"proposal":10000950,"place":10000950,"script":"acquire","owner":"y","ttl":3000,"stop":13001,"sent":1,"on_busy":"queue","answer":"busy","life":3000}
{"step":"ran","at":10001050,"node":1,"proposal":10000960,"place":10000960,"script":"acquire","owner":"z","ttl":3000,"stop":13001,"sent":7,"on_busy":"queue","answer":"busy","life":3000}
{"step":"ran","at":10001100,"node":0,"proposal":0,"place":0,"script":"confirm","owner":"x","presented":10001000,"token":10001010,"confirmed":true}
{"step":"given","at":10001200,"owner":"x","token":10001010,"q1":[[0,10001000],[1,10001010]]}
{"step":"ran","at":10500000,"node":0,"proposal":0,"place":0,"script":"renew","owner":"x","ttl":3000,"stop":12000,"answer":"renewed"}
{"step":"ran","at":10500010,"node":2,"proposal":0,"place":0,"script":"renew","owner":"x","ttl":3000,"stop":12000,"answer":"lost"}
{"step":"ended","at":10600000,"owner":"x"}
{"step":"ran","at":10600100,"node":1,"proposal":0,"place":0,"script":"release","owner":"x","stop":13600,"released":true,"push":{"owner":"y","token":10600100,"sent":1,"life":3000}}
{"step":"ran","at":10600200,"node":2,"proposal":0,"place":0,"script":"release","owner":"x","stop":13600,"released":false}
{"step":"ran","at":10600300,"node":2,"proposal":0,"place":0,"script":"confirm","owner":"y","presented":10001015,"token":10600100,"confirmed":true}
{"step":"given","at":10600400,"owner":"y","token":10600100,"q1":[[1,10600100],[2,10001015]]}
{"step":"emptied","at":10700000,"node":0}
{"step":"ran","at":10800000,"node":0,"proposal":10000960,"place":10000960,"script":"acquire","owner":"z","ttl":3000,"stop":13800,"sent":8,"on_busy":"queue","answer":"young","life":0}
{"step":"ended","at":10900000,"owner":"y"}
{"step":"ran","at":10900100,"node":1,"proposal":0,"place":0,"script":"release","owner":"y","stop":13900,"released":true,"push":{"owner":"z","token":10900100,"sent":7,"life":3000}}
{"step":"ran","at":10900200,"node":2,"proposal":0,"place":0,"script":"release","owner":"y","stop":13900,"released":true}
{"step":"ran","at":10900205,"node":2,"proposal":10899000,"place":10899000,"script":"acquire","owner":"v","ttl":3000,"stop":13900,"sent":1,"on_busy":"fail","answer":{"granted":10899000},"life":3000}
{"step":"ran","at":10900210,"node":2,"proposal":0,"place":0,"script":"release","owner":"v","stop":null,"released":true}
{"step":"ran","at":10900300,"node":2,"proposal":10890000,"place":10890000,"script":"acquire","owner":"z","ttl":3000,"stop":13900,"sent":9,"on_busy":"queue","answer":{"granted":10899001},"life":3000}
{"step":"ran","at":10900400,"node":2,"proposal":0,"place":0,"script":"confirm","owner":"z","presented":10899001,"token":10900100,"confirmed":true}
{"step":"given","at":10900500,"owner":"z","token":10900100,"q1":[[1,10900100],[2,10899001]]}
{"step":"ran","at":10900600,"node":2,"proposal":10890000,"place":10890000,"script":"acquire","owner":"u","ttl":3000,"stop":13900,"sent":2,"on_busy":"queue","answer":"busy","life":3000}
{"step":"ended","at":11000000,"owner":"z"}
{"step":"ran","at":11000100,"node":2,"proposal":10950000,"place":10950000,"script":"acquire","owner":"z","ttl":3000,"stop":14000,"sent":10,"on_busy":"yield","answer":"busy","life":3000,"push":{"owner":"u","token":10950000,"sent":2,"life":3000}}
{"step":"ran","at":13800000,"node":0,"proposal":13790000,"place":13790000,"script":"acquire","owner":"w","ttl":3000,"stop":16800,"sent":1,"on_busy":"queue","answer":{"granted":13800000},"life":3000}
"#;

fn trace() -> Vec<Step> {
    let lines = TRACE.lines().filter(|line| !line.is_empty());
    lines.map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The number of the first step for which that is so.
fn find(trace: &[Step], is: impl Fn(&Step) -> bool) -> usize {
    trace.iter().position(is).unwrap()
}

/// The run at that time.
fn run(trace: &mut [Step], time: u64) -> (usize, &mut Run) {
    let at = find(trace, |step| matches!(step, Step::Ran(Run { at, .. }) if *at == time));
    match &mut trace[at] {
        Step::Ran(run) => (at, run),
        _ => unreachable!(),
    }
}

fn given<'a>(trace: &'a mut [Step], name: &str) -> (usize, &'a mut Vec<(usize, u64)>) {
    let at = find(trace, |step| matches!(step, Step::Given { owner, .. } if owner == name));
    match &mut trace[at] {
        Step::Given { q1, .. } => (at, q1),
        _ => unreachable!(),
    }
}

#[track_caller]
fn is_rejected(trace: &[Step], at: usize, reason: &str) {
    let rejected = accepts(NODES, DELAY, trace).unwrap_err();
    assert!(rejected.reason.contains(reason), "{rejected}");
    assert_eq!(rejected.at, at, "{rejected}");
}

/// Changes the run at that time, which must be rejected.
#[track_caller]
fn edited(time: u64, reason: &str, edit: impl FnOnce(&mut Run)) {
    let mut trace = trace();
    let (at, run) = run(&mut trace, time);
    edit(run);
    is_rejected(&trace, at, reason);
}

fn answer(run: &mut Run, new: Answer<u64>) {
    match &mut run.script {
        Script::Acquire { answer, .. } | Script::Renew { answer, .. } => *answer = new,
        _ => unreachable!(),
    }
}

#[test]
fn a_trace_of_the_protocol_is_accepted() {
    assert_eq!(accepts(NODES, DELAY, &trace()), Ok(()));
}

#[test]
fn steps_are_written_as_they_are_read() {
    for step in trace() {
        let line = serde_json::to_value(&step).unwrap();
        let read = TRACE.lines().filter(|line| !line.is_empty());
        let mut read = read.map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        assert!(read.any(|other| other == line), "{line}");
    }
}

#[test]
fn a_token_that_is_not_the_one_to_draw_is_rejected() {
    for wrong in [10_899_000, 10_899_002] {
        edited(10_900_300, "the protocol says (Granted(10899001), 3000)", |run| {
            answer(run, Answer::Granted(wrong));
        });
    }
}

#[test]
fn a_pushed_token_that_is_not_the_one_to_draw_is_rejected() {
    for wrong in [10_600_099, 10_600_101] {
        edited(10_600_100, "pushed", |run| run.push.as_mut().unwrap().token = wrong);
    }
}

#[test]
fn a_grant_by_a_node_that_is_held_is_rejected() {
    edited(10_001_030, "the protocol says (Busy", |run| {
        answer(run, Answer::Granted(10_001_030))
    });
}

#[test]
fn a_grant_before_the_restart_delay_is_rejected() {
    edited(10_800_000, "the protocol says (Young", |run| {
        answer(run, Answer::Granted(10_800_000))
    });
    let mut trace = trace();
    let (at, run) = run(&mut trace, 13_800_000);
    run.at -= 1;
    answer(run, Answer::Granted(13_799_999));
    is_rejected(&trace, at, "the protocol says (Young");
}

#[test]
fn a_late_request_that_was_carried_out_is_rejected() {
    edited(10_001_050, "the protocol says (Late", |run| {
        let Script::Acquire { stop, .. } = &mut run.script else {
            unreachable!()
        };
        *stop = 11_000;
    });
    edited(10_500_000, "the protocol says Late", |run| {
        let Script::Renew { stop, .. } = &mut run.script else {
            unreachable!()
        };
        *stop = 10_499;
    });
    edited(10_600_100, "the protocol says false", |run| {
        let Script::Release { stop, .. } = &mut run.script else {
            unreachable!()
        };
        *stop = Some(10_599);
    });
}

#[test]
fn a_token_without_a_majority_is_rejected() {
    let mut trace = trace();
    let (at, q1) = given(&mut trace, "y");
    q1.pop();
    is_rejected(&trace, at, "a majority is 2");
}

#[test]
fn a_node_that_counts_twice_is_rejected() {
    let mut trace = trace();
    let (at, q1) = given(&mut trace, "y");
    q1[1] = q1[0];
    is_rejected(&trace, at, "twice");
}

#[test]
fn a_token_without_its_confirmation_is_rejected() {
    let mut trace = trace();
    let (at, _) = run(&mut trace, 10_001_100);
    trace.remove(at);
    let (at, _) = given(&mut trace, "x");
    is_rejected(&trace, at, "a majority is 2");
}

#[test]
fn a_confirmation_by_a_node_that_granted_nothing_is_rejected() {
    edited(10_001_100, "the protocol says false", |run| run.node = 2);
}

#[test]
fn a_confirmation_of_what_the_node_did_not_grant_is_rejected() {
    edited(10_001_100, "the protocol says false", |run| {
        let Script::Confirm { presented, .. } = &mut run.script else {
            unreachable!()
        };
        *presented = 10_000_997;
    });
}

#[test]
fn a_node_that_is_counted_without_its_grant_is_rejected() {
    let mut trace = trace();
    let (at, q1) = given(&mut trace, "x");
    q1[0] = (2, 10_001_000);
    is_rejected(&trace, at, "has not granted");
}

#[test]
fn a_grant_that_was_given_back_and_is_counted_is_rejected() {
    let mut trace = trace();
    let (at, _) = run(&mut trace, 11_000_100);
    let (given, _) = given(&mut trace, "z");
    // The yield came before the token was given.
    let mut yielded = trace.remove(at);
    let Step::Ran(run) = &mut yielded else { unreachable!() };
    run.at = 10_900_700;
    run.push.as_mut().unwrap().token = 10_900_101;
    let Script::Acquire { stop, .. } = &mut run.script else {
        unreachable!()
    };
    *stop = 13_900;
    run.proposal = 10_890_000;
    let Step::Given { at: time, .. } = &mut trace[given] else {
        unreachable!()
    };
    *time = 10_900_800;
    let step = trace.remove(given);
    trace.insert(given + 1, yielded);
    trace.insert(given + 2, step);
    is_rejected(&trace, given + 2, "has not granted");
}

#[test]
fn a_waiter_that_overtakes_another_is_rejected() {
    edited(10_600_100, "pushed", |run| {
        run.push.as_mut().unwrap().owner = "z".to_owned()
    });
}

#[test]
fn a_release_that_serves_nobody_although_somebody_waits_is_rejected() {
    edited(10_600_100, "pushed", |run| run.push = None);
}

#[test]
fn a_waiter_that_is_passed_over_or_removed_without_a_reason_is_rejected() {
    edited(10_600_100, "pushed", |run| run.unheard.push("y".to_owned()));
    edited(10_600_200, "does not wait", |run| run.unheard.push("z".to_owned()));
    edited(10_500_010, "before its time was over", |run| {
        run.swept.push("x".to_owned())
    });
}

#[test]
fn a_lease_that_ends_under_its_holder_is_rejected() {
    let mut trace = trace();
    let ended = find(&trace, |step| matches!(step, Step::Ended { owner, .. } if owner == "z"));
    trace.remove(ended);
    let (at, _) = run(&mut trace, 11_000_100);
    trace.remove(at);
    is_rejected(&trace, at, "before the holder's deadline");
}

#[test]
fn a_release_before_the_holder_has_ended_is_rejected() {
    let mut trace = trace();
    let ended = find(&trace, |step| matches!(step, Step::Ended { owner, .. } if owner == "y"));
    trace.remove(ended);
    let (at, _) = run(&mut trace, 10_900_100);
    is_rejected(&trace, at, "before it ended");
}

#[test]
fn a_step_before_its_time_is_rejected() {
    edited(10_900_200, "the clock went back", |run| run.at = 10_900_099);
}

#[test]
fn two_holders_are_rejected() {
    let mut trace = trace();
    let (at, _) = given(&mut trace, "x");
    let Step::Given { at: time, .. } = trace[at] else {
        unreachable!()
    };
    trace.insert(
        at + 1,
        Step::Given {
            at: time,
            owner: "y".to_owned(),
            token: 10_001_015,
            q1: vec![(2, 10_001_015)],
        },
    );
    is_rejected(&trace, at + 1, "while x holds");
}
