//! Who holds what, for people to see, and to end.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use etcd_client::{GetOptions, KeyValue, Txn};
use lock_core::{Holder, LockName};

use crate::MIN_TTL;
use crate::failure::Failure;
use crate::link::Link;
use crate::record;
use crate::requests::{PAGE, head, kvs, text};
use crate::session::Session;

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
            if self.remove(link, text(head.key())?, head.create_revision()).await? {
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

    /// The oldest key under the name.
    pub(crate) async fn head_of(&self, link: &Link, name: &LockName) -> Result<Option<KeyValue>, Failure> {
        let queue = self.settings().keys.queue(name);
        let answer = link.txn(Txn::new().and_then([head(&queue, 1)])).await?;
        Ok(kvs(&answer, 0)?.into_iter().next())
    }

    /// A holder, and how long it has left.
    async fn shown(&self, link: &Link, head: &KeyValue) -> Result<Holder, Failure> {
        let mut holder = self.holder_of(head);
        holder.remaining = self.remaining(link, head.lease()).await?;
        Ok(holder)
    }

    /// Everything that is held under names that start with `prefix`.
    pub(crate) async fn list_on(&self, link: &Link, prefix: &str) -> Result<Vec<Holder>, Failure> {
        let keys = &self.settings().keys;
        let mut heads: BTreeMap<LockName, KeyValue> = BTreeMap::new();
        let mut from = keys.locks(prefix).into_bytes();
        let end = after(&from);
        loop {
            let options = GetOptions::new().with_range(end.clone()).with_limit(PAGE);
            let answer = link.get(from.clone(), options).await?;
            for kv in answer.kvs() {
                let Some(name) = keys.read(kv.key()).filter(|name| name.as_str().starts_with(prefix)) else {
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
        // Only one of them is used at a time, and the others when that one fails.
        for host in &self.settings().hosts {
            let opening = Link::open(self.settings(), host, self.patience().clone(), link.runtime().clone());
            if let Err(failure) = opening.await {
                warnings.push(format!(
                    "etcd at {host} cannot be used: {}",
                    failure.explain("connecting")
                ));
            }
        }
        Ok(warnings)
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
