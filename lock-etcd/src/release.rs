//! How claims go: by releases, and by tries that find the name busy.

use std::sync::{Arc, OnceLock};

use etcd_client::{Compare, CompareOp, PutOptions, Txn, TxnOp, TxnResponse};
use lock_core::{Claim, LockError, Released};

use crate::client::{Client, revision};
use crate::connection::Connection;
use crate::error::Failure;
use crate::leases::{has_own_lease, own_id, reservation_ids};
use crate::queue::{PAGE, head, is_of, is_reserved, kv, oldest, text};
use crate::record;
use crate::registry::{After, Known};

/// What a release came to.
#[derive(Clone, Copy)]
struct Ended {
    /// `None` if the key is not there, and an earlier request may have deleted it.
    released: Option<Released>,
    /// Whether no request of the claim can be carried out any more.
    is_final: bool,
}

impl Client {
    /// A claim that is answered with "busy" is not released.
    pub(crate) async fn leave_nothing(&self, connection: &Connection, claim: &Claim) -> Result<(), Failure> {
        if self.registry().forget_what_is_nowhere(claim) {
            if has_own_lease(claim)
                && let Err(failure) = self.revoke_own(connection, claim).await
            {
                tracing::debug!(target: "fencelock", ?failure, "a lease that keeps nothing ends by itself");
            }
            return Ok(());
        }
        self.leave(claim, After::Free);
        self.release_on(connection, claim, After::Free).await
    }

    /// The claim is not wanted any more: it will be released.
    pub(crate) fn leave(&self, claim: &Claim, after: After) {
        self.registry().leave(claim, after, self.clock().now());
    }

    /// Releases a claim. If the answer to a deletion is lost, and the key is gone when it is asked for again, then it is not known whether the
    /// claim was held to the end, and that is an error.
    pub(crate) async fn release(&self, claim: &Claim, after: After) -> Result<Released, LockError> {
        self.leave(claim, after);
        // What the server said of the key, while leases remain to be revoked.
        let said = OnceLock::new();
        let outcome = self.call("release", |connection, resent| {
            let said = &said;
            async move {
                let ended = match said.get() {
                    Some(ended) => *ended,
                    None => {
                        let ended = self.end(&connection, claim, after, resent).await?;
                        *said.get_or_init(|| ended)
                    }
                };
                self.over(&connection, claim, after, ended).await?;
                ended.released.ok_or(Failure::PerhapsReleased)
            }
        });
        match (outcome.await, said.get().and_then(|ended| ended.released)) {
            (Err(error), Some(Released::Released)) => {
                tracing::debug!(target: "fencelock", %error, "leases of a lock that was released were not revoked; they end by themselves");
                Ok(Released::Released)
            }
            (outcome, _) => outcome,
        }
    }

    /// Releases a claim, whether it was held or not.
    pub(crate) async fn release_on(&self, connection: &Connection, claim: &Claim, after: After) -> Result<(), Failure> {
        let ended = self.end(connection, claim, after, false).await?;
        self.over(connection, claim, after, ended).await
    }

    /// Deletes the key of a claim, and shuts out the requests of the claim that are still on their way. What it has reserved ends in the same
    /// step, unless it is to stay.
    ///
    /// **Invariant.** The key is deleted only if its owner is that of the claim. So a release that arrives late does nothing to a later claim
    /// under the same key.
    async fn end(&self, connection: &Connection, claim: &Claim, after: After, resent: bool) -> Result<Ended, Failure> {
        let ended = |is_released: bool, is_final| Ended {
            released: match is_released {
                true => Some(Released::Released),
                false => (!resent).then_some(Released::NotHeld),
            },
            is_final,
        };
        let known = match self.registry().known(claim) {
            Some(known) => Some((Arc::clone(&known.key), known.base, Some(known))),
            None => self
                .find(connection, claim)
                .await?
                .map(|(key, base)| (key, Some(base), None)),
        };
        let Some((key, base, known)) = known else {
            return Ok(ended(false, true));
        };
        let (mine, ending) = match after {
            After::Free => (record::is_of_owner(&key, claim.owner()), TxnOp::delete(&*key, None)),
            After::Reserved(until) => {
                let reserving = self.put_reserved(connection, claim, &key, base.unwrap_or_default(), until);
                (record::is_claim_of(&key, claim.owner()), reserving.await?)
            }
        };
        let queue = self.settings().keys.queue(claim.name());
        let mark = known.as_ref().and_then(unclear);
        let txn = |mark: Option<TxnOp>| {
            let released = [head(&queue), ending.clone()].into_iter().chain(mark.clone());
            let other = [TxnOp::get(&*key, None)].into_iter().chain(mark);
            Txn::new()
                .when(mine.clone())
                .and_then(released.collect::<Vec<_>>())
                .or_else(other.collect::<Vec<_>>())
        };
        let answer = match connection.txn(txn(mark.clone())).await {
            Ok(answer) => answer,
            // And with it all that it kept.
            Err(Failure::LeaseGone) => return Ok(ended(false, true)),
            // A full server deletes and does not put: the rest is done when the lease is checked.
            Err(failure) if mark.is_some() && failure.is_full() => {
                let answer = connection.txn(txn(None)).await?;
                return Ok(ended(was_released(&answer, &key, claim, after)?, false));
            }
            Err(failure) => return Err(failure),
        };
        if let Some(known) = known.filter(|_| mark.is_some()) {
            known.lease.marked(revision(answer.header()));
        }
        Ok(ended(was_released(&answer, &key, claim, after)?, true))
    }

    /// The key that another client has put for the claim, and the base of its token.
    async fn find(&self, connection: &Connection, claim: &Claim) -> Result<Option<(Arc<str>, u64)>, Failure> {
        let queue = self.settings().keys.queue(claim.name());
        let mut from = 0;
        loop {
            let page = oldest(PAGE).with_min_create_revision(from);
            let answer = connection.get(&*queue, page).await?;
            if let Some(found) = answer.kvs().iter().find(|found| is_of(found, claim)) {
                let base = record::base(found.value()).unwrap_or_default();
                return Ok(Some((text(found.key())?.into(), base)));
            }
            match answer.kvs().last() {
                Some(last) if answer.more() => from = last.create_revision() + 1,
                _ => return Ok(None),
            }
        }
    }

    /// Deletes the key that was created then. One that is put in its place is not harmed, however late this arrives.
    pub(crate) async fn remove(&self, connection: &Connection, key: &str, created: i64) -> Result<bool, Failure> {
        let still = Compare::create_revision(key, CompareOp::Equal, created);
        let txn = Txn::new().when([still]).and_then([TxnOp::delete(key, None)]);
        Ok(connection.txn(txn).await?.succeeded())
    }

    /// The key of the claim is gone from the server; its leases go too. Nothing is reserved of a claim that was not held.
    async fn over(&self, connection: &Connection, claim: &Claim, after: After, ended: Ended) -> Result<(), Failure> {
        if !ended.is_final {
            return Ok(());
        }
        if has_own_lease(claim) {
            self.revoke_own(connection, claim).await?;
        }
        if claim.at_least().is_some() {
            // Another client may have granted them.
            let [first, rest] = reservation_ids(claim.owner());
            self.revoke(connection, first).await?;
            if after == After::Free || ended.released != Some(Released::Released) {
                self.revoke(connection, rest).await?;
            }
        }
        self.registry().gone(claim);
        Ok(())
    }

    async fn revoke_own(&self, connection: &Connection, claim: &Claim) -> Result<(), Failure> {
        let id = own_id(claim.owner());
        self.registry().forget_lease(id);
        self.revoke(connection, id).await
    }

    /// Ends a lease, if it is there.
    pub(crate) async fn revoke(&self, connection: &Connection, id: i64) -> Result<(), Failure> {
        match connection.revoke(id).await {
            Ok(_) | Err(Failure::LeaseGone) => Ok(()),
            Err(failure) => Err(failure),
        }
    }
}

/// The operation that shuts out the requests of the claim that were not answered: they compare when the key of the shared lease was written.
/// On a lease of its own, its end does that.
fn unclear(known: &Known) -> Option<TxnOp> {
    let mark = known.lease.mark_key().filter(|_| known.is_unclear)?;
    let lease = PutOptions::new().with_lease(known.lease.id());
    Some(TxnOp::put(mark, "", Some(lease)))
}

/// Whether the key that a release found was the first under the name.
fn was_released(answer: &TxnResponse, key: &str, claim: &Claim, after: After) -> Result<bool, Failure> {
    let found = kv(answer, 0)?.filter(|found| found.key() == key.as_bytes());
    Ok(match found {
        Some(_) if answer.succeeded() => true,
        // By an earlier attempt.
        Some(found) => after != After::Free && is_of(&found, claim) && is_reserved(&found),
        None => false,
    })
}
