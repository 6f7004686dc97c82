//! The part of a stored lock that names its holder to people: process, host and label, separated by blanks.

use lock_core::{Claim, Holder};
use percent_encoding::{NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};

/// Returns `PID HOST LABEL` of this process and the claim, with everything but ASCII letters and digits as `%` and two digits. A claim
/// without a label has none here.
#[must_use]
pub fn encode(claim: &Claim) -> String {
    let holder = Holder::of(claim);
    let mut record = holder.pid.unwrap_or_default().to_string();
    for text in [holder.host.as_deref(), claim.label()].into_iter().flatten() {
        record += " ";
        record.extend(utf8_percent_encode(text, NON_ALPHANUMERIC));
    }
    record
}

/// Sets process, host and label of the holder from the record, a sequence of words. Words after the label are ignored.
pub fn decode<'a>(mut words: impl Iterator<Item = &'a str>, holder: &mut Holder) {
    let decoded = |text| percent_decode_str(text).decode_utf8_lossy().into_owned();
    holder.pid = words.next().and_then(|text| text.parse().ok());
    holder.host = words.next().map(decoded);
    holder.label = words.next().map(decoded);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_can_be_read_again() {
        for label in [None, Some("nightly 'import' 100 % \u{e9}"), Some("")] {
            let claim = Claim::new("n".parse().unwrap(), std::time::Duration::from_secs(1));
            let claim = label.into_iter().fold(claim, Claim::with_label);
            let (mut read, of) = (Holder::new(), Holder::of(&claim));
            decode(encode(&claim).split(' '), &mut read);
            assert_eq!(
                (read.pid, read.host, read.label),
                (of.pid, of.host, label.map(str::to_owned))
            );
        }
        let mut holder = Holder::new();
        decode("x".split(' '), &mut holder);
        assert_eq!((holder.pid, holder.host), (None, None));
    }
}
