//! Who holds what, for people to see, and to end.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use etcd_client::{Compare, CompareOp, GetOptions, KeyValue, Txn, TxnOp};
use futures_util::stream::{self, StreamExt as _, TryStreamExt as _};
use lock_core::{Holder, LockError, LockName};

use crate::client::Client;
use crate::connection::Connection;
use crate::error::Failure;
use crate::leases::{own_id, reservation_ids, ttl, whole};
use crate::lock::MIN_TTL;
use crate::queue::PAGE;
use crate::record;

/// How many leases are asked about within the time that one operation may take, and how many at once.
const LEASES: usize = 500;
const AT_ONCE: usize = 64;

/// The key that a forced release is about to delete.
pub(crate) struct Begun {
    key: Vec<u8>,
    created: i64,
    holder: Holder,
}

impl Client {
    /// Ends the hold of the name's holder. `begun` is what an earlier attempt of the same call came to: if its deletion may have
    /// been carried out, nothing else is deleted.
    pub(crate) async fn force_release_on(
        &self,
        connection: &Connection,
        name: &LockName,
        begun: &Mutex<Option<Begun>>,
    ) -> Result<Option<Holder>, Failure> {
        let lock = || begun.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let head = self.head_of(connection, name).await?;
            // What comes after it in the queue is its head only if it is gone.
            let gone = lock().take_if(|begun| {
                let still = |head: &KeyValue| head.key() == begun.key && head.create_revision() == begun.created;
                !head.as_ref().is_some_and(still)
            });
            if let Some(gone) = gone {
                return Ok(Some(gone.holder));
            }
            let Some(head) = head else {
                return Ok(None);
            };
            let holder = self.shown(connection, &head).await?;
            *lock() = Some(Begun {
                key: head.key().to_vec(),
                created: head.create_revision(),
                holder: holder.clone(),
            });
            let still = Compare::create_revision(head.key(), CompareOp::Equal, head.create_revision());
            let txn = Txn::new().when([still]).and_then([TxnOp::delete(head.key(), None)]);
            if connection.txn(txn).await?.succeeded() {
                self.revoke_own_of(connection, &head).await;
                return Ok(Some(holder));
            }
            // It went by itself before.
            lock().take();
        }
    }

    /// Ends the leases that only the claim of that key had.
    async fn revoke_own_of(&self, connection: &Connection, head: &KeyValue) {
        let Some(owner) = record::owner(head.value()) else {
            return;
        };
        let [first, rest] = reservation_ids(owner);
        let own = [own_id(owner), first, rest];
        if !own.contains(&head.lease()) {
            return;
        }
        for id in own {
            if let Err(failure) = self.revoke(connection, id).await {
                tracing::debug!(target: "fencelock", ?failure, "a lease that keeps nothing ends by itself");
            }
        }
    }

    pub(crate) async fn holder_on(&self, connection: &Connection, name: &LockName) -> Result<Option<Holder>, Failure> {
        match self.head_of(connection, name).await? {
            Some(head) => self.shown(connection, &head).await.map(Some),
            None => Ok(None),
        }
    }

    /// A holder, and how long it has left.
    async fn shown(&self, connection: &Connection, head: &KeyValue) -> Result<Holder, Failure> {
        let mut holder = self.holder_of(head);
        holder.remaining = self.remaining(connection, head.lease()).await?;
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
            let reading = self.call(LISTING, |connection, _| async move {
                let options = GetOptions::new().with_range(end.clone()).with_limit(PAGE);
                connection.get(from.clone(), options).await
            });
            let page = reading.await?;
            for kv in page.kvs() {
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
            let last = page.kvs().last().filter(|_| page.more());
            next = last.map(|last| [last.key(), &[0]].concat());
        }
        let leases: BTreeSet<i64> = heads.values().map(KeyValue::lease).collect();
        let leases: Vec<i64> = leases.into_iter().collect();
        let mut remaining = HashMap::with_capacity(leases.len());
        for some in leases.chunks(LEASES) {
            let asking = self.call(LISTING, |connection, _| async move {
                let connection = &connection;
                let asked = some
                    .iter()
                    .copied()
                    .map(|lease| async move { Ok::<_, Failure>((lease, self.remaining(connection, lease).await?)) });
                let asked = stream::iter(asked).buffer_unordered(AT_ONCE);
                asked.try_collect::<Vec<_>>().await
            });
            remaining.extend(asking.await?);
        }
        let holders = heads.values().map(|kv| {
            let mut holder = self.holder_of(kv);
            holder.remaining = remaining.get(&kv.lease()).copied().flatten();
            holder
        });
        Ok(holders.collect())
    }

    /// The settings of the cluster that make locks last longer than they should.
    pub(crate) async fn warnings_on(&self, connection: &Connection) -> Result<Vec<String>, Failure> {
        let mut warnings = Vec::new();
        let wanted = MIN_TTL.as_secs();
        let least = connection.grant_lease(whole(wanted), None).await?;
        connection.revoke(least.id()).await?;
        let least = ttl(least.ttl())?;
        let seconds = least.as_secs();
        if seconds > wanted {
            warnings.push(format!(
                "this etcd keeps no lease for less than {seconds} s, which is one and a half times its election-timeout: a lock with a \
                 shorter ttl is free {seconds} s after its holder has died; lower election-timeout if that is too long"
            ));
        }
        // Some versions tell it to root only.
        let members = connection.client().cluster_client().member_list().await;
        let members = members.map_or(0, |members| members.members().len());
        if members > 1 {
            // A lease is kept for one and a half of it at least, in whole seconds.
            let election = least.as_secs_f64() / 1.5;
            warnings.push(format!(
                "this etcd has {members} members: at each change of its leader, the lock of a dead holder stays taken for one more ttl, from the \
                 election on; an election takes one to two times the election-timeout, which is {election:.1} s here at most"
            ));
        }
        Ok(warnings)
    }

    /// How long a lease is kept unless it is renewed; in whole seconds, as etcd tells it.
    async fn remaining(&self, connection: &Connection, lease: i64) -> Result<Option<Duration>, Failure> {
        let asked = connection.time_to_live(lease).await;
        match asked {
            Ok(answer) => Ok(u64::try_from(answer.ttl()).ok().map(Duration::from_secs)),
            Err(Failure::LeaseGone) => Ok(None),
            Err(failure) => Err(failure),
        }
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
