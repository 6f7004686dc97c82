//! What is stored of a holder.

use std::time::{Duration, UNIX_EPOCH};

use lock_core::{Holder, LockName, Mode};
/// The part of a lock's value that its scripts only pass on: process, host and label.
pub(crate) use lock_transport::holder::encode as info;

/// Stands before the owner once the claim was released and the name is only reserved. The scripts write it.
const RESERVED: &str = "reserved:";

/// The holder that a lock's value tells of.
pub(crate) fn holder(name: &LockName, value: &str, remaining: Option<Duration>) -> Holder {
    let mut holder = Holder::new();
    holder.name = Some(name.clone());
    holder.remaining = remaining;
    let mut parts = value.split(' ');
    let format = parts.next().unwrap_or_default();
    let digits = format.trim_start_matches(|c: char| c.is_ascii_digit());
    let (format, mode) = format.split_at(format.len() - digits.len());
    holder.mode = read_mode(mode);
    let owner = parts.next().unwrap_or_default();
    let reserved = owner.strip_prefix(RESERVED);
    holder.is_reserved = reserved.is_some();
    holder.owner = reserved.unwrap_or(owner).parse().ok();
    holder.token = parts.next().and_then(|text| text.parse().ok());
    // Later formats may go on differently.
    if format == "1" {
        let micros = parts.next().and_then(|text| text.parse().ok());
        holder.acquired_at = micros.map(|micros| UNIX_EPOCH + Duration::from_micros(micros));
        lock_transport::holder::decode(parts.skip(1), &mut holder);
    }
    holder
}

/// What the scripts call the mode. In the record of a hold it stands behind the number of the format, unless it is exclusive.
pub(crate) fn mode(mode: Mode) -> String {
    match mode {
        Mode::Shared => "s".to_owned(),
        Mode::Permit { of } => format!("p{of}"),
        _ => "x".to_owned(),
    }
}

/// The mode that the scripts call so.
pub(crate) fn read_mode(word: &str) -> Mode {
    let permits = word.strip_prefix('p').and_then(|of| of.parse().ok());
    match permits {
        Some(of) => Mode::Permit { of },
        None if word == "s" => Mode::Shared,
        None => Mode::Exclusive,
    }
}

#[cfg(test)]
mod tests {
    use lock_core::Claim;

    use super::*;

    #[test]
    fn what_is_stored_of_a_holder_can_be_read_again() {
        let claim = Claim::new("n".parse().unwrap(), Duration::from_secs(1)).with_label("a b");
        for (format, held) in [
            ("1", Mode::Exclusive),
            ("1s", Mode::Shared),
            ("1p20", Mode::Permit { of: 20 }),
        ] {
            let value = format!("{format} {} 42 1700000000000000 client {}", claim.owner(), info(&claim));
            let holder = holder(claim.name(), &value, None);
            assert_eq!((holder.owner, holder.is_reserved), (Some(claim.owner()), false));
            assert_eq!(
                (holder.token.unwrap().get(), holder.label.as_deref()),
                (42, claim.label())
            );
            let acquired = UNIX_EPOCH + Duration::from_secs(1_700_000_000);
            assert_eq!(
                (holder.acquired_at, holder.pid),
                (Some(acquired), Some(std::process::id()))
            );
            assert_eq!((holder.mode, read_mode(&mode(held))), (held, held));
        }
    }

    #[test]
    fn a_name_that_is_only_reserved_and_a_later_format_are_told_as_far_as_they_are_known() {
        let claim = Claim::new("n".parse().unwrap(), Duration::from_secs(1));
        let (owner, told) = (claim.owner(), |value: String| holder(claim.name(), &value, None));
        let reserved = told(format!("1 reserved:{owner} 42 1700000000000000 client 7 host"));
        assert_eq!(
            (reserved.owner, reserved.pid, reserved.is_reserved),
            (Some(owner), Some(7), true)
        );
        let later = told(format!("7 {owner} 42 other things"));
        assert_eq!(
            (later.owner, later.token.unwrap().get(), later.pid),
            (Some(owner), 42, None)
        );
    }
}
