//! Traces that the queue of one Redis server allows, and traces that it does not.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use models::redis_queue::server::{Answer, Renewal};
use models::redis_queue::trace::{Script, Step, accepts};

/// What a recorder writes, one step a line. The ttl is three seconds.
const TRACE: &str = r#"
{"at":10000000,"script":"acquire","owner":"a","ttl":3000,"stop":13000,"sent":1,"waits":true,"answer":{"granted":{"token":10000000,"life":3000}}}
{"at":10000500,"script":"acquire","owner":"b","ttl":3000,"stop":13000,"sent":2,"waits":true,"answer":"busy"}
{"at":10001000,"script":"acquire","owner":"c","ttl":3000,"stop":13000,"sent":3,"waits":true,"answer":"busy"}
{"at":10002000,"script":"acquire","owner":"d","ttl":3000,"stop":13000,"sent":4,"waits":true,"answer":"busy"}
{"at":11000000,"script":"renew","owner":"a","ttl":3000,"stop":12500,"answer":"renewed"}
{"at":11000100,"script":"acquire","owner":"b","ttl":3000,"stop":13900,"sent":5,"waits":true,"answer":"busy"}
{"at":11500000,"script":"acquire","owner":"e","ttl":3000,"stop":12000,"sent":6,"waits":true,"answer":"late"}
{"at":11600000,"script":"release","owner":"a","released":true,"push":{"owner":"b","token":11600000,"sent":5,"life":2900}}
{"at":11700000,"script":"release","owner":"b","released":true,"push":{"owner":"d","token":11700000,"sent":4,"life":2998},"unheard":["c"]}
{"at":11700100,"script":"acquire","owner":"f","ttl":3000,"stop":14700,"sent":8,"waits":false,"answer":"busy"}
{"at":11800000,"script":"release","owner":"f","released":false}
{"at":13000000,"script":"acquire","owner":"e","ttl":3000,"stop":16000,"sent":7,"waits":false,"answer":{"granted":{"token":13000000,"life":3000}}}
{"at":13100000,"script":"renew","owner":"d","ttl":3000,"stop":14600,"answer":"lost"}
{"at":13200000,"script":"release","owner":"e","released":true}
{"at":13200100,"script":"acquire","owner":"g","ttl":3000,"stop":16200,"sent":9,"waits":false,"answer":{"granted":{"token":13200100,"life":3000}}}
"#;

fn trace() -> Vec<Step> {
    let lines = TRACE.lines().filter(|line| !line.is_empty());
    lines.map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[track_caller]
fn is_rejected(at: usize, reason: &str, edit: impl FnOnce(&mut Vec<Step>)) {
    let mut trace = trace();
    edit(&mut trace);
    let rejected = accepts(&trace).unwrap_err();
    assert_eq!(rejected.at, at, "{rejected}");
    assert!(rejected.reason.contains(reason), "{rejected}");
}

fn answer(step: &mut Step, new: Answer) {
    match &mut step.script {
        Script::Acquire { answer, .. } => *answer = new,
        _ => unreachable!(),
    }
}

#[test]
fn a_trace_of_the_queue_is_accepted() {
    assert_eq!(accepts(&trace()), Ok(()));
}

#[test]
fn steps_are_written_as_they_are_read() {
    for step in trace() {
        let line = serde_json::to_string(&step).unwrap();
        assert!(TRACE.contains(&line), "{line}");
    }
}

#[test]
fn a_token_that_was_lowered_is_rejected() {
    is_rejected(7, "pushed", |trace| trace[7].push.as_mut().unwrap().token = 10_000_000);
}

#[test]
fn a_grant_while_another_claim_holds_is_rejected() {
    let granted = Answer::Granted {
        token: 10_000_500,
        life: 3000,
    };
    is_rejected(1, "says", |trace| answer(&mut trace[1], granted));
}

#[test]
fn a_waiter_that_overtakes_another_is_rejected() {
    is_rejected(7, "pushed", |trace| {
        let push = trace[7].push.as_mut().unwrap();
        (push.owner, push.sent, push.life) = ("c".to_owned(), 3, 2999);
    });
}

#[test]
fn waiters_that_came_in_another_order_are_rejected() {
    is_rejected(7, "pushed", |trace| {
        let (b, c) = (trace[1].script.clone(), trace[2].script.clone());
        (trace[1].script, trace[2].script) = (c, b);
    });
}

#[test]
fn a_waiter_that_is_passed_over_without_a_reason_is_rejected() {
    is_rejected(8, "pushed", |trace| trace[8].unheard.clear());
}

#[test]
fn a_release_that_serves_nobody_although_somebody_waits_is_rejected() {
    is_rejected(7, "pushed", |trace| trace[7].push = None);
}

#[test]
fn a_push_that_answers_an_older_request_is_rejected() {
    is_rejected(7, "pushed", |trace| trace[7].push.as_mut().unwrap().sent = 2);
}

#[test]
fn a_late_request_that_was_carried_out_is_rejected() {
    is_rejected(6, "says", |trace| answer(&mut trace[6], Answer::Busy));
}

#[test]
fn a_renewal_of_a_lock_that_has_ended_is_rejected() {
    is_rejected(12, "says", |trace| {
        let Script::Renew { answer, .. } = &mut trace[12].script else {
            unreachable!()
        };
        *answer = Renewal::Renewed;
    });
}

#[test]
fn a_grant_before_the_lease_has_ended_is_rejected() {
    is_rejected(11, "says", |trace| trace[11].at = 12_900_000);
}
