//! How a case fails that fails because of a planted bug.

use super::Bug;

const NO_HIGHER_TOKEN: &str = "a later grant carries a higher token";
const TWO_HOLDERS: &str = "is not held once the next one is granted";
const NOT_FREE: &str = "is free within";
const NOT_BUSY: &str = "is held and refused to others";
const ANOTHERS: &str = "who does not hold it is NotHeld";
const WRITTEN: &str = "is accepted: false, and leaves";

impl Bug {
    /// Whether a case that failed like that failed because of the bug. Anything else, such as a server that did not answer, shows nothing of
    /// it.
    pub(crate) fn leads_to(self, failure: &str) -> bool {
        self.signs().iter().any(|sign| failure.contains(sign))
    }

    fn signs(self) -> &'static [&'static str] {
        match self {
            Self::Nothing => &[],
            Self::AcquireTwiceIsBusy => &["grants \"n\", which is free; it said Busy"],
            Self::AskingAgainKeepsTheOldTtl => &["stops believing before the next one is granted"],
            Self::BlockBeginsTooLow
            | Self::BlockIsNotCounted
            | Self::TokenFollowsACounterThatFell
            | Self::TokenPerAttempt
            | Self::TokenPerSession
            | Self::TokenRestartsAfterRelease
            | Self::TokensAreLostWithTheStore
            | Self::TokensAreRandom => &[NO_HIGHER_TOKEN],
            Self::BusyIsAnError => &["a held name is busy and no failure"],
            Self::BusyIsNotTold => &["acquire failed: no answer within"],
            Self::CallsHaveNoLimit => &["acquire within"],
            // The entry is granted the lock, and those behind it wait in vain.
            Self::CancelLeavesItsEntry => &[
                "things are left after",
                "the next waiter is served within",
                "lock \"n\" was still held after",
            ],
            Self::HolderIsRemembered => &["those who observe see the new leader within"],
            Self::OutlivesItsRuntime => &["the lock is free when its ttl is over"],
            Self::DeadlineFromALateReply => &["on the way leave at most"],
            Self::DeadlineFromTheAcquireOnASharedLease | Self::DeadlineFromTheReply | Self::ExpiredIsStillHeld => {
                &[TWO_HOLDERS]
            }
            Self::FenceAdmitsWithoutAMark | Self::FenceTakesWhatDiffers => &[WRITTEN],
            Self::FenceChecksBeforeItWrites => &["none is accepted below a token that was seen"],
            Self::FenceRefusesItsHolder => &["is accepted: true, and leaves"],
            Self::ForceTakesAll => &["lock \"other\" was lost"],
            Self::LateRequestIsHonoured | Self::TtlIsIgnored => &["\"n\" is free within"],
            Self::ListIgnoresItsPrefix => &["under \"a\" there are"],
            Self::ListLeavesOutNames => &["a list has the name of each lock", "under \"\" there are"],
            Self::LossIsNeverTold => &["renew failed: nothing was renewed", "the loss is seen"],
            Self::NamesAreFolded => &["grants \"A\", which is free"],
            Self::NoCheckAfterTheWait => &["one holds \"n\" at a time", "one waiter is served at a time"],
            Self::OnlyItsOwnPlaceIsChecked => &["is served while the lock is held"],
            Self::OwnerPerClient | Self::ReservationEndsWithItsClient => &[NOT_BUSY],
            Self::ProvidedMethodsAreNotForwarded => &["answers exactly if it says so"],
            Self::QueueIsOutOfOrder => &["first come, first served"],
            Self::RefusalMayPass => &["a wait that cannot succeed ends within"],
            Self::TokenIsKeptByForce => &["tokens of leaders rise"],
            Self::ReleaseAlwaysSaysReleased | Self::ReleaseWithoutOwnerCheck => &[ANOTHERS],
            Self::ReleaseDoesNothing | Self::ReservationOutlivesItsClaim | Self::ReservationWithoutOwnerCheck => {
                &[NOT_FREE]
            }
            Self::RenewalDrawsAToken => &["the same owner gets the same token again"],
            Self::RenewalLengthensTheSuccessor => &["a stranger's renewals lengthen nothing"],
            Self::RenewalResurrects => &["an expired lock is not renewed"],
            Self::RenewalShortensAReservation => &["\"job\" stays taken for"],
            Self::ReservationIsHidden => &["with its label, and reserved: true"],
            Self::ReservationIsIgnored => &["the name is refused to its last holder too"],
            Self::TtlOfZeroIsAccepted => &["is InvalidTtl"],
            Self::WaitReturnsAtOnce => &["it waits for the"],
            Self::WaitRunsPastItsDeadline => &["acquire ends within"],
            Self::WakeUpIsLost => &["the waiter gets the lock on release"],
            Self::AWriterIsGrantedBesideReaders => &["each of several readers excludes writers"],
            Self::AnotherKindIsBusy => &["is refused for good where there is"],
            Self::DowngradeReleasesFirst => &["a downgrade lets no writer in"],
            Self::ExpiredPermitsStayTaken => &[NOT_FREE],
            Self::ListShowsOneHolder => &["a list has each holder"],
            Self::OnePermitTooMany => &["hold a permit at once"],
            Self::ReadersExcludeEachOther => &["readers admit each other"],
            Self::ReadersPassAWriter => &["no reader passes a waiting writer"],
            Self::ReadersShareAToken => &[NO_HIGHER_TOKEN],
            Self::ReleaseOfOneReaderEndsAll => &["the end of one reader leaves the others"],
        }
    }
}
