//! Where tokens come from: a base that never falls, plus [`BLOCK`] for each revision up to the one at which a claim's key was created.
//!
//! **Invariant.** The tokens of a claim are the [`BLOCK`] that end with base + `BLOCK` * create revision, with the base as it was in
//! the transaction that created the key. A grant has the last of them, as many as its claim asked for.
//! The base is only ever raised, so of two keys under a name the one that was created later has the higher tokens, whichever
//! clients put them and whoever raises the base meanwhile. A client that finds a lower base than it knew takes no token from it:
//! it raises the base above every token that it can have seen, and puts its key anew.

use std::num::NonZeroU32;
use std::time::{SystemTime, UNIX_EPOCH};

use etcd_client::{Compare, CompareOp, GetOptions, KeyValue, PutOptions, Txn, TxnOp, TxnResponse};
use lock_core::{Claim, FencingToken};

use crate::failure::Failure;
use crate::leases::Kept;
use crate::link::Link;
use crate::queue::{kvs, nested, reservation_of};
use crate::record;
use crate::session::Session;

/// How many tokens each revision stands for, so that a grant can have several: revisions count for all names at once. A base begins at
/// the clock in microseconds, and must be behind it when state is lost: so it is unless there are more than 62 500 revisions per second.
const BLOCK: NonZeroU32 = NonZeroU32::new(16).unwrap();

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

/// What a request to take a name knows of tokens when it is sent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Drawing {
    base: Base,
    /// The highest token that can have been drawn by then, as far as this client has seen.
    pub(crate) floor: u64,
}

/// How a claim's key is put.
#[derive(Clone, Copy)]
pub(crate) struct Put<'a> {
    pub(crate) claim: &'a Claim,
    pub(crate) kept: &'a Kept,
    /// Whether the claim holds the name from then on, and does not wait for it.
    pub(crate) holds: bool,
}

impl Put<'_> {
    /// The operation that puts the key. Without a base, the token is not known to a reader of the key.
    fn with_base(&self, key: &str, base: Option<u64>) -> TxnOp {
        let lease = PutOptions::new().with_lease(self.kept.id());
        TxnOp::put(key, record::value(self.claim, base, self.holds), Some(lease))
    }

    /// The operation that puts the key of the reservation beside it, if the claim announces one.
    fn reservation(&self, key: &str, base: Option<u64>) -> Option<TxnOp> {
        let key = reservation_of(key, self.claim)?;
        Some(self.with_base(&key, base))
    }
}

/// What a transaction that was to put a claim's key came to.
pub(crate) struct Taken {
    /// Whether the key was put.
    pub(crate) put: bool,
    /// With its base.
    has_base: bool,
    /// What was done.
    done: TxnResponse,
}

impl Taken {
    pub(crate) fn read(answer: TxnResponse) -> Result<Self, Failure> {
        if answer.succeeded() {
            return Ok(Self {
                put: true,
                has_base: true,
                done: answer,
            });
        }
        let done = nested(&answer).ok_or(Failure::Nonsense)?;
        Ok(Self {
            put: done.succeeded(),
            has_base: false,
            done,
        })
    }

    /// What was found by the operation at that place beside the put, or in place of it.
    pub(crate) fn kvs(&self, at: usize) -> Result<Vec<KeyValue>, Failure> {
        kvs(&self.done, at + usize::from(self.put))
    }

    /// The transaction that was made in place of the put.
    pub(crate) fn instead(&self) -> Result<Self, Failure> {
        Self::read(nested(&self.done).ok_or(Failure::Nonsense)?)
    }

    fn base(&self) -> Result<Option<Base>, Failure> {
        let last = self.done.op_responses().len().saturating_sub(1);
        kvs(&self.done, last)?.first().map(Base::read).transpose()
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

/// Whether all tokens of the claim with that last one are above `floor`.
pub(crate) fn all_above(floor: u64, last: FencingToken) -> bool {
    first(last, BLOCK).get() > floor
}

/// The base of a claim with that last token, whose key was created at that revision.
pub(crate) fn base_of(last: FencingToken, created: i64) -> Option<u64> {
    last.get().checked_sub(span(created)?)
}

/// The highest token that can have been drawn over that base up to that revision.
pub(crate) fn highest(base: u64, revision: i64) -> u64 {
    base.saturating_add(span(revision).unwrap_or_default())
}

/// How many tokens the revisions up to that one stand for. None if it is negative, or they are too many.
fn span(revision: i64) -> Option<u64> {
    u64::try_from(revision).ok()?.checked_mul(BLOCK.get().into())
}

impl Session {
    /// The base, raised to the clock on this link before the first token is drawn over it, and what has been drawn so far.
    ///
    /// **Invariant.** State can go back only while no link to it lives. So a client that looks at base and revision on a link, and
    /// raises their sum to the clock if it is behind, draws tokens above all that were drawn from a state that is lost,
    /// also if this is the first that it hears of it.
    pub(crate) async fn drawing(&self, link: &Link) -> Result<Drawing, Failure> {
        let mut known = link.base().lock().await;
        let drawing = |base| Drawing {
            base,
            floor: self.highest(),
        };
        if let Some(base) = *known {
            return Ok(drawing(base));
        }
        let key = self.settings().keys.base();
        if link.revision() == 0 {
            link.get(key.clone(), GetOptions::new()).await?;
        }
        let revision = link.revision();
        // Others can have drawn more tokens over a base than this client has seen: one that was put back is not good enough.
        let least = lowest(revision, now(), self.highest()).max(self.highest_base());
        let base = raise(link, &key, least).await?;
        self.saw(base.value, revision);
        Ok(drawing(*known.insert(base)))
    }

    /// Puts a claim's key, if `conditions` hold, with the base in its value, and does `more`; `otherwise` if they do not hold. If the
    /// base has changed since this client saw it, the key is put without one, and the base is read in the same transaction. So clients
    /// that raise the base keep no other from a lock or from a place in a queue.
    ///
    /// The first put is not nested: those that are a full server does not notice.
    pub(crate) fn taking(
        &self,
        conditions: Vec<Compare>,
        put: Put<'_>,
        key: &str,
        drawing: Drawing,
        more: Vec<TxnOp>,
        otherwise: Vec<TxnOp>,
    ) -> Txn {
        let base = self.settings().keys.base();
        let as_known = Compare::mod_revision(base.clone(), CompareOp::Equal, drawing.base.written);
        let with = |value, last: Option<TxnOp>| -> Vec<_> {
            let (claim, reservation) = (put.with_base(key, value), put.reservation(key, value));
            let all = [claim].into_iter().chain(more.clone());
            all.chain(reservation).chain(last).collect()
        };
        let without_base = Txn::new()
            .when(conditions.clone())
            .and_then(with(None, Some(TxnOp::get(base, None))))
            .or_else(otherwise);
        let conditions: Vec<_> = conditions.into_iter().chain([as_known]).collect();
        Txn::new()
            .when(conditions)
            .and_then(with(Some(drawing.base.value), None))
            .or_else([TxnOp::txn(without_base)])
    }

    /// The base of the token of a key that was created then, by a [transaction](Self::taking) that came to `taken`. None if there is
    /// no key to go with it any more, and it is to be put anew.
    pub(crate) async fn drawn(
        &self,
        link: &Link,
        drawing: Drawing,
        put: Put<'_>,
        (key, created): (&str, i64),
        taken: &Taken,
    ) -> Result<Option<u64>, Failure> {
        let known = drawing.base;
        let found = match taken.has_base {
            true => Some(known),
            false => taken.base()?,
        };
        let rises = |base: &Base| {
            // One that is too large is told of when it is granted.
            let token = token(base.value, created);
            base.value >= known.value && token.map_or(true, |token| all_above(drawing.floor, token))
        };
        let Some(base) = found.filter(rises) else {
            // It was put back, or deleted. Unless another request has done so before, it is looked at and raised anew, above all that
            // others can have drawn until then.
            self.saw(known.value, created);
            link.base().lock().await.take_if(|base| *base == known);
            tracing::warn!(target: "fencelock", base = ?found, "the base of fencing tokens in etcd was lowered or deleted; raising it");
            self.remove(link, (key, created), reservation_of(key, put.claim))
                .await?;
            return Ok(None);
        };
        self.saw(base.value, created);
        if taken.has_base {
            return Ok(Some(base.value));
        }
        if let Some(before) = &mut *link.base().lock().await
            && before.written < base.written
        {
            *before = base;
        }
        let told = self.tell(link, put, (key, created), base.value).await?;
        Ok(told.then_some(base.value))
    }

    /// Writes the base into a key that was put without it, for whoever reads the key. False if the key has gone.
    async fn tell(&self, link: &Link, put: Put<'_>, (key, created): (&str, i64), base: u64) -> Result<bool, Failure> {
        let still = Compare::create_revision(key, CompareOp::Equal, created);
        let told = Txn::new().when([still]).and_then([put.with_base(key, Some(base))]);
        match link.txn(told).await {
            Ok(answer) => Ok(answer.succeeded()),
            Err(Failure::LeaseGone) => {
                self.lease_is_gone(put.kept);
                Ok(false)
            }
            Err(failure) => Err(failure),
        }
    }

    /// The base of the token of a key that was found without one, after it was written into the key. None if it is not known: only a base
    /// that was not written since the key was created is the one that there was then. None also if it had been put back by then.
    pub(crate) async fn told_later(
        &self,
        link: &Link,
        put: Put<'_>,
        (key, created): (&str, i64),
    ) -> Result<Option<u64>, Failure> {
        let answer = link.get(self.settings().keys.base(), GetOptions::new()).await?;
        let base = answer.kvs().first().map(Base::read).transpose()?;
        let is_that_one = |base: &Base| base.written <= created && base.value >= self.highest_base();
        let Some(base) = base.filter(is_that_one) else {
            return Ok(None);
        };
        let told = self.tell(link, put, (key, created), base.value).await?;
        Ok(told.then_some(base.value))
    }
}

/// Raises the base to that value, unless it is as high: one request, however many clients do the same.
async fn raise(link: &Link, key: &str, to: u64) -> Result<Base, Failure> {
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
        let answer = link.txn(put(lower).or_else([TxnOp::txn(missing)])).await?;
        let found = match nested(&answer) {
            Some(other) if !other.succeeded() => kvs(&other, 0)?,
            _ => return Ok(written(&answer)),
        };
        let found = Base::read(found.first().ok_or(Failure::Nonsense)?)?;
        if found.value >= to {
            return Ok(found);
        }
        // Of another width, so that nobody but a person has written it.
        let answer = link
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
        assert!(all_above(before.get(), last) && !all_above(before.get() + 1, last));
        assert_eq!(base_of(last, 42), Some(NOW));
    }

    #[test]
    fn tokens_rise_in_a_state_in_which_a_revision_stood_for_one() {
        let before = NOW + 500;
        assert!(next(NOW, 500, 0, 0) > before);
    }

    #[test]
    fn no_base_is_wider_than_what_is_compared() {
        assert_eq!(FencingToken::MAX.get().to_string().len(), 16);
    }
}
