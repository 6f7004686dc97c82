//! What a client tells others of a lock that it holds, as a line of text. The table of reservations has the same.

use std::time::{Duration, UNIX_EPOCH};

use lock_core::{Busy, Clock, Holder};
use lock_transport::holder;
use percent_encoding::{NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};

use crate::failure::Failure;
use crate::holdings::Holding;
use crate::keys;
use crate::rows::Row;

/// Key, session, token, owner, microseconds since 1970, milliseconds that are left, name, and who holds it, with blanks between. All of it is
/// ASCII: not every encoding of a database has every letter.
pub(crate) fn write(key: i64, holding: &Holding) -> String {
    let Holding {
        claim, token, session, ..
    } = holding;
    let since = holding.since.duration_since(UNIX_EPOCH).unwrap_or_default();
    let left = holding.lease.deadline().since(Clock::system().now());
    let name = utf8_percent_encode(claim.name().as_str(), NON_ALPHANUMERIC);
    format!(
        "{key} {} {token} {} {} {} {name} {}",
        session.pid,
        claim.owner(),
        since.as_micros(),
        left.as_millis(),
        holder::encode(claim)
    )
}

/// Key, session and the rest. None: it is of another version, or nonsense.
pub(crate) fn read(line: &str) -> Option<(i64, i32, Holder)> {
    let mut words = line.split(' ');
    let (key, session) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
    let mut holder = Holder::new();
    holder.key = Some(keys::shown(key));
    holder.token = words.next()?.parse().ok();
    holder.owner = words.next()?.parse().ok();
    holder.acquired_at = UNIX_EPOCH.checked_add(Duration::from_micros(words.next()?.parse().ok()?));
    holder.remaining = Some(Duration::from_millis(words.next()?.parse().ok()?));
    holder.name = percent_decode_str(words.next()?).decode_utf8().ok()?.parse().ok();
    holder::decode(words, &mut holder);
    Some((key, session, holder))
}

/// The session that had the lock, and its holder, as the table has them.
pub(crate) fn read_reserved(key: i64, text: &str, micros_left: i64) -> (Option<i32>, Holder) {
    let (session, mut holder) = match read(text) {
        Some((_, session, holder)) => (Some(session), holder),
        None => (None, Holder::new()),
    };
    holder.key = Some(keys::shown(key));
    holder.remaining = Some(Duration::from_micros(u64::try_from(micros_left).unwrap_or_default()));
    (session, holder)
}

/// What is known if an attempt was in vain, from the answer to [`draw_unless_reserved`](crate::commands::draw_unless_reserved).
pub(crate) fn found_reserved(key: i64, row: &Row) -> Result<Busy, Failure> {
    let (taken, left, text) = (row.truth(1)?, row.get(2)?, row.get(3)?);
    let (Some(left), Some(text)) = (left, text) else {
        return Ok(Busy::default());
    };
    let (_, mut holder) = read_reserved(key, text, left.parse().map_err(|_| Failure::Nonsense)?);
    holder.is_reserved = taken;
    // It may be held for longer, but is not granted before.
    let left = holder.remaining.unwrap_or_default();
    Ok(Busy::default().with_retry_after(left).with_holder(holder))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_read_or_is_nonsense() {
        let owner = lock_core::OwnerId::random();
        let line = format!("-7 5 9 {owner} 1500001 7 a%20%C3%A9%27 12 host nightly%0A");
        let mut holder = Holder::new();
        holder.key = Some(keys::shown(-7));
        (holder.token, holder.owner) = (lock_core::FencingToken::new(9).ok(), Some(owner));
        holder.acquired_at = Some(UNIX_EPOCH + Duration::from_micros(1_500_001));
        holder.remaining = Some(Duration::from_millis(7));
        holder.name = "a \u{e9}'".parse().ok();
        (holder.pid, holder.host, holder.label) = (Some(12), Some("host".to_owned()), Some("nightly\n".to_owned()));
        assert_eq!(read(&line), Some((-7, 5, holder)));
        for nonsense in ["nonsense", "", "1 2 3 4", "1 2 3 4 x 6 n"] {
            assert_eq!(read(nonsense), None, "{nonsense}");
        }
    }
}
