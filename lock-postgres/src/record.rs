//! What a client tells others of a lock that it holds, as a line of text. The table of reservations has the same.

use std::time::{Duration, UNIX_EPOCH};

use lock_core::{Busy, Holder, LockName};
use percent_encoding::{AsciiSet, CONTROLS, percent_decode_str, utf8_percent_encode};

use crate::failure::Failure;
use crate::keys;
use crate::rows::Row;

/// What is written as `%` and two digits, beside all that is not ASCII: not every encoding of a database has every letter.
const ESCAPED: &AsciiSet = &CONTROLS.add(b'%');

/// Key, session, process, host, token, owner, microseconds since 1970, milliseconds that are left, name and label, with tabs between.
pub(crate) fn write(key: i64, session: i32, holder: &Holder) -> String {
    let since = holder.acquired_at.and_then(|at| at.duration_since(UNIX_EPOCH).ok());
    let fields = [
        key.to_string(),
        session.to_string(),
        shown(holder.pid),
        escaped(holder.host.as_deref()),
        shown(holder.token),
        shown(holder.owner),
        shown(since.map(|since| since.as_micros())),
        shown(holder.remaining.map(|left| left.as_millis())),
        escaped(holder.name.as_ref().map(LockName::as_str)),
        escaped(holder.label.as_deref()),
    ];
    fields.join("\t")
}

/// Key, session and the rest. None: it is of another version, or nonsense.
pub(crate) fn read(line: &str) -> Option<(i64, i32, Holder)> {
    let fields: Vec<_> = line.split('\t').collect();
    let [key, session, pid, host, token, owner, since, left, name, label] = *fields.as_slice() else {
        return None;
    };
    let key = key.parse().ok()?;
    let mut holder = Holder::new();
    holder.key = Some(keys::shown(key));
    holder.pid = pid.parse().ok();
    holder.host = Some(unescaped(host)?).filter(|host| !host.is_empty());
    holder.token = token.parse().ok();
    holder.owner = owner.parse().ok();
    let since = since.parse().ok().map(Duration::from_micros);
    holder.acquired_at = since.and_then(|since| UNIX_EPOCH.checked_add(since));
    holder.remaining = left.parse().ok().map(Duration::from_millis);
    holder.name = unescaped(name)?.parse().ok();
    holder.label = Some(unescaped(label)?).filter(|label| !label.is_empty());
    Some((key, session.parse().ok()?, holder))
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

fn shown(value: Option<impl ToString>) -> String {
    value.map(|value| value.to_string()).unwrap_or_default()
}

fn escaped(text: Option<&str>) -> String {
    utf8_percent_encode(text.unwrap_or_default(), ESCAPED).to_string()
}

fn unescaped(text: &str) -> Option<String> {
    Some(percent_decode_str(text).decode_utf8().ok()?.into_owned())
}

#[cfg(test)]
mod tests {
    use lock_core::Claim;

    use super::*;

    #[test]
    fn a_holder_is_read_as_it_was_written() {
        let claim = Claim::new("a \u{e9}'\\%".parse().unwrap(), Duration::from_secs(1)).with_label("nightly\n");
        let mut holder = Holder::of(&claim);
        holder.acquired_at = Some(UNIX_EPOCH + Duration::from_micros(1_500_001));
        holder.remaining = Some(Duration::from_millis(7));
        let line = write(-7, 5, &holder);
        assert!(line.is_ascii() && !line.contains('\n'), "{line}");
        holder.key = Some(keys::shown(-7));
        assert_eq!(read(&line), Some((-7, 5, holder)));
        assert_eq!(read("nonsense"), None);
    }
}
