//! Where tokens come from: a base that never falls, plus the revision at which a claim's key was created.

use std::time::{SystemTime, UNIX_EPOCH};

use etcd_client::{Compare, CompareOp, GetOptions, KeyValue, Txn, TxnOp};
use lock_core::FencingToken;

use crate::failure::Failure;
use crate::link::Link;
use crate::session::Session;

/// The base as it was seen last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Base {
    pub(crate) value: u64,
    /// The revision at which it was written.
    pub(crate) written: i64,
}

impl Base {
    fn read(kv: &KeyValue) -> Result<Self, Failure> {
        let value = std::str::from_utf8(kv.value()).ok().and_then(|text| text.parse().ok());
        Ok(Self {
            value: value.ok_or(Failure::ForeignBase)?,
            written: kv.mod_revision(),
        })
    }
}

/// The token of a claim whose key was created at that revision.
pub(crate) fn token(base: u64, created: i64) -> Result<FencingToken, Failure> {
    let sum = u64::try_from(created)
        .ok()
        .and_then(|created| base.checked_add(created));
    sum.and_then(|sum| FencingToken::new(sum).ok()).ok_or(Failure::NoTokens)
}

impl Session {
    /// The base, raised on this link before anything is drawn from it.
    ///
    /// **Invariant.** State can go back only while no link to it lives. So whoever looks at base and revision on a link, and
    /// raises their sum to the clock if it is behind, draws tokens above all that were drawn from a state that is lost,
    /// also if this is the first that it hears of it.
    pub(crate) async fn base(&self, link: &Link) -> Result<Base, Failure> {
        let mut known = link.base().lock().await;
        if let Some(base) = *known {
            return Ok(base);
        }
        let key = self.settings().keys.base();
        loop {
            let answer = link.get(key.clone(), GetOptions::new()).await?;
            let revision = answer.header().map_or(0, |header| header.revision());
            let found = answer.kvs().first().map(Base::read).transpose()?;
            let seen = found.unwrap_or_default();
            let Some(raised) = raised(seen.value, revision, now(), self.highest()) else {
                self.saw(seen.value, revision);
                return Ok(*known.insert(seen));
            };
            let txn = Txn::new()
                .when([Compare::mod_revision(key.clone(), CompareOp::Equal, seen.written)])
                .and_then([TxnOp::put(key.clone(), raised.to_string(), None)]);
            let answer = link.txn(txn).await?;
            if answer.succeeded() {
                let written = answer.header().map_or(0, |header| header.revision());
                self.saw(raised, written);
                return Ok(*known.insert(Base { value: raised, written }));
            }
        }
    }

    /// Takes note of the base that was found where `known` was expected, unless another request has done so before.
    pub(crate) async fn learn_base(&self, link: &Link, known: Base, found: Option<&KeyValue>) -> Result<(), Failure> {
        // One that is gone is made again.
        let found = found.map(Base::read).transpose()?;
        let mut base = link.base().lock().await;
        if *base == Some(known) {
            *base = found;
        }
        Ok(())
    }
}

/// The base that makes the next token the clock's, or one above `highest`; `None` if the present one is high enough.
fn raised(base: u64, revision: i64, now: u64, highest: u64) -> Option<u64> {
    let revision = u64::try_from(revision).unwrap_or_default();
    let wanted = now.max(highest);
    (wanted > base.saturating_add(revision)).then(|| wanted.saturating_sub(revision))
}

/// The clock in microseconds. One so wrong that its numbers would be no tokens counts as none.
fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let micros = u64::try_from(since.as_micros()).unwrap_or(u64::MAX);
    if micros < FencingToken::MAX.get() { micros } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: u64 = 1_800_000_000_000_000;

    /// What the next grant's token is.
    fn next(base: u64, revision: i64, now: u64, highest: u64) -> u64 {
        let base = raised(base, revision, now, highest).unwrap_or(base);
        token(base, revision + 1).unwrap().get()
    }

    #[test]
    fn a_clock_that_is_ahead_raises_the_next_token_to_itself() {
        assert_eq!(next(0, 1, NOW, 0), NOW + 1);
        // Not by the revisions that there were before, or an empty cluster in its place would be behind for as long.
        assert_eq!(next(0, 1_000_000_000, NOW, 0), NOW + 1);
    }

    #[test]
    fn a_clock_that_is_behind_raises_nothing_and_uses_up_no_tokens() {
        let mut base = NOW;
        for open in 0..100_000 {
            base = raised(base, 10 + open, NOW - 1_000_000, 0).unwrap_or(base);
        }
        assert_eq!(base, NOW);
    }

    #[test]
    fn what_this_client_saw_is_a_floor_when_the_state_went_back_with_a_clock_that_is_behind() {
        let highest = NOW + 500;
        assert_eq!(raised(NOW, 500, 0, highest), None);
        assert_eq!(next(NOW, 20, 0, highest), highest + 1);
    }

    #[test]
    fn tokens_that_do_not_fit_are_an_error_and_not_a_smaller_number() {
        assert!(matches!(token(FencingToken::MAX.get(), 1), Err(Failure::NoTokens)));
        assert!(matches!(token(u64::MAX, 1), Err(Failure::NoTokens)));
        assert!(matches!(token(1, -1), Err(Failure::NoTokens)));
    }
}
