//! What is asked of the server, and what it answers: one transaction each.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;
use std::time::Duration;

use etcd_client::{
    Compare, CompareOp, GetOptions, KeyValue, PutOptions, SortOrder, SortTarget, Txn, TxnOp, TxnOpResponse, TxnResponse,
};
use lock_core::{Attempt, Busy, Claim, Grant, HandOver, Holder, LockName, Released, Stamp};

use crate::failure::Failure;
use crate::leases::Kept;
use crate::link::Link;
use crate::record;
use crate::session::Session;
use crate::tokens::{self, Base};

/// How many keys are asked for at a time: an answer has to fit into four mebibytes.
const PAGE: i64 = 500;

impl Session {
    pub(crate) async fn try_on(self: &Arc<Self>, link: &Arc<Link>, claim: &Claim) -> Result<Attempt, Failure> {
        let asked = self.clock().now();
        let keys = &self.settings().keys;
        let (key, queue) = (keys.claim(claim), keys.queue(claim.name()));
        loop {
            let (kept, base) = self.prepare(link, claim).await?;
            let free = Compare::create_revision(&*queue, CompareOp::Equal, 0).with_prefix();
            let txn = Txn::new()
                .when(self.as_known(free, &kept, base))
                .and_then([put(&key, claim, &kept, base, true)])
                .or_else(self.reads(&key, &queue, &kept));
            let Some(answer) = self.take(link, claim, &kept, txn).await? else {
                continue;
            };
            if answer.succeeded() {
                let created = self.seen(answer.header());
                return Ok(Attempt::Granted(
                    self.grant(link, claim, &kept, base.value, created, asked)?,
                ));
            }
            let found = Found::read(&answer)?;
            match (&found.mine, &found.head) {
                (Some(mine), Some(head)) if mine.key() == head.key() => {
                    // Asked for again: with a full ttl.
                    if self.stands(link, &kept, mine).await? {
                        let base = record::base(mine.value()).ok_or(Failure::Nonsense)?;
                        let now = self.clock().now();
                        let grant = self.grant(link, claim, &kept, base, mine.create_revision(), now)?;
                        return Ok(Attempt::Granted(grant));
                    }
                }
                (_, Some(head)) => return Ok(self.busy(head).into()),
                (_, None) => self.learn(link, &kept, &found).await?,
            }
        }
    }

    /// Lets go of a claim, and sees to it that no request of it that is still on its way is carried out later.
    pub(crate) async fn release_on(&self, link: &Link, claim: &Claim) -> Result<Released, Failure> {
        let keys = &self.settings().keys;
        let key = keys.claim(claim);
        let known = self.table().claim(claim);
        let mut operations = vec![head(&keys.queue(claim.name()), 1), TxnOp::delete(&*key, None)];
        let unclear = known.as_ref().filter(|known| known.unclear);
        let mark = unclear.and_then(|known| Some((known, known.kept.mark()?.0)));
        let plain = operations.clone();
        if let Some((known, mark)) = mark {
            let lease = PutOptions::new().with_lease(known.kept.id());
            operations.push(TxnOp::put(mark, "", Some(lease)));
        }
        let released = match self.ask(link, Txn::new().and_then(operations)).await {
            Ok(answer) => {
                if let Some((known, _)) = mark {
                    known.kept.marked(self.seen(answer.header()));
                }
                first_is(&answer, &key)?
            }
            // And with it all that it kept.
            Err(Failure::LeaseGone) => false,
            // A full server deletes and does not put: the rest is done when the lease is looked after.
            Err(failure) if mark.is_some() && failure.is_full() => {
                let answer = self.ask(link, Txn::new().and_then(plain)).await?;
                let released = first_is(&answer, &key)?;
                return Ok(if released {
                    Released::Released
                } else {
                    Released::NotHeld
                });
            }
            Err(failure) => return Err(failure),
        };
        if claim.own_lease() {
            self.revoke_own(link, claim).await?;
        }
        self.table().gone(claim);
        Ok(if released {
            Released::Released
        } else {
            Released::NotHeld
        })
    }

    pub(crate) async fn hand_over_on(
        self: &Arc<Self>,
        link: &Arc<Link>,
        from: &Claim,
        to: &Claim,
    ) -> Result<HandOver, Failure> {
        let asked = self.clock().now();
        let held = self.table().claim(from).filter(|known| !known.unclear);
        let Some(created) = held.and_then(|known| known.created) else {
            let released = self.release_on(link, from).await?;
            return Ok(HandOver::new(released, self.try_on(link, to).await?));
        };
        let keys = &self.settings().keys;
        let (old, new, queue) = (keys.claim(from), keys.claim(to), keys.queue(to.name()));
        loop {
            let (kept, base) = self.prepare(link, to).await?;
            let mut compares = self.as_known(Compare::create_revision(&*old, CompareOp::Equal, created), &kept, base);
            // Nobody came after it.
            compares.push(Compare::create_revision(&*queue, CompareOp::Less, created + 1).with_prefix());
            let txn = Txn::new()
                .when(compares)
                .and_then([TxnOp::delete(&*old, None), put(&new, to, &kept, base, true)])
                .or_else([head(&queue, 2), TxnOp::delete(&*old, None)]);
            let Some(answer) = self.take(link, to, &kept, txn).await? else {
                continue;
            };
            if from.own_lease() {
                self.revoke_own(link, from).await?;
            }
            self.table().gone(from);
            if answer.succeeded() {
                let created = self.seen(answer.header());
                let grant = self.grant(link, to, &kept, base.value, created, asked)?;
                return Ok(HandOver::new(Released::Released, Attempt::Granted(grant)));
            }
            let found = kvs(&answer, 0)?;
            let was_held = found.first().is_some_and(|head| head.key() == old.as_bytes());
            let released = if was_held {
                Released::Released
            } else {
                Released::NotHeld
            };
            let mut others = found.iter().filter(|kv| kv.key() != old.as_bytes());
            let to = match others.next() {
                Some(head) => self.busy(head).into(),
                // Only what was known has changed.
                None => {
                    *link.base().lock().await = None;
                    self.try_on(link, to).await?
                }
            };
            return Ok(HandOver::new(released, to));
        }
    }

    pub(crate) async fn force_release_on(&self, link: &Link, name: &LockName) -> Result<Option<Holder>, Failure> {
        loop {
            let Some((head, holder)) = self.head_of(link, name).await? else {
                return Ok(None);
            };
            let still = Compare::create_revision(head.key(), CompareOp::Equal, head.create_revision());
            let txn = Txn::new().when([still]).and_then([TxnOp::delete(head.key(), None)]);
            if self.ask(link, txn).await?.succeeded() {
                return Ok(Some(holder));
            }
        }
    }

    pub(crate) async fn holder_on(&self, link: &Link, name: &LockName) -> Result<Option<Holder>, Failure> {
        Ok(self.head_of(link, name).await?.map(|(_, holder)| holder))
    }

    async fn head_of(&self, link: &Link, name: &LockName) -> Result<Option<(KeyValue, Holder)>, Failure> {
        let queue = self.settings().keys.queue(name);
        let answer = self.ask(link, Txn::new().and_then([head(&queue, 1)])).await?;
        let Some(found) = kvs(&answer, 0)?.into_iter().next() else {
            return Ok(None);
        };
        let mut holder = self.holder_of(&found);
        holder.remaining = self.remaining(link, found.lease()).await?;
        Ok(Some((found, holder)))
    }

    /// Everything that is held under names that start with `prefix`.
    pub(crate) async fn list_on(&self, link: &Link, prefix: &str) -> Result<Vec<Holder>, Failure> {
        let keys = &self.settings().keys;
        let mut heads: BTreeMap<LockName, KeyValue> = BTreeMap::new();
        let mut from = keys.locks(prefix).into_bytes();
        let end = after(&from);
        loop {
            let options = GetOptions::new().with_range(end.clone()).with_limit(PAGE);
            let answer = link
                .ask(link.client().kv_client().get(from.clone(), Some(options)))
                .await?;
            for kv in answer.kvs() {
                let Some((name, _)) = keys
                    .read(kv.key())
                    .filter(|(name, _)| name.as_str().starts_with(prefix))
                else {
                    continue;
                };
                match heads.entry(name) {
                    Entry::Vacant(first) => {
                        first.insert(kv.clone());
                    }
                    Entry::Occupied(mut seen) if kv.create_revision() < seen.get().create_revision() => {
                        seen.insert(kv.clone());
                    }
                    Entry::Occupied(_) => {}
                }
            }
            match answer.kvs().last() {
                Some(last) if answer.more() => {
                    from = last.key().to_vec();
                    from.push(0);
                }
                _ => break,
            }
        }
        let mut remaining = BTreeMap::new();
        let mut holders = Vec::with_capacity(heads.len());
        for kv in heads.values() {
            let left = match remaining.get(&kv.lease()) {
                Some(left) => *left,
                None => {
                    let left = self.remaining(link, kv.lease()).await?;
                    remaining.insert(kv.lease(), left);
                    left
                }
            };
            let mut holder = self.holder_of(kv);
            holder.remaining = left;
            holders.push(holder);
        }
        Ok(holders)
    }

    /// How long a lease is kept unless it is renewed; in whole seconds, as etcd tells it.
    async fn remaining(&self, link: &Link, lease: i64) -> Result<Option<Duration>, Failure> {
        let asked = link.ask(link.client().lease_client().time_to_live(lease, None)).await;
        match asked {
            Ok(answer) => Ok(u64::try_from(answer.ttl()).ok().map(Duration::from_secs)),
            Err(Failure::LeaseGone) => Ok(None),
            Err(failure) => Err(failure),
        }
    }

    /// What a request to take a name depends on.
    pub(crate) async fn prepare(&self, link: &Link, claim: &Claim) -> Result<(Arc<Kept>, Base), Failure> {
        let kept = self.lease_for(link, claim).await?;
        Ok((kept, self.base(link).await?))
    }

    /// `first`, and that base and lease are as this client knows them.
    pub(crate) fn as_known(&self, first: Compare, kept: &Kept, base: Base) -> Vec<Compare> {
        let written = |key: &str, revision| Compare::mod_revision(key, CompareOp::Equal, revision);
        let mut compares = vec![first, written(&self.settings().keys.base(), base.written)];
        compares.extend(kept.mark().map(|(key, revision)| written(key, revision)));
        compares
    }

    /// What tells why a claim was not granted; [`Found`] reads it.
    pub(crate) fn reads(&self, key: &str, queue: &str, kept: &Kept) -> Vec<TxnOp> {
        let mut reads = vec![
            TxnOp::get(key, None),
            head(queue, 1),
            TxnOp::get(self.settings().keys.base(), None),
        ];
        reads.extend(kept.mark().map(|(key, _)| TxnOp::get(key, None)));
        reads
    }

    /// Sends a transaction that may create the claim's key; `None` if the lease had ended. Until the answer is here, or the claim
    /// is released, it counts as one that may be carried out at any time.
    pub(crate) async fn take(
        &self,
        link: &Link,
        claim: &Claim,
        kept: &Arc<Kept>,
        txn: Txn,
    ) -> Result<Option<TxnResponse>, Failure> {
        self.table().asked(claim, kept);
        let answer = self.ask(link, txn).await;
        match answer {
            Ok(answer) => {
                self.table().answered(claim);
                Ok(Some(answer))
            }
            Err(Failure::LeaseGone) => {
                self.table().answered(claim);
                kept.ended();
                self.table().forget_lease(kept.id());
                Ok(None)
            }
            Err(failure) => Err(failure),
        }
    }

    pub(crate) async fn ask(&self, link: &Link, txn: Txn) -> Result<TxnResponse, Failure> {
        link.ask(link.client().kv_client().txn(txn)).await
    }

    /// Takes note of what had changed.
    pub(crate) async fn learn(&self, link: &Link, kept: &Kept, found: &Found) -> Result<(), Failure> {
        self.learn_base(link, found.base.as_ref()).await?;
        if kept.mark().is_some() {
            match &found.lease {
                Some(kv) => kept.marked(kv.mod_revision()),
                None => kept.ended(),
            }
        }
        Ok(())
    }

    /// Whether the claim's key, which is there already, has a lease that this client can count on from now for a full ttl. If
    /// not, the key is deleted.
    pub(crate) async fn stands(&self, link: &Link, kept: &Kept, mine: &KeyValue) -> Result<bool, Failure> {
        if mine.lease() == kept.id() {
            match self.keep_alive(link, kept).await {
                Ok(()) => return Ok(true),
                Err(Failure::LeaseGone) => {}
                Err(failure) => return Err(failure),
            }
        }
        let delete = TxnOp::delete(mine.key(), None);
        self.ask(link, Txn::new().and_then([delete])).await?;
        Ok(false)
    }

    /// `asked` is when the claim was asked for; when the claim waited, when it is granted.
    pub(crate) fn grant(
        self: &Arc<Self>,
        link: &Arc<Link>,
        claim: &Claim,
        kept: &Arc<Kept>,
        base: u64,
        created: i64,
        asked: Stamp,
    ) -> Result<Grant, Failure> {
        let token = tokens::token(base, created)?;
        self.saw(base, created);
        let lease = kept.lease(asked, self.clock().now());
        let grant = Grant::new(claim.clone(), token, lease);
        self.table().granted(claim, token, created, grant.revoker());
        if claim.own_lease() {
            // Nobody may renew it, so nobody would look.
            self.look_after(link, kept);
        }
        Ok(grant)
    }

    pub(crate) fn busy(&self, head: &KeyValue) -> Busy {
        Busy::default().with_holder(self.holder_of(head))
    }

    fn holder_of(&self, kv: &KeyValue) -> Holder {
        let mut holder = record::holder(kv.value(), kv.create_revision());
        if let Some((name, owner)) = self.settings().keys.read(kv.key()) {
            (holder.name, holder.owner) = (Some(name), Some(owner));
        }
        holder
    }

    async fn revoke_own(&self, link: &Link, claim: &Claim) -> Result<(), Failure> {
        let id = crate::leases::own_id(claim.owner());
        self.table().forget_lease(id);
        match link.ask(link.client().lease_client().revoke(id)).await {
            Ok(_) | Err(Failure::LeaseGone) => Ok(()),
            Err(failure) => Err(failure),
        }
    }
}

/// Why a claim was not granted.
pub(crate) struct Found {
    pub(crate) mine: Option<KeyValue>,
    pub(crate) head: Option<KeyValue>,
    pub(crate) base: Option<KeyValue>,
    pub(crate) lease: Option<KeyValue>,
}

impl Found {
    /// The answers to [`Session::reads`].
    pub(crate) fn read(answer: &TxnResponse) -> Result<Self, Failure> {
        let first = |at| Ok::<_, Failure>(kvs(answer, at)?.into_iter().next());
        Ok(Self {
            mine: first(0)?,
            head: first(1)?,
            base: first(2)?,
            lease: first(3).unwrap_or_default(),
        })
    }
}

/// What the operation at that place of a transaction found.
pub(crate) fn kvs(answer: &TxnResponse, at: usize) -> Result<Vec<KeyValue>, Failure> {
    match answer.op_responses().into_iter().nth(at) {
        Some(TxnOpResponse::Get(mut found)) => Ok(found.take_kvs()),
        _ => Err(Failure::Nonsense),
    }
}

/// Whether the first key that a transaction found is this one.
fn first_is(answer: &TxnResponse, key: &str) -> Result<bool, Failure> {
    Ok(kvs(answer, 0)?
        .first()
        .is_some_and(|first| first.key() == key.as_bytes()))
}

/// Puts a claim's key.
pub(crate) fn put(key: &str, claim: &Claim, kept: &Kept, base: Base, held: bool) -> TxnOp {
    let lease = PutOptions::new().with_lease(kept.id());
    TxnOp::put(key, record::value(claim, base.value, held), Some(lease))
}

/// Reads the oldest keys of a queue.
pub(crate) fn head(queue: &str, limit: i64) -> TxnOp {
    let oldest = GetOptions::new()
        .with_prefix()
        .with_sort(SortTarget::Create, SortOrder::Ascend)
        .with_limit(limit);
    TxnOp::get(queue, Some(oldest))
}

/// The first key that does not begin with `prefix`.
fn after(prefix: &[u8]) -> Vec<u8> {
    let mut end = prefix.to_vec();
    // A prefix is text, so no byte of it is 0xff.
    if let Some(last) = end.last_mut() {
        *last += 1;
    }
    end
}
