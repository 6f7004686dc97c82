//! What is stored of a claim.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use lock_core::{Claim, Holder, OwnerId};
use lock_transport::holder;

use crate::tokens;

/// The value of a claim's key: a claim that takes a free name holds it from now on, one that joins a queue does not. Without a base
/// its token cannot be read from it.
pub(crate) fn value(claim: &Claim, base: Option<u64>, held: bool) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let since = if held {
        now.as_micros().to_string()
    } else {
        "-".to_owned()
    };
    let base = base.map_or_else(|| "-".to_owned(), |base| base.to_string());
    format!("1 {base} {} {since} {}", claim.owner(), holder::encode(claim))
}

/// The base that a claim's token counts from, if it is known by now.
pub(crate) fn base(value: &[u8]) -> Option<u64> {
    std::str::from_utf8(value).ok()?.split(' ').nth(1)?.parse().ok()
}

/// Whose claim it is.
pub(crate) fn owner(value: &[u8]) -> Option<OwnerId> {
    std::str::from_utf8(value).ok()?.split(' ').nth(2)?.parse().ok()
}

/// What a claim's value tells of its holder, the name aside.
pub(crate) fn holder(value: &[u8], created: i64) -> Holder {
    let mut holder = Holder::new();
    holder.token = base(value).and_then(|base| tokens::token(base, created).ok());
    holder.owner = owner(value);
    let value = String::from_utf8_lossy(value);
    let mut parts = value.split(' ');
    // Later formats may go on differently.
    if parts.next() == Some("1") {
        let mut parts = parts.skip(2);
        let micros = parts.next().and_then(|text| text.parse().ok());
        holder.acquired_at = micros.map(|micros| UNIX_EPOCH + Duration::from_micros(micros));
        holder::decode(parts, &mut holder);
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
            let value = value(&claim, Some(1_700_000_000_000_000), true);
            assert_eq!(base(value.as_bytes()), Some(1_700_000_000_000_000));
            let holder = holder(value.as_bytes(), 42);
            assert_eq!(holder.token.unwrap().get(), 1_700_000_000_000_000 + 16 * 42);
            assert_eq!(holder.owner, Some(claim.owner()));
            assert_eq!(holder.label.as_deref(), claim.label());
            assert_eq!(holder.host, Holder::of(&claim).host);
            assert_eq!(holder.pid, Some(std::process::id()));
            assert!(holder.acquired_at.unwrap().elapsed().unwrap() < Duration::from_secs(60));
        }
    }

    #[test]
    fn of_a_claim_that_was_queued_it_is_not_said_since_when_it_holds() {
        let holder = holder(value(&claim(), Some(7), false).as_bytes(), 1);
        assert_eq!(holder.acquired_at, None);
        assert_eq!(holder.pid, Some(std::process::id()));
    }

    #[test]
    fn of_a_claim_whose_base_is_not_known_yet_there_is_no_token() {
        let claim = claim();
        let holder = holder(value(&claim, None, true).as_bytes(), 1);
        assert_eq!(holder.token, None);
        assert_eq!(holder.owner, Some(claim.owner()));
    }

    #[test]
    fn of_a_later_format_the_token_and_the_owner_are_read() {
        let owner = OwnerId::random();
        let holder = holder(format!("7 40 {owner} other things").as_bytes(), 2);
        assert_eq!(holder.token.unwrap().get(), 40 + 16 * 2);
        assert_eq!(holder.owner, Some(owner));
        assert_eq!(holder.pid, None);
    }
}
