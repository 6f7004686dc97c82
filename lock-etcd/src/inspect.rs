//! Who holds what, for people to see, and to end.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use etcd_client::{Compare, CompareOp, GetOptions, KeyValue, Txn, TxnOp, TxnOpResponse};
use futures_util::stream::{self, StreamExt as _, TryStreamExt as _};
use lock_core::{Holder, LockError, LockName};
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::MIN_TTL;
use crate::failure::Failure;
use crate::keys;
use crate::leases::reservation_ids;
use crate::link::Link;
use crate::queue::{PAGE, front, head, is_reserved, kvs, place, text};
use crate::record;
use crate::session::Session;

/// How many leases are asked about within the time that one operation may take, and how many at once.
const LEASES: usize = 500;
const AT_ONCE: usize = 64;

/// The key that a forced release is about to delete.
pub(crate) struct Begun {
    key: Vec<u8>,
    created: i64,
    holder: Holder,
}

impl Session {
    /// Ends the hold of whoever holds the name. `begun` is what an earlier attempt of the same call came to: if its deletion may have
    /// been carried out, nothing else is deleted.
    pub(crate) async fn force_release_on(
        &self,
        link: &Link,
        name: &LockName,
        begun: &Mutex<Option<Begun>>,
    ) -> Result<Option<Holder>, Failure> {
        loop {
            let head = self.head_of(link, name).await?;
            // What comes after it in the queue is its head only if it is gone.
            let gone = begun.lock().unwrap_or_else(PoisonError::into_inner).take_if(|begun| {
                let still = |head: &KeyValue| head.key() == begun.key && head.create_revision() == begun.created;
                !head.as_ref().is_some_and(still)
            });
            if let Some(gone) = gone {
                return Ok(Some(gone.holder));
            }
            let Some(head) = head else {
                return Ok(None);
            };
            let holder = self.shown(link, &head).await?;
            *begun.lock().unwrap_or_else(PoisonError::into_inner) = Some(Begun {
                key: head.key().to_vec(),
                created: head.create_revision(),
                holder: holder.clone(),
            });
            let still = Compare::create_revision(head.key(), CompareOp::Equal, head.create_revision());
            let owner = holder.owner;
            let reservation = owner
                .map(|owner| text(head.key()).map(|key| keys::reservation(key, owner)))
                .transpose()?;
            let keys = [
                head.key().to_vec(),
                self.settings().keys.unforced(head.lease()).into_bytes(),
            ];
            let keys = keys.into_iter().chain(reservation.map(String::into_bytes));
            let deletes: Vec<_> = keys.map(|key| TxnOp::delete(key, None)).collect();
            let answer = link.txn(Txn::new().when([still]).and_then(deletes)).await?;
            if answer.succeeded() {
                let reserved = match answer.op_responses().last() {
                    Some(TxnOpResponse::Delete(done)) => done.deleted() > 0 || is_reserved(&head),
                    _ => false,
                };
                if let Some(owner) = owner.filter(|_| reserved)
                    && let Err(failure) = self.revoke_all(link, reservation_ids(owner)).await
                {
                    tracing::debug!(target: "fencelock", ?failure, "leases that keep nothing end by themselves");
                }
                return Ok(Some(holder));
            }
            // It went by itself before.
            begun.lock().unwrap_or_else(PoisonError::into_inner).take();
        }
    }

    pub(crate) async fn holder_on(&self, link: &Link, name: &LockName) -> Result<Option<Holder>, Failure> {
        match self.head_of(link, name).await? {
            Some(head) => self.shown(link, &head).await.map(Some),
            None => Ok(None),
        }
    }

    /// The first key under the name: the holder's, or that of a reservation.
    pub(crate) async fn head_of(&self, link: &Link, name: &LockName) -> Result<Option<KeyValue>, Failure> {
        let queue = self.settings().keys.queue(name);
        let answer = link.txn(Txn::new().and_then([head(&queue)])).await?;
        Ok(front(&kvs(&answer, 0)?).cloned())
    }

    /// A holder, and how long it has left.
    async fn shown(&self, link: &Link, head: &KeyValue) -> Result<Holder, Failure> {
        let mut holder = self.holder_of(head);
        holder.remaining = self.remaining(link, head.lease()).await?;
        Ok(holder)
    }

    /// Everything that is held under names that start with `prefix`: as many requests as there are pages and hundreds of leases, each
    /// within the time that one operation may take.
    pub(crate) async fn list(&self, prefix: &str) -> Result<Vec<Holder>, LockError> {
        const LISTING: &str = "listing locks";
        let keys = &self.settings().keys;
        let mut heads: BTreeMap<LockName, KeyValue> = BTreeMap::new();
        let first = keys.locks(prefix).into_bytes();
        let end = after(&first);
        let mut next = Some(first);
        while let Some(from) = next {
            let (from, end) = (&from, &end);
            let reading = |link: Arc<Link>| async move {
                let options = GetOptions::new().with_range(end.clone()).with_limit(PAGE);
                link.get(from.clone(), options).await
            };
            let page = self.on_link(LISTING, reading).await?;
            for kv in page.kvs() {
                let Some(name) = keys.read(kv.key()).filter(|name| name.as_str().starts_with(prefix)) else {
                    continue;
                };
                match heads.entry(name) {
                    Entry::Vacant(first) => {
                        first.insert(kv.clone());
                    }
                    Entry::Occupied(mut seen) if place(kv) < place(seen.get()) => {
                        seen.insert(kv.clone());
                    }
                    Entry::Occupied(_) => {}
                }
            }
            let last = page.kvs().last().filter(|_| page.more());
            next = last.map(|last| [last.key(), &[0]].concat());
        }
        let leases: BTreeSet<i64> = heads.values().map(KeyValue::lease).collect();
        let leases: Vec<i64> = leases.into_iter().collect();
        let mut remaining = HashMap::with_capacity(leases.len());
        for some in leases.chunks(LEASES) {
            let asking = |link: Arc<Link>| async move {
                let link = &link;
                let asked = some.iter().copied();
                let asked =
                    asked.map(|lease| async move { Ok::<_, Failure>((lease, self.remaining(link, lease).await?)) });
                stream::iter(asked)
                    .buffer_unordered(AT_ONCE)
                    .try_collect::<Vec<_>>()
                    .await
            };
            remaining.extend(self.on_link(LISTING, asking).await?);
        }
        let holders = heads.values().map(|kv| {
            let mut holder = self.holder_of(kv);
            holder.remaining = remaining.get(&kv.lease()).copied().flatten();
            holder
        });
        Ok(holders.collect())
    }

    /// What of the cluster's set-up makes locks last longer than they should, or may refuse them later.
    pub(crate) async fn warnings_on(&self, link: &Link) -> Result<Vec<String>, Failure> {
        let mut warnings = Vec::new();
        let least = link
            .grant_lease(i64::try_from(MIN_TTL.as_secs()).unwrap_or(1), None)
            .await?;
        link.revoke(least.id()).await?;
        if let Some(least) = u64::try_from(least.ttl())
            .ok()
            .filter(|least| *least > MIN_TTL.as_secs())
        {
            warnings.push(format!(
                "this etcd keeps no lease for less than {least} s, which is one and a half times its election-timeout: a lock with a \
                 shorter ttl is free {least} s after its holder has died; lower election-timeout if that is too long"
            ));
        }
        // Some versions tell it to root only.
        let members = link.client().cluster_client().member_list().await;
        let members = members.map_or(0, |members| members.members().len());
        if members > 1 {
            // A lease is kept for one and a half of it at least, in whole seconds.
            let election = least.ttl() as f64 / 1.5;
            warnings.push(format!(
                "this etcd has {members} members: at each change of its leader, the lock of a dead holder stays taken for one more ttl, from the \
                 election on; an election takes one to two times the election-timeout, which is {election:.1} s here at most"
            ));
        }
        warnings.extend(self.unusable_hosts(link).await?);
        Ok(warnings)
    }

    /// Only one of the endpoints is used at a time, and the others when that one fails: what is wrong with each of them, in their order.
    async fn unusable_hosts(&self, link: &Link) -> Result<Vec<String>, Failure> {
        // The rest of the time is for the other warnings.
        let limit = self.settings().op_timeout / 2;
        let mut looks = JoinSet::new();
        for (at, host) in self.settings().hosts.iter().cloned().enumerate() {
            let (settings, patience) = (self.settings().clone(), self.patience().clone());
            let runtime = link.runtime().clone();
            let look = async move {
                let opening = Link::open(&settings, &host, patience, runtime);
                let why = match timeout(limit, opening).await {
                    Ok(Ok(_)) => return None,
                    Ok(Err(failure)) => failure.explain("connecting"),
                    Err(_) => LockError::no_answer("connecting", limit),
                };
                Some((at, format!("etcd at {host} cannot be used: {why}")))
            };
            looks.spawn_on(look, link.runtime());
        }
        let mut found = BTreeMap::new();
        while let Some(look) = looks.join_next().await {
            let Ok(look) = look else {
                // The runtime has ended, and the connection with it.
                link.close();
                return Err(Failure::Broken);
            };
            found.extend(look);
        }
        Ok(found.into_values().collect())
    }

    /// How long a lease is kept unless it is renewed; in whole seconds, as etcd tells it.
    async fn remaining(&self, link: &Link, lease: i64) -> Result<Option<Duration>, Failure> {
        let asked = link.time_to_live(lease).await;
        match asked {
            Ok(answer) => Ok(u64::try_from(answer.ttl()).ok().map(Duration::from_secs)),
            Err(Failure::LeaseGone) => Ok(None),
            Err(failure) => Err(failure),
        }
    }

    pub(crate) fn holder_of(&self, kv: &KeyValue) -> Holder {
        let mut holder = record::holder(kv.value(), kv.create_revision());
        holder.name = self.settings().keys.read(kv.key());
        holder.is_reserved = is_reserved(kv);
        holder
    }
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
