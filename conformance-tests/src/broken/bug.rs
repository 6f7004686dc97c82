//! The bugs that are planted, and the cases that must catch them.

use lock_core::Capabilities;

#[cfg(feature = "faults")]
use crate::cases::network;
use crate::cases::{
    Entry, cancellation, cases, dropped, errors, exclusion, fences, leases, leaving, modes, ownership, reservations,
    runtime, together, tokens, told, waiting,
};
use crate::harness::Harness;

/// A bug that real lock libraries have had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bug {
    /// None at all, to show that what catches a bug catches nothing else.
    Nothing,
    AcquireTwiceIsBusy,
    AskingAgainKeepsTheOldTtl,
    BlockBeginsTooLow,
    BlockIsNotCounted,
    BusyIsAnError,
    BusyIsNotTold,
    CallsHaveNoLimit,
    CancelLeavesItsEntry,
    HolderIsRemembered,
    OutlivesItsRuntime,
    DeadlineFromALateReply,
    DeadlineFromTheAcquireOnASharedLease,
    DeadlineFromTheReply,
    ExpiredIsStillHeld,
    FenceAdmitsWithoutAMark,
    FenceChecksBeforeItWrites,
    FenceRefusesItsHolder,
    FenceTakesWhatDiffers,
    ForceTakesAll,
    LateRequestIsHonoured,
    ListIgnoresItsPrefix,
    ListLeavesOutNames,
    LossIsNeverTold,
    NamesAreFolded,
    NoCheckAfterTheWait,
    OnlyItsOwnPlaceIsChecked,
    OwnerPerClient,
    ProvidedMethodsAreNotForwarded,
    QueueIsOutOfOrder,
    RefusalMayPass,
    ReleaseAlwaysSaysReleased,
    ReleaseDoesNothing,
    ReleaseWithoutOwnerCheck,
    RenewalDrawsAToken,
    RenewalLengthensTheSuccessor,
    RenewalResurrects,
    RenewalShortensAReservation,
    ReservationEndsWithItsClient,
    ReservationIsHidden,
    ReservationIsIgnored,
    ReservationOutlivesItsClaim,
    ReservationWithoutOwnerCheck,
    TokenPerAttempt,
    TokenFollowsACounterThatFell,
    TokenIsKeptByForce,
    TokenPerSession,
    TokenRestartsAfterRelease,
    TokensAreLostWithTheStore,
    TokensAreRandom,
    TtlIsIgnored,
    TtlOfZeroIsAccepted,
    WaitReturnsAtOnce,
    WaitRunsPastItsDeadline,
    WakeUpIsLost,
    AWriterIsGrantedBesideReaders,
    AnotherKindIsBusy,
    DowngradeReleasesFirst,
    ExpiredPermitsStayTaken,
    ListShowsOneHolder,
    OnePermitTooMany,
    ReadersExcludeEachOther,
    ReadersPassAWriter,
    ReadersShareAToken,
    ReleaseOfOneReaderEndsAll,
}

impl Bug {
    pub(crate) const ALL: &[Self] = &[
        Self::AcquireTwiceIsBusy,
        Self::AskingAgainKeepsTheOldTtl,
        Self::BlockBeginsTooLow,
        Self::BlockIsNotCounted,
        Self::BusyIsAnError,
        Self::BusyIsNotTold,
        Self::CallsHaveNoLimit,
        Self::CancelLeavesItsEntry,
        Self::HolderIsRemembered,
        Self::OutlivesItsRuntime,
        Self::DeadlineFromALateReply,
        Self::DeadlineFromTheAcquireOnASharedLease,
        Self::DeadlineFromTheReply,
        Self::ExpiredIsStillHeld,
        Self::FenceAdmitsWithoutAMark,
        Self::FenceChecksBeforeItWrites,
        Self::FenceRefusesItsHolder,
        Self::FenceTakesWhatDiffers,
        Self::ForceTakesAll,
        Self::LateRequestIsHonoured,
        Self::ListIgnoresItsPrefix,
        Self::ListLeavesOutNames,
        Self::LossIsNeverTold,
        Self::NamesAreFolded,
        Self::NoCheckAfterTheWait,
        Self::OnlyItsOwnPlaceIsChecked,
        Self::OwnerPerClient,
        Self::ProvidedMethodsAreNotForwarded,
        Self::QueueIsOutOfOrder,
        Self::RefusalMayPass,
        Self::ReleaseAlwaysSaysReleased,
        Self::ReleaseDoesNothing,
        Self::ReleaseWithoutOwnerCheck,
        Self::RenewalDrawsAToken,
        Self::RenewalLengthensTheSuccessor,
        Self::RenewalResurrects,
        Self::RenewalShortensAReservation,
        Self::ReservationEndsWithItsClient,
        Self::ReservationIsHidden,
        Self::ReservationIsIgnored,
        Self::ReservationOutlivesItsClaim,
        Self::ReservationWithoutOwnerCheck,
        Self::TokenPerAttempt,
        Self::TokenFollowsACounterThatFell,
        Self::TokenIsKeptByForce,
        Self::TokenPerSession,
        Self::TokenRestartsAfterRelease,
        Self::TokensAreLostWithTheStore,
        Self::TokensAreRandom,
        Self::TtlIsIgnored,
        Self::TtlOfZeroIsAccepted,
        Self::WaitReturnsAtOnce,
        Self::WaitRunsPastItsDeadline,
        Self::WakeUpIsLost,
        Self::AWriterIsGrantedBesideReaders,
        Self::AnotherKindIsBusy,
        Self::DowngradeReleasesFirst,
        Self::ExpiredPermitsStayTaken,
        Self::ListShowsOneHolder,
        Self::OnePermitTooMany,
        Self::ReadersExcludeEachOther,
        Self::ReadersPassAWriter,
        Self::ReadersShareAToken,
        Self::ReleaseOfOneReaderEndsAll,
    ];

    /// What goes wrong.
    pub(crate) fn words(self) -> &'static str {
        match self {
            Self::Nothing => "no bug",
            Self::AcquireTwiceIsBusy => "asking again for what is held is busy",
            Self::AskingAgainKeepsTheOldTtl => "asking again does not start the ttl anew",
            Self::BlockBeginsTooLow => "a block of tokens begins with the last one of the grant before",
            Self::BlockIsNotCounted => "a block of tokens is counted as if it were one",
            Self::BusyIsAnError => "busy is reported as an error",
            Self::BusyIsNotTold => "a wait does not tell that the name is busy",
            Self::CallsHaveNoLimit => "calls into silence have no limit",
            Self::CancelLeavesItsEntry => "a cancelled wait leaves its queue entry",
            Self::OutlivesItsRuntime => "what a client holds is renewed after its runtime has ended",
            Self::DeadlineFromALateReply => "the deadline counts from a reply that comes late",
            Self::DeadlineFromTheAcquireOnASharedLease => "on a shared lease the deadline counts from the acquire",
            Self::DeadlineFromTheReply => "the deadline counts from the reply",
            Self::ExpiredIsStillHeld => "an expired lock is still believed in",
            Self::FenceAdmitsWithoutAMark => "a fence admits without raising its mark",
            Self::FenceChecksBeforeItWrites => "a fence checks the token in one step and writes in another",
            Self::FenceRefusesItsHolder => "a fence refuses the second write of its holder",
            Self::FenceTakesWhatDiffers => "a fence looks for a change of the token and not at its order",
            Self::ForceTakesAll => "a forced release takes all locks of its victim",
            Self::LateRequestIsHonoured => "a late request is honoured beyond its ttl",
            Self::ListIgnoresItsPrefix => "a list has what is not under its prefix",
            Self::ListLeavesOutNames => "a list leaves names out",
            Self::LossIsNeverTold => "a renewal of what is lost is an error instead of an answer",
            Self::NamesAreFolded => "names that differ in case or blanks are one",
            Self::NoCheckAfterTheWait => "nothing is checked after the wait",
            Self::OnlyItsOwnPlaceIsChecked => "after the wait only the own place in the line is checked",
            Self::OwnerPerClient => "an owner per client instead of per acquisition",
            Self::ProvidedMethodsAreNotForwarded => "a pointer does not forward the provided methods",
            Self::QueueIsOutOfOrder => "a queue that says it is fair is not",
            Self::RefusalMayPass => "a refusal that only a person can mend is told as one that may pass",
            Self::ReleaseAlwaysSaysReleased => "a release of what is not held says released",
            Self::ReleaseDoesNothing => "a dropped guard is not released",
            Self::ReleaseWithoutOwnerCheck => "release without owner check",
            Self::RenewalDrawsAToken => "a renewal draws a token",
            Self::RenewalLengthensTheSuccessor => "a late renewal lengthens the successor's lease",
            Self::RenewalResurrects => "a renewal brings back what has expired",
            Self::TokenPerAttempt => "a token per attempt, not per grant",
            Self::TokenFollowsACounterThatFell => "a connected client draws from a counter that was set back",
            Self::TokenIsKeptByForce => "the holder after a forced release gets the token of its victim",
            Self::TokenPerSession => "a session draws tokens before it has raised the counter",
            Self::TokenRestartsAfterRelease => "tokens start again after a release",
            Self::TokensAreLostWithTheStore => "tokens start again with an empty store",
            Self::TokensAreRandom => "random tokens",
            Self::TtlIsIgnored => "a lock without signs of life is kept for ever",
            Self::TtlOfZeroIsAccepted => "a ttl of zero is accepted",
            Self::WaitReturnsAtOnce => "a wait returns at once",
            Self::WaitRunsPastItsDeadline => "a wait runs past its deadline",
            Self::HolderIsRemembered => "who holds a lock is asked once and remembered",
            Self::RenewalShortensAReservation => "a renewal ends a reservation",
            Self::ReservationEndsWithItsClient => "a reservation ends with its client",
            Self::ReservationIsHidden => "a reservation is not shown",
            Self::ReservationIsIgnored => "a release frees what is reserved",
            Self::ReservationOutlivesItsClaim => "a claim that never became a guard leaves its reservation",
            Self::ReservationWithoutOwnerCheck => "a late reservation takes a name that its claim does not hold",
            Self::WakeUpIsLost => "a wake-up is lost",
            Self::AWriterIsGrantedBesideReaders => "a writer is granted beside readers",
            Self::AnotherKindIsBusy => "a name of another kind is busy instead of refused",
            Self::DowngradeReleasesFirst => "a downgrade releases first",
            Self::ExpiredPermitsStayTaken => "permits of expired holders stay taken",
            Self::ListShowsOneHolder => "list shows one holder of a name",
            Self::OnePermitTooMany => "one permit too many",
            Self::ReadersExcludeEachOther => "readers exclude each other",
            Self::ReadersPassAWriter => "readers pass a waiting writer",
            Self::ReadersShareAToken => "readers share a token",
            Self::ReleaseOfOneReaderEndsAll => "the release of one reader ends all",
        }
    }

    /// The cases of which one at least must fail.
    pub(crate) fn cases(self) -> &'static [Entry] {
        match self {
            Self::Nothing => &[],
            Self::AcquireTwiceIsBusy => cases![tokens::asking_again_gives_the_same_token],
            Self::AskingAgainKeepsTheOldTtl => cases![leases::asking_again_keeps_the_lock_for_a_full_ttl],
            Self::BlockBeginsTooLow | Self::BlockIsNotCounted => {
                cases![tokens::tokens_rise_across_releases_by_any_client]
            }
            Self::BusyIsAnError => cases![errors::busy_is_never_reported_as_broken],
            Self::BusyIsNotTold => cases![waiting::a_wait_tells_at_once_that_the_name_is_busy],
            #[cfg(feature = "faults")]
            Self::CallsHaveNoLimit => cases![network::every_call_ends_in_time_on_a_connection_that_fell_silent],
            #[cfg(feature = "faults")]
            Self::DeadlineFromALateReply => cases![network::late_replies_shorten_what_is_believed],
            #[cfg(not(feature = "faults"))]
            Self::CallsHaveNoLimit | Self::DeadlineFromALateReply => &[],
            Self::CancelLeavesItsEntry => cases![
                dropped::acquire_dropped_at_every_poll_of_a_wait_leaves_nothing,
                leaving::a_cancelled_waiter_holds_nobody_up,
            ],
            Self::OutlivesItsRuntime => cases![runtime::a_client_whose_own_runtime_ends_ends_with_it],
            Self::DeadlineFromTheAcquireOnASharedLease => {
                cases![leases::a_lock_taken_late_is_not_believed_in_longer_than_the_server_keeps_it]
            }
            Self::DeadlineFromTheReply | Self::ExpiredIsStillHeld => {
                cases![leases::an_unrenewed_lock_is_free_after_its_ttl_and_not_before_its_holder_knows]
            }
            Self::FenceAdmitsWithoutAMark => cases![fences::admission_before_the_read_saves_an_update],
            Self::FenceChecksBeforeItWrites => cases![fences::no_write_is_accepted_below_a_token_that_was_seen],
            Self::FenceRefusesItsHolder | Self::FenceTakesWhatDiffers => {
                cases![fences::a_stale_token_is_refused_and_an_equal_one_accepted]
            }
            Self::ForceTakesAll => cases![ownership::a_forced_release_tells_the_victim_within_one_renewal],
            Self::LateRequestIsHonoured => {
                cases![cancellation::a_request_delivered_after_its_release_is_gone_after_a_ttl]
            }
            Self::ListIgnoresItsPrefix | Self::ListLeavesOutNames => {
                cases![errors::a_list_is_in_order_and_of_one_prefix]
            }
            Self::LossIsNeverTold => cases![
                ownership::renewal_never_brings_back_an_expired_lock,
                ownership::a_forced_release_tells_the_victim_within_one_renewal,
                told::a_lock_that_expires_early_is_told_within_one_renewal,
            ],
            Self::NamesAreFolded => cases![exclusion::names_that_look_alike_stay_apart],
            Self::NoCheckAfterTheWait => cases![
                exclusion::eight_clients_hold_one_at_a_time,
                leaving::a_waiter_that_times_out_holds_nobody_up,
            ],
            Self::OnlyItsOwnPlaceIsChecked => cases![leaving::a_cancelled_waiter_holds_nobody_up],
            Self::OwnerPerClient => cases![ownership::a_late_release_spares_the_successor],
            Self::ProvidedMethodsAreNotForwarded => cases![errors::what_the_backend_says_it_can_do_it_does],
            Self::QueueIsOutOfOrder => cases![waiting::waiters_of_different_clients_are_served_in_order],
            Self::RefusalMayPass => cases![errors::a_wait_ends_with_a_failure_that_only_a_person_can_mend],
            Self::ReleaseAlwaysSaysReleased => cases![ownership::release_twice_is_not_held_the_second_time],
            Self::ReleaseDoesNothing => cases![cancellation::a_dropped_guard_is_released],
            Self::ReleaseWithoutOwnerCheck => cases![ownership::release_by_another_owner_harms_nothing],
            Self::RenewalDrawsAToken => cases![tokens::renewal_leaves_the_token_as_it_is],
            Self::RenewalLengthensTheSuccessor => {
                cases![ownership::a_late_renewal_does_not_lengthen_the_successors_lease]
            }
            Self::RenewalResurrects => cases![ownership::renewal_never_brings_back_an_expired_lock],
            Self::TokenPerAttempt => cases![tokens::a_token_is_drawn_at_the_grant_and_not_at_the_attempt],
            Self::TokenFollowsACounterThatFell => cases![tokens::tokens_rise_across_a_counter_that_is_set_back],
            Self::TokenIsKeptByForce => cases![together::one_leads_at_a_time_over_two_hundred_forced_changes],
            Self::TokenPerSession => cases![tokens::tokens_rise_across_a_new_client_and_a_closed_one],
            Self::TokensAreLostWithTheStore => cases![
                tokens::tokens_rise_across_the_deletion_of_everything,
                tokens::tokens_rise_across_a_restart_without_data,
            ],
            Self::TokenRestartsAfterRelease | Self::TokensAreRandom => {
                cases![tokens::tokens_rise_across_releases_by_any_client]
            }
            Self::TtlIsIgnored => cases![tokens::tokens_rise_across_expiry],
            Self::TtlOfZeroIsAccepted => cases![leases::a_ttl_of_zero_or_beyond_the_bounds_is_refused],
            Self::WaitReturnsAtOnce | Self::WaitRunsPastItsDeadline => {
                cases![waiting::a_wait_of_the_backend_ends_at_its_deadline]
            }
            Self::HolderIsRemembered => cases![together::those_who_observe_see_each_leader],
            Self::RenewalShortensAReservation => {
                cases![reservations::a_name_stays_taken_when_its_holder_hangs_and_renewals_do_not_shorten_that]
            }
            Self::ReservationEndsWithItsClient => cases![reservations::a_name_stays_taken_when_its_client_is_shut_down],
            Self::ReservationIsHidden => cases![reservations::a_reservation_is_shown_and_ends_by_force],
            Self::ReservationIsIgnored => cases![
                reservations::a_name_that_is_released_early_stays_taken_for_the_rest_of_its_time,
                reservations::a_job_of_many_clients_runs_once_per_period,
            ],
            Self::ReservationOutlivesItsClaim => {
                cases![reservations::a_claim_that_is_released_for_good_reserves_nothing]
            }
            Self::ReservationWithoutOwnerCheck => {
                cases![reservations::a_claim_that_is_released_for_good_reserves_nothing]
            }
            Self::WakeUpIsLost => cases![waiting::a_waiter_of_another_client_gets_the_lock_on_release],
            Self::AWriterIsGrantedBesideReaders | Self::ReadersExcludeEachOther => {
                cases![modes::an_exclusive_lock_excludes_readers_and_writers_and_readers_admit_each_other]
            }
            Self::AnotherKindIsBusy => cases![modes::a_name_has_one_kind_while_it_is_held],
            Self::DowngradeReleasesFirst => cases![modes::a_downgrade_lets_no_writer_in_between],
            Self::ExpiredPermitsStayTaken => cases![modes::permits_of_holders_that_expire_come_back_within_a_ttl],
            Self::ListShowsOneHolder => cases![modes::a_list_has_every_holder_with_its_mode],
            Self::OnePermitTooMany => cases![modes::a_semaphore_has_no_permit_too_many_over_a_thousand_random_holds],
            Self::ReadersPassAWriter => cases![modes::a_reader_that_comes_after_a_waiting_writer_is_served_after_it],
            Self::ReadersShareAToken => cases![modes::tokens_rise_over_both_modes_in_the_order_of_grants],
            Self::ReleaseOfOneReaderEndsAll => cases![modes::the_loss_or_release_of_one_reader_leaves_the_others],
        }
    }

    /// Whether the bug makes sense in such a backend.
    pub(crate) fn plantable(self, capabilities: &Capabilities, harness: &dyn Harness) -> Result<(), &'static str> {
        let inspects = capabilities.holder || capabilities.list || capabilities.force_release;
        match self {
            Self::DeadlineFromTheAcquireOnASharedLease if !capabilities.shares_leases => {
                Err("no two locks share a lease")
            }
            Self::DeadlineFromTheAcquireOnASharedLease if harness.leases_are_connections() => {
                Err("an acquisition on a shared lease keeps all of it: the deadline may count from there")
            }
            Self::CallsHaveNoLimit | Self::DeadlineFromALateReply if cfg!(not(feature = "faults")) => {
                Err("the suite was built without its feature `faults`")
            }
            Self::QueueIsOutOfOrder if !capabilities.fair => Err("the backend promises no order among processes"),
            Self::TokenIsKeptByForce if !capabilities.force_release => Err("the backend cannot release by force"),
            Self::ForceTakesAll if !(capabilities.force_release && capabilities.list) => {
                Err("the backend cannot release by force, or cannot list what there is")
            }
            Self::ListIgnoresItsPrefix | Self::ListLeavesOutNames if !capabilities.list => {
                Err("the backend cannot list locks")
            }
            Self::HolderIsRemembered if !capabilities.holder => Err("the backend cannot tell holders"),
            Self::ReservationIsHidden if !(capabilities.holder && capabilities.list && capabilities.force_release) => {
                Err("the backend cannot inspect locks")
            }
            Self::RenewalShortensAReservation
            | Self::ReservationEndsWithItsClient
            | Self::ReservationIsHidden
            | Self::ReservationIsIgnored
            | Self::ReservationOutlivesItsClaim
            | Self::ReservationWithoutOwnerCheck
                if !capabilities.reservations =>
            {
                Err("the backend has no reservations")
            }
            Self::AWriterIsGrantedBesideReaders
            | Self::AnotherKindIsBusy
            | Self::DowngradeReleasesFirst
            | Self::ListShowsOneHolder
            | Self::ReadersExcludeEachOther
            | Self::ReadersPassAWriter
            | Self::ReadersShareAToken
            | Self::ReleaseOfOneReaderEndsAll
                if !capabilities.shared =>
            {
                Err(modes::NO_SHARES)
            }
            Self::AnotherKindIsBusy
            | Self::ExpiredPermitsStayTaken
            | Self::ListShowsOneHolder
            | Self::OnePermitTooMany
                if !capabilities.permits =>
            {
                Err(modes::NO_PERMITS)
            }
            Self::ReadersPassAWriter if !capabilities.fair => Err("the backend promises no order among processes"),
            Self::ListShowsOneHolder if !capabilities.list => Err("the backend cannot list locks"),
            Self::ProvidedMethodsAreNotForwarded if !inspects => Err("there is nothing to forward"),
            _ => Ok(()),
        }
    }

    pub(crate) fn name(self) -> String {
        self.words().replace([' ', '-'], "_").replace([',', '\''], "")
    }
}
