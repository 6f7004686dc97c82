//! What is asked of the server, and what it answers: one transaction each.

use std::sync::{Arc, OnceLock};

use etcd_client::{Compare, CompareOp, GetOptions, KeyValue, PutOptions, Txn, TxnOp, TxnOpResponse, TxnResponse};
use lock_core::{Attempt, Busy, Claim, Grant, LockError, Released, Stamp};

use crate::failure::{Failure, unavailable};
use crate::keys;
use crate::leases::{Kept, reservation_ids};
use crate::link::Link;
use crate::queue::{PAGE, front, head, is_of, is_reserved, nested, oldest, reservation_of, text};
use crate::record;
use crate::session::Session;
use crate::tokens::{self, Drawing, Put, Taken};

/// What becomes of the name of a claim that is released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum After {
    Free,
    /// It stays taken until then.
    Reserved(Stamp),
}

/// The first attempt at a release, when it was sent.
struct Begun {
    /// The lease of the claim, if it was known to hold unless something else had deleted its key.
    held: Option<Arc<Kept>>,
    /// The revision of the cluster.
    revision: i64,
}

impl Session {
    pub(crate) async fn try_on(self: &Arc<Self>, link: &Arc<Link>, claim: &Claim) -> Result<Attempt, Failure> {
        let asked = self.clock().now();
        let queue = self.settings().keys.queue(claim.name());
        loop {
            let (kept, drawing) = self.prepare(link, claim).await?;
            let put = Put {
                claim,
                kept: &kept,
                holds: true,
            };
            let taken = self.take(link, claim, &queue, &kept, drawing, |key| {
                let free = Compare::create_revision(&*queue, CompareOp::Equal, 0).with_prefix();
                let free = as_known([free], &kept);
                self.taking(free, put, key, drawing, Vec::new(), vec![head(&queue)])
            });
            let Some((key, created, taken)) = taken.await? else {
                continue;
            };
            if taken.put {
                let life = (&*key, created);
                let Some(base) = self.drawn(link, drawing, put, life, &taken).await? else {
                    continue;
                };
                return Ok(Attempt::Granted(self.grant(link, claim, &kept, base, life, asked)?));
            }
            match front(&taken.kvs(0)?) {
                Some(head) if is_of(head, claim) && !is_reserved(head) || head.key() == key.as_bytes() => {
                    // Asked for again: with a full ttl.
                    if let Some(base) = self.stands(link, claim, &key, &kept, head).await? {
                        let life = (text(head.key())?, head.create_revision());
                        let grant = self.grant(link, claim, &kept, base, life, self.clock().now())?;
                        return Ok(Attempt::Granted(grant));
                    }
                }
                Some(head) => {
                    let busy = self.busy(head);
                    self.leave_nothing(link, claim).await?;
                    return Ok(busy.into());
                }
                None => self.learn(link, &kept).await?,
            }
        }
    }

    /// Whoever is told that a name is busy does not come again to release the claim.
    async fn leave_nothing(&self, link: &Link, claim: &Claim) -> Result<(), Failure> {
        if self.table().forget_what_is_nowhere(claim) {
            if claim.own_lease()
                && let Err(failure) = self.revoke_own(link, claim).await
            {
                tracing::debug!(target: "fencelock", ?failure, "a lease that keeps nothing ends by itself");
            }
            return Ok(());
        }
        self.abandon(claim, After::Free);
        self.release_on(link, claim, After::Free).await.map(drop)
    }

    /// Lets go of a claim. If the answer to a deletion is lost and the key is gone when it is asked for again, then either it can be shown
    /// that nothing else deleted it, or it is not known whether the claim was held to the end, and that is an error.
    pub(crate) async fn release(&self, claim: &Claim, after: After) -> Result<Released, LockError> {
        let first = OnceLock::new();
        let releasing = |link: Arc<Link>| {
            let first = &first;
            async move {
                let begun = Begun {
                    held: self.table().held_over(claim, link.serial()),
                    revision: link.revision(),
                };
                let released = match after {
                    After::Free => self.release_on(&link, claim, after).await,
                    After::Reserved(until) => self.release_reserved_on(&link, claim, until).await,
                };
                match released {
                    Ok(Released::NotHeld) => match first.get() {
                        Some(begun) if self.is_its_doing(&link, begun).await? => Ok(Released::Released),
                        Some(_) => Err(Failure::Known(unavailable(
                            "release",
                            "the connection to etcd ended before the answer came; the lock is not held any more, and whether it was \
                             held to the end is not known",
                        ))),
                        None => Ok(Released::NotHeld),
                    },
                    // Nothing was done.
                    Err(Failure::Nameless) => Err(Failure::Nameless),
                    Err(failure) => {
                        let _ = first.set(begun);
                        Err(failure)
                    }
                    done => done,
                }
            }
        };
        self.on_link("release", releasing).await
    }

    /// Whether only that attempt at a release can have deleted the key of the claim, which is gone.
    ///
    /// The key that is looked at is deleted by a forced release of any lock of the same lease, in the same transaction, and by the end of
    /// the lease. If it is there, neither of them deleted the claim's key. The claim was granted over the connection of that attempt, so
    /// its key was in that state; a state that went back since has a lower revision. A key that is deleted by hand is not noticed, nor one
    /// that a client of an older version, which leaves the other key, releases by force.
    async fn is_its_doing(&self, link: &Link, begun: &Begun) -> Result<bool, Failure> {
        let Some(kept) = &begun.held else {
            return Ok(false);
        };
        let unforced = self.settings().keys.unforced(kept.id());
        let answer = link.get(unforced, GetOptions::new()).await?;
        Ok(!answer.kvs().is_empty() && self.seen(answer.header()) >= begun.revision)
    }

    /// Lets go of a claim, and sees to it that no request of it that is still on its way is carried out later. What it has reserved ends
    /// in the same step, unless it is to stay.
    pub(crate) async fn release_on(&self, link: &Link, claim: &Claim, after: After) -> Result<Released, Failure> {
        let Some(known) = self.table().deleting(claim) else {
            return self.release_found(link, claim, after).await;
        };
        let mut operations = vec![TxnOp::delete(&*known.key, None)];
        if !known.is_first_if_there(link.serial()) {
            operations.insert(0, head(&self.settings().keys.queue(claim.name())));
        }
        if let (After::Free, Some(reservation)) = (after, reservation_of(&known.key, claim)) {
            operations.push(TxnOp::delete(reservation, None));
        }
        let plain = operations.clone();
        let mark = known.kept.mark().filter(|_| known.unclear);
        if let Some((mark, _)) = mark {
            let lease = PutOptions::new().with_lease(known.kept.id());
            operations.push(TxnOp::put(mark, "", Some(lease)));
        }
        let was_first = match link.txn(Txn::new().and_then(operations)).await {
            Ok(answer) => {
                if mark.is_some() {
                    known.kept.marked(self.seen(answer.header()));
                }
                was_first(&answer, &known.key, claim)?
            }
            // And with it all that it kept.
            Err(Failure::LeaseGone) => false,
            // A full server deletes and does not put: the rest is done when the lease is looked after.
            Err(failure) if mark.is_some() && failure.is_full() => {
                let answer = link.txn(Txn::new().and_then(plain)).await?;
                self.table().deleted(claim, &known.key);
                return Ok(released(was_first(&answer, &known.key, claim)?));
            }
            Err(failure) => return Err(failure),
        };
        self.table().deleted(claim, &known.key);
        self.over(link, claim, Some(&known.key), after).await?;
        Ok(released(was_first))
    }

    /// Lets go of a claim whose key another client put, if there is one; its owner tells it.
    async fn release_found(&self, link: &Link, claim: &Claim, after: After) -> Result<Released, Failure> {
        let queue = self.settings().keys.queue(claim.name());
        let own = self.table().key_of(claim);
        let (mut first, mut was_first, mut from) = (None, false, 0);
        loop {
            let page = oldest(PAGE).with_min_create_revision(from);
            let answer = link.get(&*queue, page).await?;
            for found in answer.kvs() {
                let first = *first.get_or_insert(found.create_revision());
                let goes = is_of(found, claim) && (after == After::Free || !is_reserved(found));
                let life = (text(found.key())?, found.create_revision());
                if goes && self.remove(link, life, None).await? {
                    was_first |= life.1 == first && !is_reserved(found);
                }
            }
            match answer.kvs().last() {
                Some(last) if answer.more() => from = last.create_revision() + 1,
                _ => break,
            }
        }
        self.over(link, claim, own.as_deref(), after).await?;
        Ok(released(was_first))
    }

    /// Deletes the key that was created then, and the reservation beside it. One that is put in its place is not harmed, however late this
    /// arrives.
    pub(crate) async fn remove(
        &self,
        link: &Link,
        (key, created): (&str, i64),
        reservation: Option<String>,
    ) -> Result<bool, Failure> {
        let still = Compare::create_revision(key, CompareOp::Equal, created);
        let keys = [key.to_owned()].into_iter().chain(reservation);
        let deletes: Vec<_> = keys.map(|key| TxnOp::delete(key, None)).collect();
        Ok(link.txn(Txn::new().when([still]).and_then(deletes)).await?.succeeded())
    }

    /// The claim is gone from the server, with the key that it had of this client, if any.
    pub(crate) async fn over(
        &self,
        link: &Link,
        claim: &Claim,
        own: Option<&str>,
        after: After,
    ) -> Result<(), Failure> {
        if claim.own_lease() {
            self.revoke_own(link, claim).await?;
        }
        if after == After::Free && claim.at_least().is_some() {
            let leases = self.table().reservation(claim, |reserved| reserved.leases.clone());
            // Another client may have granted them.
            let leases = leases.unwrap_or_else(|| reservation_ids(claim.owner()).to_vec());
            self.revoke_all(link, leases).await?;
        }
        if let Some(own) = own {
            self.table().gone(claim, own);
        }
        Ok(())
    }

    /// What a request to take a name depends on.
    pub(crate) async fn prepare(&self, link: &Link, claim: &Claim) -> Result<(Arc<Kept>, Drawing), Failure> {
        let kept = self.lease_for(link, claim).await?;
        Ok((kept, self.drawing(link).await?))
    }

    /// Sends a transaction that may put the claim's key, and returns that key, the revision and what it came to; `None` if the lease had
    /// ended. Until the answer is here, it counts as one that may be carried out at any time.
    pub(crate) async fn take(
        &self,
        link: &Link,
        claim: &Claim,
        queue: &str,
        kept: &Arc<Kept>,
        drawing: Drawing,
        txn: impl FnOnce(&str) -> Txn,
    ) -> Result<Option<(Arc<str>, i64, Taken)>, Failure> {
        let key = self.table().putting(claim, queue, kept, drawing.floor);
        match link.txn(txn(&key)).await {
            Ok(answer) => {
                self.table().answered(claim, &key, was_put(&answer));
                let revision = self.seen(answer.header());
                Ok(Some((key, revision, Taken::read(answer)?)))
            }
            Err(Failure::LeaseGone) => {
                self.table().answered(claim, &key, false);
                self.lease_is_gone(kept);
                Ok(None)
            }
            Err(failure) => {
                // A server that is full may say so of what it has done, and one that wants a user has done nothing.
                if failure.is_full() || matches!(failure, Failure::Nameless) {
                    self.table().answered(claim, &key, failure.is_full());
                }
                Err(failure)
            }
        }
    }

    /// The key of a shared lease was written since this client saw it, or is gone: looks at it anew.
    pub(crate) async fn learn(&self, link: &Link, kept: &Kept) -> Result<(), Failure> {
        let Some((key, known)) = kept.mark() else {
            return Ok(());
        };
        match link.get(key, GetOptions::new()).await?.kvs().first() {
            Some(found) if found.mod_revision() >= known => kept.marked(found.mod_revision()),
            // Gone, or of a state from before: what has been put since is not there any more.
            _ => kept.ended(),
        }
        Ok(())
    }

    /// The base of what was found, which is under the claim's own key or has its owner, if that is the claim, with a token that rises, on
    /// a lease that this client can count on from now for a full ttl. If not, it is deleted.
    pub(crate) async fn stands(
        &self,
        link: &Link,
        claim: &Claim,
        own: &str,
        kept: &Kept,
        found: &KeyValue,
    ) -> Result<Option<u64>, Failure> {
        let is_own = found.key() == own.as_bytes();
        // What another client put for the claim is taken over if the lease is the claim's: whoever releases that ends all of it.
        let ours = is_of(found, claim) && (is_own || claim.own_lease()) && found.lease() == kept.id();
        let life = (text(found.key())?, found.create_revision());
        let base = match record::base(found.value()) {
            // This client was to write it, and that went wrong.
            None if ours && is_own => {
                let holds = record::holder(found.value(), life.1).acquired_at.is_some();
                self.told_later(link, Put { claim, kept, holds }, life).await?
            }
            base => base,
        };
        // What it put may have been put in a state that had gone back.
        let floor = if is_own { self.table().floor(claim) } else { 0 };
        let token = base.and_then(|base| tokens::token(base, life.1).ok());
        if ours && token.is_some_and(|token| tokens::all_above(floor, token)) {
            match self.keep_alive(link, kept).await {
                Ok(()) => {
                    self.table().found(claim);
                    return Ok(base);
                }
                Err(Failure::LeaseGone) => {}
                Err(failure) => return Err(failure),
            }
        }
        let owner = record::owner(found.value());
        let reservation = owner.map(|owner| keys::reservation(life.0, owner));
        self.remove(link, life, reservation).await?;
        Ok(None)
    }

    /// The key and when it was created make the grant. `asked` is when the claim was asked for; when the claim waited, when it
    /// is granted.
    pub(crate) fn grant(
        self: &Arc<Self>,
        link: &Arc<Link>,
        claim: &Claim,
        kept: &Arc<Kept>,
        base: u64,
        (key, created): (&str, i64),
        asked: Stamp,
    ) -> Result<Grant, Failure> {
        let token = tokens::token(base, created)?;
        self.saw(base, created);
        let lease = kept.lease(asked, self.clock().now());
        let first = tokens::first(token, self.table().tokens_wanted(claim, key));
        let grant = Grant::new(claim.clone(), token, lease).with_first_token(first);
        self.table().granted(&grant, (key, created), link.serial());
        if claim.own_lease() {
            // Nobody may renew it, so nobody would look.
            self.look_after(link, kept);
        }
        Ok(grant)
    }

    pub(crate) fn busy(&self, head: &KeyValue) -> Busy {
        Busy::default().with_holder(self.holder_of(head))
    }

    async fn revoke_own(&self, link: &Link, claim: &Claim) -> Result<(), Failure> {
        let id = crate::leases::own_id(claim.owner());
        self.table().forget_lease(id);
        self.revoke_all(link, [id]).await
    }

    /// Ends leases, as far as they are there.
    pub(crate) async fn revoke_all(&self, link: &Link, ids: impl IntoIterator<Item = i64>) -> Result<(), Failure> {
        for id in ids {
            match link.revoke(id).await {
                Ok(_) | Err(Failure::LeaseGone) => {}
                Err(failure) => return Err(failure),
            }
        }
        Ok(())
    }
}

/// Whether a transaction that was to put a claim's key, in whichever of its parts, has done so.
fn was_put(answer: &TxnResponse) -> bool {
    answer.succeeded() || nested(answer).is_some_and(|part| was_put(&part))
}

/// Whether the key that a release deleted was the head of its queue, and still the claim's: it was read, or there was nothing
/// else that it could be.
fn was_first(answer: &TxnResponse, key: &str, claim: &Claim) -> Result<bool, Failure> {
    match answer.op_responses().first() {
        Some(TxnOpResponse::Get(found)) => {
            let first = front(found.kvs());
            Ok(first.is_some_and(|first| first.key() == key.as_bytes() && is_of(first, claim)))
        }
        Some(TxnOpResponse::Delete(done)) => Ok(done.deleted() > 0),
        _ => Err(Failure::Nonsense),
    }
}

fn released(was_first: bool) -> Released {
    if was_first {
        Released::Released
    } else {
        Released::NotHeld
    }
}

/// `first`, and that the lease is as this client knows it.
pub(crate) fn as_known(first: impl IntoIterator<Item = Compare>, kept: &Kept) -> Vec<Compare> {
    let mark = kept.mark();
    let mark = mark.map(|(key, written)| Compare::mod_revision(key, CompareOp::Equal, written));
    first.into_iter().chain(mark).collect()
}
