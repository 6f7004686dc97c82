//! Blocks of tokens and local runs.

use libtest_mimic::Trial;
use models::local_runs::{BRIEF, Bug, DIFFER, FENCED, LocalRuns, ONE, RISE};

use crate::report::{holds, violates};

const BOUND: &str = "3 claims, 5 holders, 6 ticks, 3 of which are a lease, 1 loss of data";

/// A run that is shorter than a lease, and one that is longer.
const SHORT: u8 = 2;
const LONG: u8 = 4;

fn model(longest: u8, bug: Option<Bug>) -> LocalRuns {
    LocalRuns {
        ticks: 6,
        longest,
        claims: 3,
        holds: 5,
        losses: 1,
        bug,
    }
}

pub(crate) fn trials() -> Vec<Trial> {
    let planted = [
        ("the first token of a block is counted", Bug::CountsTheFirst, RISE),
        ("a block runs ahead of the clock", Bug::BlockAheadOfTheClock, RISE),
        ("a block without a counter", Bug::BlockWithoutACounter, RISE),
        ("a run goes past its last token", Bug::PastTheLast, FENCED),
        ("a holder gets the token of the one before it", Bug::SameToken, DIFFER),
        ("a run goes on after the lease", Bug::LeaseHasEnded, ONE),
        ("a run has no end", Bug::WithoutEnd, BRIEF),
        ("a renewal begins a run anew", Bug::RenewalBeginsTheRunAnew, BRIEF),
    ];
    let planted = planted.map(|(name, bug, property)| {
        let longest = if bug == Bug::LeaseHasEnded { LONG } else { SHORT };
        violates(&format!("local_runs: {name}"), BOUND, property, move || {
            model(longest, Some(bug))
        })
    });
    let sound = [("shorter", SHORT), ("longer", LONG)];
    let sound = sound.map(|(what, longest)| {
        holds(&format!("local_runs, {what} than a lease"), BOUND, move || {
            model(longest, None)
        })
    });
    sound.into_iter().chain(planted).collect()
}
