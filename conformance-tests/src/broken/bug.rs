//! The bugs that are planted, the case that must catch each, and how that fails then.

use lock_core::Capabilities;

use crate::cases::{Entry, modes, named};
use crate::harness::Harness;

/// A bug that real lock libraries have had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bug {
    /// None at all, to show that what catches a bug catches nothing else.
    Nothing,
    AWriterIsGrantedBesideReaders,
    AskingAgainKeepsTheOldTtl,
    BlockIsNotCounted,
    BusyIsAnError,
    CancelLeavesItsEntry,
    #[cfg(feature = "faults")]
    DeadlineFromALateReply,
    DeadlineFromTheAcquireOnASharedLease,
    DowngradeReleasesFirst,
    ExpiredIsStillHeld,
    FenceAdmitsWithoutAMark,
    FenceForgetsReaders,
    FenceTakesWhatDiffers,
    LateRequestIsHonoured,
    LossIsNeverTold,
    NamesAreFolded,
    NoCheckAfterTheWait,
    OnePermitTooMany,
    OnlyItsOwnPlaceIsChecked,
    OwnerPerClient,
    QueueIsOutOfOrder,
    ReadersPassAWriter,
    ReleaseDoesNothing,
    ReleaseWithoutOwnerCheck,
    RenewalResurrects,
    ReservationIsIgnored,
    TokenIsKeptByForce,
    TokenPerAttempt,
    TokenPerSession,
    TokenRestartsAfterRelease,
    TokensAreRandom,
    WakeUpIsLost,
}

/// A bug, and how it is found.
struct Planted {
    bug: Bug,
    /// What goes wrong.
    words: &'static str,
    /// The name of the case that must fail.
    case: &'static str,
    /// What the message of the failure must contain. Any other failure, such as that of a server that did not answer, shows nothing of the
    /// bug.
    sign: &'static str,
}

const NO_HIGHER_TOKEN: &str = "a later grant carries a higher token";

/// By the group of the case that catches them. Each group has one at least.
const PLANTED: &[Planted] = &[
    Planted {
        bug: Bug::NamesAreFolded,
        words: "names that differ in case or blanks are one",
        case: "exclusion::names_that_look_alike_stay_apart",
        sign: "grants \"A\", which is free",
    },
    Planted {
        bug: Bug::NoCheckAfterTheWait,
        words: "nothing is checked after the wait",
        case: "exclusion::eight_clients_hold_one_at_a_time",
        sign: "one holds \"n\" at a time",
    },
    Planted {
        bug: Bug::BlockIsNotCounted,
        words: "a block of tokens is counted as if it were one",
        case: "tokens::tokens_rise_across_releases_by_any_client",
        sign: NO_HIGHER_TOKEN,
    },
    Planted {
        bug: Bug::TokenPerAttempt,
        words: "a token per attempt, not per grant",
        case: "tokens::a_token_is_drawn_at_the_grant_and_not_at_the_attempt",
        sign: NO_HIGHER_TOKEN,
    },
    Planted {
        bug: Bug::TokenPerSession,
        words: "a session draws tokens before it has raised the counter",
        case: "tokens::tokens_rise_across_a_new_client_and_a_closed_one",
        sign: NO_HIGHER_TOKEN,
    },
    Planted {
        bug: Bug::TokensAreRandom,
        words: "random tokens",
        case: "tokens::tokens_rise_across_releases_by_any_client",
        sign: NO_HIGHER_TOKEN,
    },
    Planted {
        bug: Bug::OwnerPerClient,
        words: "an owner per client instead of per acquisition",
        case: "ownership::a_late_release_spares_the_successor",
        sign: "is held and refused to others",
    },
    Planted {
        bug: Bug::ReleaseWithoutOwnerCheck,
        words: "release without owner check",
        case: "ownership::release_by_another_owner_harms_nothing",
        sign: "that does not hold it is NotHeld",
    },
    Planted {
        bug: Bug::RenewalResurrects,
        words: "a renewal brings back what has expired",
        case: "ownership::renewal_never_brings_back_an_expired_lock",
        sign: "an expired lock is not renewed",
    },
    Planted {
        bug: Bug::AskingAgainKeepsTheOldTtl,
        words: "asking again does not start the ttl anew",
        case: "leases::asking_again_keeps_the_lock_for_a_full_ttl",
        sign: "stops believing before the next one is granted",
    },
    Planted {
        bug: Bug::DeadlineFromTheAcquireOnASharedLease,
        words: "on a shared lease the deadline counts from the acquire",
        case: "leases::a_lock_taken_late_is_not_believed_in_longer_than_the_server_keeps_it",
        sign: "is not held once the next one is granted",
    },
    Planted {
        bug: Bug::ExpiredIsStillHeld,
        words: "an expired lock is still believed in",
        case: "leases::an_unrenewed_lock_is_free_after_its_ttl_and_not_before_its_holder_knows",
        sign: "is not held once the next one is granted",
    },
    Planted {
        bug: Bug::LossIsNeverTold,
        words: "a renewal of what is lost is an error instead of an answer",
        case: "loss::a_lock_that_expires_early_is_told_within_one_renewal",
        sign: "loss is seen within",
    },
    Planted {
        bug: Bug::OnlyItsOwnPlaceIsChecked,
        words: "after the wait only the own place in the line is checked",
        case: "waiting::a_cancelled_waiter_holds_nobody_up",
        sign: "is served while the lock is held",
    },
    Planted {
        bug: Bug::QueueIsOutOfOrder,
        words: "a queue that says it is fair is not",
        case: "waiting::waiters_of_different_clients_are_served_in_order",
        sign: "first come, first served",
    },
    Planted {
        bug: Bug::WakeUpIsLost,
        words: "a wake-up is lost",
        case: "waiting::a_waiter_of_another_client_gets_the_lock_on_release",
        sign: "the waiter gets the lock on release",
    },
    Planted {
        bug: Bug::TokenIsKeptByForce,
        words: "the holder after a forced release gets the token of its victim",
        case: "together::one_leads_at_a_time_over_two_hundred_forced_changes",
        sign: "tokens of leaders rise",
    },
    Planted {
        bug: Bug::ReservationIsIgnored,
        words: "a release frees what is reserved",
        case: "reservations::a_name_that_is_released_early_stays_taken_for_the_rest_of_its_time",
        sign: "the name is refused to its last holder too",
    },
    Planted {
        bug: Bug::AWriterIsGrantedBesideReaders,
        words: "a writer is granted beside readers",
        case: "modes::an_exclusive_lock_excludes_readers_and_writers_and_readers_admit_each_other",
        sign: "each of several readers excludes writers",
    },
    Planted {
        bug: Bug::DowngradeReleasesFirst,
        words: "a downgrade releases first",
        case: "modes::a_downgrade_lets_no_writer_in_between",
        sign: "a downgrade lets no writer in",
    },
    Planted {
        bug: Bug::OnePermitTooMany,
        words: "one permit too many",
        case: "modes::a_semaphore_has_no_permit_too_many_over_a_thousand_random_holds",
        sign: "hold a permit at once",
    },
    Planted {
        bug: Bug::ReadersPassAWriter,
        words: "readers pass a waiting writer",
        case: "modes::a_reader_that_comes_after_a_waiting_writer_is_served_after_it",
        sign: "no reader passes a waiting writer",
    },
    #[cfg(feature = "faults")]
    Planted {
        bug: Bug::DeadlineFromALateReply,
        words: "the deadline counts from a reply that comes late",
        case: "network::late_replies_shorten_what_is_believed",
        sign: "on the way leave at most",
    },
    Planted {
        bug: Bug::CancelLeavesItsEntry,
        words: "a cancelled wait leaves its queue entry",
        case: "cancellation::acquire_dropped_at_every_poll_of_a_wait_leaves_nothing",
        sign: "things are left after",
    },
    Planted {
        bug: Bug::LateRequestIsHonoured,
        words: "a late request is honoured beyond its ttl",
        case: "cancellation::a_request_delivered_after_its_release_is_gone_after_a_ttl",
        sign: "\"n\" is free within",
    },
    Planted {
        bug: Bug::ReleaseDoesNothing,
        words: "a dropped guard is not released",
        case: "cancellation::a_dropped_guard_is_released",
        sign: "\"n\" is free within",
    },
    Planted {
        bug: Bug::BusyIsAnError,
        words: "busy is reported as an error",
        case: "errors::busy_is_never_reported_as_broken",
        sign: "a held name is busy and no failure",
    },
    Planted {
        bug: Bug::FenceAdmitsWithoutAMark,
        words: "a fence admits without raising its mark",
        case: "fences::admission_before_the_read_saves_an_update",
        sign: "is accepted: false, and leaves",
    },
    Planted {
        bug: Bug::FenceForgetsReaders,
        words: "a fence keeps no mark of readers",
        case: "modes::the_resource_refuses_stale_holders_of_both_kinds_and_no_reader_for_another",
        sign: "it refuses a writer after a newer reader",
    },
    Planted {
        bug: Bug::FenceTakesWhatDiffers,
        words: "a fence looks for a change of the token and not at its order",
        case: "fences::a_stale_token_is_refused_and_an_equal_one_accepted",
        sign: "is accepted: false, and leaves",
    },
    Planted {
        bug: Bug::TokenRestartsAfterRelease,
        words: "tokens start again after a release",
        case: "load::a_mixed_load_with_faults_keeps_every_invariant",
        sign: "its history is one that locks may have",
    },
];

impl Bug {
    /// Every bug but [`Nothing`](Self::Nothing).
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        PLANTED.iter().map(|planted| planted.bug)
    }

    fn planted(self) -> Option<&'static Planted> {
        PLANTED.iter().find(|planted| planted.bug == self)
    }

    /// What goes wrong.
    pub(crate) fn words(self) -> &'static str {
        self.planted().map_or("no bug", |planted| planted.words)
    }

    /// The case that must fail.
    pub(crate) fn case(self) -> Option<Entry> {
        self.planted().and_then(|planted| named(planted.case))
    }

    /// Whether a case that failed like that failed because of the bug.
    pub(crate) fn leads_to(self, failure: &str) -> bool {
        self.planted().is_some_and(|planted| failure.contains(planted.sign))
    }

    /// Whether the bug makes sense in such a backend.
    pub(crate) fn plantable(self, capabilities: &Capabilities, harness: &dyn Harness) -> Result<(), &'static str> {
        match self {
            Self::DeadlineFromTheAcquireOnASharedLease if !capabilities.shares_leases => {
                Err("no two locks share a lease")
            }
            Self::DeadlineFromTheAcquireOnASharedLease if harness.leases_are_connections() => {
                Err("an acquisition on a shared lease keeps all of it: the deadline may count from there")
            }
            Self::QueueIsOutOfOrder | Self::ReadersPassAWriter if !capabilities.fair => {
                Err("the backend promises no order among processes")
            }
            Self::CancelLeavesItsEntry if !capabilities.list => {
                Err("neither the harness nor the backend can list what is left")
            }
            Self::TokenIsKeptByForce if !capabilities.force_release => Err("the backend cannot release by force"),
            Self::ReservationIsIgnored if !capabilities.reservations => Err("the backend has no reservations"),
            Self::AWriterIsGrantedBesideReaders
            | Self::DowngradeReleasesFirst
            | Self::FenceForgetsReaders
            | Self::ReadersPassAWriter
                if !capabilities.shared =>
            {
                Err(modes::NO_SHARES)
            }
            Self::OnePermitTooMany if !capabilities.permits => Err(modes::NO_PERMITS),
            _ => Ok(()),
        }
    }

    pub(crate) fn name(self) -> String {
        self.words().replace([' ', '-'], "_").replace([',', '\''], "")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cases::GROUPS;

    #[test]
    fn each_group_of_cases_has_a_planted_bug_and_each_bug_a_case() {
        for group in GROUPS {
            let prefix = format!("{}::", group.name);
            let is_of_it = |planted: &Planted| planted.case.starts_with(&prefix);
            assert!(PLANTED.iter().any(is_of_it), "{}", group.name);
        }
        for planted in PLANTED {
            assert!(named(planted.case).is_some(), "{}", planted.case);
        }
    }
}
