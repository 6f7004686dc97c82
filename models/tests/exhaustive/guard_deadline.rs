//! The deadline of a guard.

use libtest_mimic::Trial;
use models::guard_deadline::{Bug, ENDS_FIRST, FINAL, GuardDeadline, NEVER_BACK};

use crate::report::{holds, violates};

const BOUND: &str = "3 renewals, 15 ticks, 5 of which are a lease";

fn model(bug: Option<Bug>) -> GuardDeadline {
    GuardDeadline {
        ticks: 15,
        renewals: 3,
        bug,
    }
}

pub(crate) fn trials() -> Vec<Trial> {
    let planted = [
        (
            "the deadline counts from the answer",
            Bug::CountsFromTheAnswer,
            ENDS_FIRST,
        ),
        ("the clock stops in suspend", Bug::ClockStopsInSuspend, ENDS_FIRST),
        ("no allowance for drift", Bug::NoDriftAllowance, ENDS_FIRST),
        (
            "an answer is taken for that to the last renewal",
            Bug::AnswerTakenForTheLastRenewal,
            ENDS_FIRST,
        ),
        (
            "an older answer moves the deadline back",
            Bug::OlderAnswerMovesBack,
            NEVER_BACK,
        ),
        ("a late answer revives the guard", Bug::LateAnswerRevives, FINAL),
    ];
    let planted = planted.map(|(name, bug, property)| {
        violates(&format!("guard_deadline: {name}"), BOUND, property, move || {
            model(Some(bug))
        })
    });
    let sound = holds("guard_deadline", BOUND, || model(None));
    [sound].into_iter().chain(planted).collect()
}
