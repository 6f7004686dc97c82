//! Tokens on Postgres.

use libtest_mimic::Trial;
use models::postgres_epoch::{Bug, DURABLE, PostgresEpoch, RISE};

use crate::report::{holds, violates};

fn two(bug: Option<Bug>) -> PostgresEpoch<2> {
    PostgresEpoch {
        locks: 2,
        ends: 2,
        restores: 0,
        logged: false,
        bug,
    }
}

fn logged(bug: Option<Bug>) -> PostgresEpoch<2> {
    PostgresEpoch {
        logged: true,
        ends: 1,
        ..two(bug)
    }
}

fn sound() -> Vec<Trial> {
    let name = "postgres_epoch";
    vec![
        holds(name, "2 sessions, 2 locks each, 2 crashes or restarts", || two(None)),
        holds(
            name,
            "2 sessions, 2 locks each, 1 crash or restart, sequence with a log",
            || logged(None),
        ),
        holds(name, "3 sessions, 1 lock each, 1 crash or restart", || PostgresEpoch::<
            3,
        > {
            locks: 1,
            ends: 1,
            restores: 0,
            logged: false,
            bug: None,
        }),
        holds(name, "2 sessions, 2 locks each, 1 restore", || PostgresEpoch::<2> {
            restores: 1,
            ends: 0,
            ..two(None)
        }),
    ]
}

pub(crate) fn trials() -> Vec<Trial> {
    let planted = [
        ("no raise", Bug::NoRaise, RISE),
        ("a raise without a second look", Bug::RaiseWithoutRecheck, RISE),
        ("a raise to the clock alone", Bug::RaiseToTheClockAlone, RISE),
        ("the sequence is set beside draws", Bug::SetBesideDraws, RISE),
        ("sessions survive a crash", Bug::SessionsSurviveACrash, RISE),
        ("the ceiling is ignored", Bug::CeilingIgnored, DURABLE),
        ("the ceiling is ignored, until a crash", Bug::CeilingIgnored, RISE),
        ("no beat after the ceiling was raised", Bug::NoBeatAfterTheRaise, RISE),
    ];
    let bound = "2 sessions, 2 locks each, 2 crashes or restarts";
    let planted = planted.map(|(name, bug, property)| {
        violates(&format!("postgres_epoch: {name}"), bound, property, move || {
            two(Some(bug))
        })
    });
    let of_logged = violates(
        "postgres_epoch: only the start of the server is compared",
        "2 sessions, sequence with a log",
        RISE,
        || logged(Some(Bug::StartOfTheServerAlone)),
    );
    sound().into_iter().chain(planted).chain([of_logged]).collect()
}
