//! Where tokens come from: a base that never falls, plus [`BLOCK`] for each revision up to the one at which a claim's key was created.
//!
//! **Invariant.** The tokens of a claim are the [`BLOCK`] that end with base + `BLOCK` * create revision. The transaction that creates the key
//! compares the base, so it is that of this moment. A grant has the last of the tokens, as many as its claim asked for.
//! The base is only ever raised, so of two keys under a name the one that was created later has the higher tokens, whichever
//! clients put them and raise the base meanwhile. A client that finds a lower base than it knew puts no key over it: it raises
//! the base above every token that can have been drawn, as far as it has seen.

use std::num::NonZeroU32;
use std::time::{SystemTime, UNIX_EPOCH};

use etcd_client::{Compare, CompareOp, GetOptions, KeyValue, Txn, TxnOp, TxnResponse};
use lock_core::FencingToken;

use crate::client::Client;
use crate::connection::Connection;
use crate::error::Failure;
use crate::queue::{kvs, nested};

/// How many tokens each revision stands for, so that a grant can have several: revisions count for all names at once. A base begins at
/// the clock in microseconds, and must be behind it when state is lost: so it is unless there are more than 62 500 revisions per second.
const BLOCK: NonZeroU32 = NonZeroU32::new(16).unwrap();

/// The base as it was seen last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Base {
    pub(crate) value: u64,
    /// The revision at which it was written.
    pub(crate) written: i64,
}

impl Base {
    pub(crate) fn read(kv: &KeyValue) -> Result<Self, Failure> {
        let value = std::str::from_utf8(kv.value()).ok().and_then(|text| text.parse().ok());
        Ok(Self {
            value: value.ok_or(Failure::ForeignBase)?,
            written: kv.mod_revision(),
        })
    }
}

/// The last token of a claim whose key was created at that revision.
pub(crate) fn token(base: u64, created: i64) -> Result<FencingToken, Failure> {
    let sum = span(created).and_then(|span| base.checked_add(span));
    sum.and_then(|sum| FencingToken::new(sum).ok()).ok_or(Failure::NoTokens)
}

/// The first of the last `wanted` tokens of a claim, or of all of them if more are wanted.
pub(crate) fn first(last: FencingToken, wanted: NonZeroU32) -> FencingToken {
    let first = last.get().saturating_sub(u64::from(wanted.min(BLOCK).get()) - 1);
    FencingToken::new(first).unwrap_or(last)
}

/// The highest token that can have been drawn over that base up to that revision.
pub(crate) fn highest(base: u64, revision: i64) -> u64 {
    base.saturating_add(span(revision).unwrap_or_default())
}

/// How many tokens the revisions up to that one stand for. None if it is negative, or they are too many.
fn span(revision: i64) -> Option<u64> {
    u64::try_from(revision).ok()?.checked_mul(BLOCK.get().into())
}

impl Client {
    /// The base, raised to the clock on this connection before the first token is drawn over it.
    ///
    /// **Invariant.** State can go back only while no connection to it lives. So a client that looks at base and revision on a connection, and
    /// raises their sum to the clock if it is behind, draws tokens above all that were drawn from a state that is lost,
    /// also if this is the first that it hears of it.
    pub(crate) async fn base(&self, connection: &Connection) -> Result<Base, Failure> {
        let mut known = connection.base().lock().await;
        if let Some(base) = *known {
            return Ok(base);
        }
        let key = self.settings().keys.base();
        if connection.revision() == 0 {
            connection.get(key.clone(), GetOptions::new()).await?;
        }
        let revision = connection.revision();
        // Others can have drawn more tokens over a base than this client has seen: one that was put back is not good enough.
        let least = lowest(revision, now(), self.highest_token()).max(self.highest_base());
        let base = raise(connection, &key, least).await?;
        self.saw(base.value, revision);
        Ok(*known.insert(base))
    }

    /// Takes over the base that was `found` at `revision` by a transaction that compared it with the one that was `known`.
    pub(crate) async fn learn_base(&self, connection: &Connection, known: Base, found: Option<Base>, revision: i64) {
        let mut current = connection.base().lock().await;
        // Unless another request has done so before.
        if *current != Some(known) || found == Some(known) {
            return;
        }
        if let Some(found) = found.filter(|found| found.value >= known.value) {
            self.saw(found.value, revision);
            *current = Some(found);
        } else {
            // It is raised anew before the next put, above all that others can have drawn until now.
            self.saw(known.value, revision);
            *current = None;
            tracing::warn!(target: "fencelock", base = ?found, "the base of fencing tokens in etcd was lowered or deleted; raising it");
        }
    }
}

/// Raises the base to that value, unless it is as high: one request, however many clients do the same.
async fn raise(connection: &Connection, key: &str, to: u64) -> Result<Base, Failure> {
    // As wide as any token, so that etcd, which compares texts, compares numbers.
    let wide = format!("{to:016}");
    let put = |when: Compare| Txn::new().when([when]).and_then([TxnOp::put(key, wide.clone(), None)]);
    let written = |answer: &TxnResponse| Base {
        value: to,
        written: answer.header().map_or(0, |header| header.revision()),
    };
    loop {
        let missing = put(Compare::create_revision(key, CompareOp::Equal, 0)).or_else([TxnOp::get(key, None)]);
        let lower = Compare::value(key, CompareOp::Less, wide.clone());
        let answer = connection.txn(put(lower).or_else([TxnOp::txn(missing)])).await?;
        let found = match nested(&answer) {
            Some(other) if !other.succeeded() => kvs(&other, 0)?,
            _ => return Ok(written(&answer)),
        };
        let found = Base::read(found.first().ok_or(Failure::Nonsense)?)?;
        if found.value >= to {
            return Ok(found);
        }
        // Of another width: no client has written it.
        let answer = connection
            .txn(put(Compare::mod_revision(key, CompareOp::Equal, found.written)))
            .await?;
        if answer.succeeded() {
            return Ok(written(&answer));
        }
    }
}

/// The lowest base with which every token to come is above the clock, and above `highest`. At least `revision` has been reached.
fn lowest(revision: i64, now: u64, highest: u64) -> u64 {
    now.max(highest).saturating_sub(span(revision).unwrap_or_default())
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

    /// What the first token of the next grant is, if as many are wanted as there are.
    fn next(base: u64, revision: i64, now: u64, highest: u64) -> u64 {
        let base = base.max(lowest(revision, now, highest));
        first(token(base, revision + 1).unwrap(), NonZeroU32::MAX).get()
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
            base = base.max(lowest(10 + open, NOW - 1_000_000, 0));
        }
        assert_eq!(base, NOW);
    }

    #[test]
    fn what_this_client_saw_is_a_floor_when_the_state_went_back_with_a_clock_that_is_behind() {
        let highest = highest(NOW, 500);
        assert_eq!(lowest(500, 0, highest), NOW);
        assert_eq!(next(NOW, 20, 0, highest), highest + 1);
    }

    #[test]
    fn tokens_that_do_not_fit_are_an_error_and_not_a_smaller_number() {
        assert!(matches!(token(FencingToken::MAX.get(), 1), Err(Failure::NoTokens)));
        assert!(matches!(token(u64::MAX, 1), Err(Failure::NoTokens)));
        assert!(matches!(token(1, -1), Err(Failure::NoTokens)));
        assert!(matches!(token(1, i64::MAX), Err(Failure::NoTokens)));
    }

    #[test]
    fn a_claim_has_as_many_of_the_tokens_of_its_revision_as_it_wants_and_none_of_another() {
        let (before, last) = (token(NOW, 41).unwrap(), token(NOW, 42).unwrap());
        for (wanted, tokens) in [(1, 1), (2, 2), (16, 16), (17, 16), (u32::MAX, 16)] {
            let first = first(last, NonZeroU32::new(wanted).unwrap());
            assert_eq!(last.get() - first.get() + 1, tokens);
            assert!(first > before);
        }
    }

    #[test]
    fn no_base_is_wider_than_what_is_compared() {
        assert_eq!(FencingToken::MAX.get().to_string().len(), 16);
    }
}
