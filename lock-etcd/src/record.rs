//! What is stored of a claim: `2 OWNER STATE BASE SINCE PID HOST LABEL`.
//!
//! The owner comes first, so that a transaction can compare whose claim a key is.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use etcd_client::{Compare, CompareOp};
use lock_core::{Claim, Holder, OwnerId};
use lock_transport::holder;

use crate::tokens;

/// What the key of a claim means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// The claim waits. It holds the name once its key is the first.
    Waiting,
    /// The claim has held the name from the put on.
    Held,
    /// The claim was released, and the name stays reserved.
    Reserved,
}

/// Returns the value of a claim's key, with the base that its token counts from.
pub(crate) fn value(claim: &Claim, base: u64, state: State) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let (letter, since) = match state {
        State::Waiting => ('c', "-".to_owned()),
        State::Held => ('c', now.as_micros().to_string()),
        State::Reserved => ('r', now.as_micros().to_string()),
    };
    format!("2 {} {letter} {base} {since} {}", claim.owner(), holder::encode(claim))
}

/// Compares that hold if the key is that of the owner's claim, or of its reservation.
pub(crate) fn is_of_owner(key: &str, owner: OwnerId) -> [Compare; 2] {
    begins_with(key, &format!("2 {owner}"))
}

/// Compares that hold if the key is that of the owner's claim, which was not released.
pub(crate) fn is_claim_of(key: &str, owner: OwnerId) -> [Compare; 2] {
    begins_with(key, &format!("2 {owner} c"))
}

/// `words` and a space are followed by something else. A value that is not there fails every comparison.
fn begins_with(key: &str, words: &str) -> [Compare; 2] {
    [
        Compare::value(key, CompareOp::Greater, format!("{words} ")),
        // The character after the space.
        Compare::value(key, CompareOp::Less, format!("{words}!")),
    ]
}

/// The base that the claim's token counts from.
pub(crate) fn base(value: &[u8]) -> Option<u64> {
    word(value, 3)?.parse().ok()
}

/// Whose claim it is; `None` if fencelock did not write the value.
pub(crate) fn owner(value: &[u8]) -> Option<OwnerId> {
    word(value, 1)?.parse().ok()
}

/// Whether the claim was released, and the name is only reserved.
pub(crate) fn is_reserved(value: &[u8]) -> bool {
    word(value, 2) == Some("r")
}

fn word(value: &[u8], at: usize) -> Option<&str> {
    std::str::from_utf8(value).ok()?.split(' ').nth(at)
}

/// What a claim's value tells of its holder, the name aside.
pub(crate) fn holder(value: &[u8], created: i64) -> Holder {
    let mut holder = Holder::new();
    holder.token = base(value).and_then(|base| tokens::token(base, created).ok());
    holder.owner = owner(value);
    holder.is_reserved = is_reserved(value);
    let value = String::from_utf8_lossy(value);
    let mut words = value.split(' ');
    // Later formats may go on differently.
    if words.next() == Some("2") {
        let mut words = words.skip(3);
        let micros = words.next().and_then(|text| text.parse().ok());
        holder.acquired_at = micros.map(|micros| UNIX_EPOCH + Duration::from_micros(micros));
        holder::decode(words, &mut holder);
    }
    holder
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim() -> Claim {
        Claim::new("n".parse().unwrap(), Duration::from_secs(2))
    }

    #[test]
    fn what_is_stored_of_a_claim_can_be_read_again() {
        for label in [None, Some("nightly 'import' 100 %"), Some("")] {
            let claim = label.map_or(claim(), |label| claim().with_label(label));
            let value = value(&claim, 1_700_000_000_000_000, State::Held);
            assert_eq!(base(value.as_bytes()), Some(1_700_000_000_000_000));
            let holder = holder(value.as_bytes(), 42);
            assert_eq!(holder.token.unwrap().get(), 1_700_000_000_000_000 + 16 * 42);
            assert_eq!(holder.owner, Some(claim.owner()));
            assert_eq!(holder.label.as_deref(), claim.label());
            assert_eq!(holder.host, Holder::of(&claim).host);
            assert_eq!(holder.pid, Some(std::process::id()));
            assert!(!holder.is_reserved && holder.acquired_at.is_some());
        }
    }

    #[test]
    fn a_waiting_claim_does_not_say_since_when_it_holds_and_a_reservation_says_that_it_is_one() {
        let waiting = holder(value(&claim(), 7, State::Waiting).as_bytes(), 1);
        assert_eq!((waiting.acquired_at, waiting.is_reserved), (None, false));
        assert!(holder(value(&claim(), 7, State::Reserved).as_bytes(), 1).is_reserved);
    }

    #[test]
    fn of_a_later_format_the_token_and_the_owner_are_read() {
        let owner = OwnerId::random();
        let holder = holder(format!("7 {owner} c 40 other things").as_bytes(), 2);
        assert_eq!(holder.token.unwrap().get(), 40 + 16 * 2);
        assert_eq!((holder.owner, holder.pid), (Some(owner), None));
    }
}
