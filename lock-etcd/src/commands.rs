//! What is asked of the server, and what it answers: one transaction each.

use std::sync::Arc;

use etcd_client::{Compare, CompareOp, GetOptions, KeyValue, PutOptions, Txn, TxnOp, TxnResponse};
use lock_core::{Attempt, Busy, Claim, Grant, Holder, LockName, Stamp};

use crate::client::{Client, revision};
use crate::connection::Connection;
use crate::error::Failure;
use crate::lease::EtcdLease;
use crate::queue::{head, is_of, is_reserved, kv, nested, oldest, text};
use crate::record::{self, State};
use crate::tokens::{self, Base};

/// What a request to put the key of a claim depends on.
pub(crate) struct Put<'a> {
    claim: &'a Claim,
    pub(crate) lease: Arc<EtcdLease>,
    base: Base,
    /// The revision at which the key of the shared lease was written last, as this client knew when the put was made. It may learn of a later one
    /// while the put is under way.
    mark: Option<i64>,
    pub(crate) key: Arc<str>,
    pub(crate) queue: String,
}

/// The key of a claim.
pub(crate) struct Place {
    pub(crate) key: Arc<str>,
    pub(crate) created: i64,
    pub(crate) base: u64,
    pub(crate) lease: Arc<EtcdLease>,
}

impl Put<'_> {
    /// The `first` compare, and that lease and base are as this client knows them.
    pub(crate) fn when(&self, client: &Client, first: Compare) -> Vec<Compare> {
        let base = Compare::mod_revision(client.settings().keys.base(), CompareOp::Equal, self.base.written);
        let mark = self.lease.mark_key().zip(self.mark);
        let mark = mark.map(|(key, written)| Compare::mod_revision(key, CompareOp::Equal, written));
        [first, base].into_iter().chain(mark).collect()
    }

    /// The operation that puts the key.
    pub(crate) fn put(&self, state: State) -> TxnOp {
        let lease = PutOptions::new().with_lease(self.lease.id());
        TxnOp::put(
            &*self.key,
            record::value(self.claim, self.base.value, state),
            Some(lease),
        )
    }

    /// Reads what the put depends on. [`Client::learn`] takes note of it.
    pub(crate) fn read(&self, client: &Client) -> [TxnOp; 2] {
        let mark = self.lease.mark_key().unwrap_or(&self.key);
        [
            TxnOp::get(client.settings().keys.base(), None),
            TxnOp::get(mark, Some(GetOptions::new().with_keys_only())),
        ]
    }

    /// The place of a claim whose key was created at that revision, by a transaction with these compares.
    pub(crate) fn place(&self, created: i64) -> Place {
        Place {
            key: Arc::clone(&self.key),
            created,
            base: self.base.value,
            lease: Arc::clone(&self.lease),
        }
    }
}

impl Client {
    pub(crate) async fn try_on(&self, connection: &Connection, claim: &Claim) -> Result<Attempt, Failure> {
        let asked = self.clock().now();
        loop {
            let (lease, base) = self.prepare(connection, claim).await?;
            let put = self.putting(claim, lease, base);
            let free = Compare::create_revision(&*put.queue, CompareOp::Equal, 0).with_prefix();
            let [base, mark] = put.read(self);
            let txn = Txn::new()
                .when(put.when(self, free))
                .and_then([put.put(State::Held)])
                .or_else([head(&put.queue), base, mark]);
            let Some(answer) = self.put(connection, &put, txn).await? else {
                continue;
            };
            if answer.succeeded() {
                let place = put.place(revision(answer.header()));
                return Ok(Attempt::Granted(self.grant(claim, &place, asked)?));
            }
            match kv(&answer, 0)? {
                Some(head) if head.key() == put.key.as_bytes() || is_of(&head, claim) && !is_reserved(&head) => {
                    if let Some(place) = self.stands(connection, &put, &head).await? {
                        // Asked for again: with a full ttl.
                        return Ok(Attempt::Granted(self.grant(claim, &place, self.clock().now())?));
                    }
                }
                Some(head) => {
                    let busy = self.busy(&head);
                    self.leave_nothing(connection, claim).await?;
                    return Ok(busy?.into());
                }
                None => {
                    self.learn(connection, &put, &answer, 1, revision(answer.header()))
                        .await?
                }
            }
        }
    }

    /// What a request to take a name depends on.
    pub(crate) async fn prepare(
        &self,
        connection: &Connection,
        claim: &Claim,
    ) -> Result<(Arc<EtcdLease>, Base), Failure> {
        let lease = self.lease_for(connection, claim).await?;
        Ok((lease, self.base(connection).await?))
    }

    /// From here on the request counts as sent, and as one that may be carried out at any time until its answer is here.
    pub(crate) fn putting<'a>(&self, claim: &'a Claim, lease: Arc<EtcdLease>, base: Base) -> Put<'a> {
        let queue = self.settings().keys.queue(claim.name());
        let key = self.registry().putting(claim, &queue, &lease);
        Put {
            claim,
            base,
            // After that: a release that does not find the put there has the key of the lease written once more.
            mark: lease.mark(),
            key,
            lease,
            queue,
        }
    }

    /// Sends a transaction that can put the claim's key; `None` if the lease had ended.
    pub(crate) async fn put(
        &self,
        connection: &Connection,
        put: &Put<'_>,
        txn: Txn,
    ) -> Result<Option<TxnResponse>, Failure> {
        match connection.txn(txn).await {
            Ok(answer) => {
                let is_put = answer.succeeded() || nested(&answer).is_some_and(|part| part.succeeded());
                self.registry().answered(put.claim, is_put);
                Ok(Some(answer))
            }
            Err(Failure::LeaseGone) => {
                self.registry().answered(put.claim, false);
                self.lease_is_gone(&put.lease);
                Ok(None)
            }
            Err(failure) => {
                // A server that is full may say so of what it has done.
                if failure.is_full() || failure.is_refusal() {
                    self.registry().answered(put.claim, failure.is_full());
                }
                Err(failure)
            }
        }
    }

    /// Takes note of what a put depends on, as the answer shows it from that place on at `revision`: it was written since this client saw it.
    pub(crate) async fn learn(
        &self,
        connection: &Connection,
        put: &Put<'_>,
        answer: &TxnResponse,
        at: usize,
        revision: i64,
    ) -> Result<(), Failure> {
        let base = kv(answer, at)?.as_ref().map(Base::read).transpose()?;
        self.learn_base(connection, put.base, base, revision).await;
        if let Some(known) = put.mark {
            match kv(answer, at + 1)? {
                Some(mark) if mark.mod_revision() >= known => put.lease.marked(mark.mod_revision()),
                // Gone, or of a state from before: what has been put since is not there any more.
                _ => self.lease_is_gone(&put.lease),
            }
        }
        Ok(())
    }

    /// The place of the claim by the key that was found, which is under the claim's own key or has its owner. If this client did not put it
    /// for the claim, on a lease that it can count on from now for a full ttl, it is deleted.
    pub(crate) async fn stands(
        &self,
        connection: &Connection,
        put: &Put<'_>,
        found: &KeyValue,
    ) -> Result<Option<Place>, Failure> {
        let is_own = found.key() == put.key.as_bytes() && is_of(found, put.claim) && !is_reserved(found);
        if is_own
            && found.lease() == put.lease.id()
            && let Some(base) = record::base(found.value())
        {
            match self.keep_alive(connection, &put.lease).await {
                Ok(()) => {
                    return Ok(Some(Place {
                        base,
                        ..put.place(found.create_revision())
                    }));
                }
                Err(Failure::LeaseGone) => {}
                Err(failure) => return Err(failure),
            }
        }
        self.remove(connection, text(found.key())?, found.create_revision())
            .await?;
        Ok(None)
    }

    /// The place of the claim makes the grant. `asked` is when the claim was asked for; when the claim waited, when it is granted.
    pub(crate) fn grant(&self, claim: &Claim, place: &Place, asked: Stamp) -> Result<Grant, Failure> {
        let token = tokens::token(place.base, place.created)?;
        self.saw(place.base, place.created);
        let lease = place.lease.lease(asked, self.clock().now());
        let first = tokens::first(token, claim.tokens_wanted());
        let grant = Grant::new(claim.clone(), token, lease).with_first_token(first);
        self.registry().granted(&grant, place.base, place.created);
        Ok(grant)
    }

    /// The holder that the first key of a queue tells of.
    pub(crate) fn busy(&self, head: &KeyValue) -> Result<Busy, Failure> {
        match record::owner(head.value()) {
            Some(_) => Ok(Busy::default().with_holder(self.holder_of(head))),
            None => Err(Failure::ForeignKey(String::from_utf8_lossy(head.key()).into_owned())),
        }
    }

    pub(crate) fn holder_of(&self, kv: &KeyValue) -> Holder {
        let mut holder = record::holder(kv.value(), kv.create_revision());
        holder.name = self.settings().keys.read(kv.key());
        holder
    }

    /// The first key under the name, which is that of the holder or of a reservation.
    pub(crate) async fn head_of(&self, connection: &Connection, name: &LockName) -> Result<Option<KeyValue>, Failure> {
        let queue = self.settings().keys.queue(name);
        let answer = connection.get(queue, oldest(1)).await?;
        Ok(answer.kvs().first().cloned())
    }
}
