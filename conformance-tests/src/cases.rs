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
pub(crate) mod together;
pub(crate) mod tokens;
pub(crate) mod told;
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
    "a_hundred_tasks_of_one_client_hold_one_at_a_time",
    "a_hung_renewal_beside_a_thousand_held_locks_loses_none_of_them",
    "a_process_that_ends_frees_what_it_held",
    "a_thousand_names_are_held_at_once_by_one_client",
    "a_thousand_waiters_on_one_name_finish",
    "no_write_is_accepted_below_a_token_that_was_seen",
    "twenty_processes_lose_no_update",
];

/// The cases that show what the client library does by itself, whatever the backend: one backend under them is enough.
const OF_THE_CLIENT: &[&str] = &[
    "a_blocked_runtime_loses_nothing",
    "a_failure_after_busy_is_waited_out",
    "a_guard_dropped_outside_a_runtime_is_released",
    "a_guard_dropped_while_the_server_is_silent_is_released_later",
    "a_guard_whose_deadline_has_passed_is_not_revived",
    "a_lease_counts_from_the_request_and_not_from_the_reply",
    "a_lock_that_is_not_to_be_renewed_is_not",
    "a_loss_signal_outlives_its_guard",
    "a_refusing_server_is_noticed_before_it_frees",
    "a_refusing_server_is_unavailable",
    "a_server_whose_replies_are_lost_is_noticed_before_it_frees",
    "a_silent_server_is_unavailable_within_the_time_for_one_request",
    "a_wait_ends_on_a_connection_that_fell_silent",
    "a_wait_ends_when_it_is_over",
    "an_unreachable_server_is_noticed_before_it_frees",
    "broken_to_the_end_of_the_wait_is_unavailable",
    "late_replies_keep_the_lock_while_they_come_in_time",
    "nothing_is_renewed_after_the_release",
    "one_transient_renewal_error_loses_nothing",
    "release_after_loss_is_already_lost",
    "run_cancels_its_work_on_loss",
    "scopes_are_folders_of_names",
    "the_longest_hold_ends_the_lock",
    "the_loss_of_one_lock_leaves_others_held",
    "waiters_of_one_client_are_served_in_order",
    "with_cancels_its_body_on_loss",
];

pub(crate) fn is_heavy(case: Entry) -> bool {
    HEAVY.contains(&case.sentence)
}

pub(crate) fn shows_the_client_alone(case: Entry) -> bool {
    OF_THE_CLIENT.contains(&case.sentence)
}

/// The name with that of the group.
pub(crate) fn full_name(case: Entry) -> String {
    let is_here = |entry: &Entry| entry.sentence == case.sentence;
    let group = GROUPS.iter().find(|group| group.cases.iter().any(is_here));
    format!("{}::{}", group.map_or("?", |group| group.name), case.sentence)
}

/// The entries of those functions; each is named by its sentence.
macro_rules! cases {
    ($($($part:ident)::+),+ $(,)?) => {
        &[$($crate::cases::Entry {
            sentence: $crate::cases::last!($($part)::+),
            run: |case| Box::pin($($part)::+(case)),
        }),+]
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
        for sentence in HEAVY.iter().chain(OF_THE_CLIENT) {
            assert!(cases.iter().any(|case| case.sentence == *sentence), "{sentence}");
        }
    }
}
