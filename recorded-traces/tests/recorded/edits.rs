//! Changes a trace in one step, in many places, and sees that no such trace is accepted.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::time::Instant;

/// How many places each edit is tried at.
const TRIES: usize = 8;

/// A way to falsify a trace.
pub(crate) enum Edit<S> {
    /// Changes a step; false if it cannot.
    Change(fn(&mut S) -> bool),
    /// Removes the step with that number if that is so.
    Remove(fn(&[S], usize) -> bool),
    /// Swaps what two steps did, not their times; false if they are not two to be swapped.
    Swap(fn(&mut S, &mut S) -> bool),
}

/// How far apart steps may be that are swapped.
const APART: usize = 20;

/// Tries all edits of all traces. Panics if an edited trace is accepted, or if an edit has no place in any trace.
pub(crate) fn try_all<S: Clone + Debug, R: Debug>(
    traces: &[Vec<S>],
    edits: &[(&str, Edit<S>)],
    accepts: impl Fn(&[S]) -> Result<(), R>,
) {
    let began = Instant::now();
    let mut rejected = 0;
    for (name, edit) in edits {
        let before = rejected;
        for trace in traces {
            let places = (0..trace.len()).filter(|at| edited(trace, *at, edit).is_some());
            let places: Vec<_> = places.collect();
            let every = places.len().div_ceil(TRIES).max(1);
            for at in places.into_iter().step_by(every) {
                let (window, length) = edited(trace, at, edit).unwrap();
                let edited = [&trace[..at], &window, &trace[at + length..]].concat();
                if accepts(&edited).is_ok() {
                    let steps = &trace[at..at + length];
                    panic!("accepted after the edit at step {at}: {name}; {steps:?} became {window:?}");
                }
                rejected += 1;
            }
        }
        assert!(rejected > before, "nowhere to try the edit: {name}");
    }
    let took = began.elapsed().as_secs_f64();
    let kinds = edits.len();
    eprintln!("{kinds} kinds of edits, {rejected} edited traces, all rejected ({took:.1} s)");
}

/// What the steps from there on become, and how many they were.
fn edited<S: Clone>(trace: &[S], at: usize, edit: &Edit<S>) -> Option<(Vec<S>, usize)> {
    match edit {
        Edit::Change(change) => {
            let mut step = trace[at].clone();
            change(&mut step).then(|| (vec![step], 1))
        }
        Edit::Remove(fits) => fits(trace, at).then(|| (Vec::new(), 1)),
        Edit::Swap(swap) => {
            let end = trace.len().min(at + APART);
            (at + 1..end).find_map(|other| {
                let (mut one, mut two) = (trace[at].clone(), trace[other].clone());
                swap(&mut one, &mut two).then(|| {
                    let mut window = trace[at..=other].to_vec();
                    let last = window.len() - 1;
                    (window[0], window[last]) = (one, two);
                    (window, last + 1)
                })
            })
        }
    }
}

/// Counts the kinds of steps, and panics if there are too few of one.
pub(crate) fn count(title: &str, kinds: impl Iterator<Item = &'static str>, least: &[(&str, usize)]) {
    let mut counts = BTreeMap::<_, usize>::new();
    for kind in kinds {
        *counts.entry(kind).or_default() += 1;
    }
    eprintln!("{title}: {counts:?}");
    for (kind, least) in least {
        let count = counts.get(kind).copied().unwrap_or_default();
        assert!(count >= *least, "{title}: {count} of the kind {kind}, expected {least}");
    }
}
