//! All cases, by group.

use std::pin::Pin;
use std::sync::Arc;

use crate::case::Case;
use crate::outcome::Outcome;

pub(crate) mod cancellation;
pub(crate) mod dropped;
pub(crate) mod errors;
pub(crate) mod exclusion;
pub(crate) mod fences;
pub(crate) mod leases;
pub(crate) mod leaving;
pub(crate) mod load;
pub(crate) mod loss;
pub(crate) mod modes;
#[cfg(feature = "faults")]
pub(crate) mod network;
pub(crate) mod ownership;
pub(crate) mod reservations;
pub(crate) mod runtime;
pub(crate) mod semaphores;
pub(crate) mod together;
pub(crate) mod tokens;
pub(crate) mod waiting;

type Run = fn(Arc<Case>) -> Pin<Box<dyn Future<Output = Outcome> + Send>>;

/// One case: a sentence about every backend, and the function that shows it.
#[derive(Clone, Copy)]
pub(crate) struct Entry {
    pub(crate) sentence: &'static str,
    pub(crate) run: Run,
}

/// A group of cases, in the order in which they are run.
pub(crate) struct Group {
    pub(crate) name: &'static str,
    pub(crate) cases: &'static [Entry],
}

pub(crate) const GROUPS: &[Group] = &[
    Group {
        name: "exclusion",
        cases: exclusion::CASES,
    },
    Group {
        name: "tokens",
        cases: tokens::CASES,
    },
    Group {
        name: "ownership",
        cases: ownership::CASES,
    },
    Group {
        name: "leases",
        cases: leases::CASES,
    },
    Group {
        name: "loss",
        cases: loss::CASES,
    },
    Group {
        name: "waiting",
        cases: waiting::CASES,
    },
    Group {
        name: "together",
        cases: together::CASES,
    },
    Group {
        name: "reservations",
        cases: reservations::CASES,
    },
    Group {
        name: "modes",
        cases: modes::CASES,
    },
    #[cfg(feature = "faults")]
    Group {
        name: "network",
        cases: network::CASES,
    },
    Group {
        name: "cancellation",
        cases: cancellation::CASES,
    },
    Group {
        name: "errors",
        cases: errors::CASES,
    },
    Group {
        name: "fences",
        cases: fences::CASES,
    },
    Group {
        name: "load",
        cases: load::CASES,
    },
];

/// The cases that keep processors busy for as long as they take: beside many of them, nothing that goes by a ttl can be judged.
const HEAVY: &[&str] = &[
    "a_process_that_ends_frees_what_it_held",
    "a_thousand_names_are_held_at_once_by_one_client",
    "no_write_is_accepted_below_a_token_that_was_seen",
    "twenty_processes_lose_no_update",
];

pub(crate) fn is_heavy(case: Entry) -> bool {
    HEAVY.contains(&case.sentence)
}

/// The case with that name, which is that of its group and its sentence.
pub(crate) fn named(name: &str) -> Option<Entry> {
    let (group, sentence) = name.split_once("::")?;
    let group = GROUPS.iter().find(|known| known.name == group)?;
    group.cases.iter().find(|case| case.sentence == sentence).copied()
}

/// The name with that of the group.
pub(crate) fn full_name(case: Entry) -> String {
    let is_here = |entry: &Entry| entry.sentence == case.sentence;
    let group = GROUPS.iter().find(|group| group.cases.iter().any(is_here));
    format!("{}::{}", group.map_or("?", |group| group.name), case.sentence)
}

/// The entry of that function, which is named by its sentence, or of that sentence and what it runs.
macro_rules! entry {
    ($($part:ident)::+ => |$case:ident| $run:expr) => {
        $crate::cases::Entry {
            sentence: $crate::cases::last!($($part)::+),
            run: |$case| Box::pin(async move { $run.await }),
        }
    };
    ($($part:ident)::+) => {
        $crate::cases::Entry {
            sentence: $crate::cases::last!($($part)::+),
            run: |case| Box::pin($($part)::+(case)),
        }
    };
}
pub(crate) use entry;

/// The entries of these.
macro_rules! cases {
    ($($($part:ident)::+ $(=> |$case:ident| $run:expr)?),+ $(,)?) => {
        &[$($crate::cases::entry!($($part)::+ $(=> |$case| $run)?)),+]
    };
}
pub(crate) use cases;

/// The last part of a path, as text.
macro_rules! last {
    ($last:ident) => { stringify!($last) };
    ($first:ident :: $($rest:ident)::+) => { $crate::cases::last!($($rest)::+) };
}
pub(crate) use last;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_of_cases_is_said_of_cases_that_there_are() {
        let cases: Vec<_> = GROUPS.iter().flat_map(|group| group.cases).collect();
        for sentence in HEAVY {
            assert!(cases.iter().any(|case| case.sentence == *sentence), "{sentence}");
        }
    }
}
