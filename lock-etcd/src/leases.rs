//! How leases are granted, kept and checked.

use std::sync::Arc;
use std::time::Duration;

use etcd_client::{GetOptions, PutOptions, Txn, TxnOp, TxnOpResponse};
use lock_core::{Claim, Lease, LeaseId, LossReason, OwnerId, Renewal};

use crate::client::{Client, revision};
use crate::connection::Connection;
use crate::error::Failure;
use crate::lease::{EtcdLease, Stream};
use crate::queue::{is_of, is_reserved};

/// How many keys are looked up in one transaction; etcd takes 128 operations by default.
const BATCH: usize = 100;

impl Client {
    /// A lease for the claim that has at least two thirds of its ttl left.
    pub(crate) async fn lease_for(&self, connection: &Connection, claim: &Claim) -> Result<Arc<EtcdLease>, Failure> {
        loop {
            let lease = self.some_lease_for(connection, claim).await?;
            match self.keep_alive_if_due(connection, &lease).await {
                Ok(_) => return Ok(lease),
                Err(Failure::LeaseGone) => {}
                Err(failure) => return Err(failure),
            }
        }
    }

    async fn some_lease_for(&self, connection: &Connection, claim: &Claim) -> Result<Arc<EtcdLease>, Failure> {
        let valid = |lease: &Arc<EtcdLease>| lease.is_valid(self.clock().now());
        if let Some(lease) = self.registry().lease_of(claim).filter(valid) {
            return Ok(lease);
        }
        let seconds = seconds(claim.ttl());
        if has_own_lease(claim) {
            self.still_open()?;
            if let Some(lease) = self.registry().lease(own_id(claim.owner())).filter(valid) {
                return Ok(lease);
            }
            return self.own_lease(connection, claim, seconds).await;
        }
        if let Some(lease) = self.registry().shared(seconds, self.clock().now()) {
            return Ok(lease);
        }
        // All that come meanwhile share it.
        let _granting = self.granting().lock().await;
        self.still_open()?;
        if let Some(lease) = self.registry().shared(seconds, self.clock().now()) {
            return Ok(lease);
        }
        self.shared_lease(connection, seconds).await
    }

    async fn shared_lease(&self, connection: &Connection, seconds: u64) -> Result<Arc<EtcdLease>, Failure> {
        let sent = self.clock().now();
        let granted = connection.grant_lease(whole(seconds), None).await?;
        let (id, ttl) = (granted.id(), ttl(granted.ttl())?);
        let key = self.settings().keys.lease(id);
        let put = TxnOp::put(&*key, "", Some(PutOptions::new().with_lease(id)));
        let answer = connection.txn(Txn::new().and_then([put])).await?;
        let lease = EtcdLease::shared(id, ttl, sent, key, revision(answer.header()));
        self.registry().sweep(self.clock().now());
        self.registry().add(&lease, Some(seconds));
        Ok(lease)
    }

    /// The lease of one claim is named after its owner, so every release of the claim can revoke it, whether it is known that it
    /// was granted or not.
    async fn own_lease(&self, connection: &Connection, claim: &Claim, seconds: u64) -> Result<Arc<EtcdLease>, Failure> {
        let id = own_id(claim.owner());
        let lease = EtcdLease::for_claim(id, claim, self.clock().now());
        match connection.grant_lease(whole(seconds), Some(id)).await {
            Ok(_) => {}
            // By a request whose answer was not heard: it counts from the keepalive.
            Err(failure) if failure.is_lease_there() => self.keep_alive(connection, &lease).await?,
            Err(failure) => return Err(failure),
        }
        self.registry().sweep(self.clock().now());
        self.registry().add(&lease, None);
        Ok(lease)
    }

    /// The server knows it no more.
    pub(crate) fn lease_is_gone(&self, lease: &EtcdLease) {
        lease.ended();
        self.registry().forget_lease(lease.id());
    }

    /// Keeps a lease for another full ttl.
    pub(crate) async fn keep_alive(&self, connection: &Connection, lease: &EtcdLease) -> Result<(), Failure> {
        let mut stream = lease.stream().lock().await;
        self.keep_alive_over(connection, lease, &mut stream).await
    }

    /// The same, if a third of its ttl is over. Says whether it was.
    pub(crate) async fn keep_alive_if_due(&self, connection: &Connection, lease: &EtcdLease) -> Result<bool, Failure> {
        let is_due = || !lease.is_valid(self.clock().now()) || lease.due() <= self.clock().now();
        if !is_due() {
            return Ok(false);
        }
        let mut stream = lease.stream().lock().await;
        // Another request may have done it meanwhile.
        match is_due() {
            true => self
                .keep_alive_over(connection, lease, &mut stream)
                .await
                .map(|()| true),
            false => Ok(false),
        }
    }

    async fn keep_alive_over(
        &self,
        connection: &Connection,
        lease: &EtcdLease,
        stream: &mut Option<Stream>,
    ) -> Result<(), Failure> {
        let sent = self.clock().now();
        let keeping = lease.keep_alive(connection.client(), connection.serial(), stream.take());
        let answered = match lease.is_valid(sent) {
            true => match connection.call(keeping).await {
                Err(Failure::LeaseGone) => None,
                answered => answered?,
            },
            // No answer would bring it back.
            false => None,
        };
        let now = self.clock().now();
        if answered.is_none() || !lease.kept(sent, now) {
            self.lease_is_gone(lease);
            return Err(Failure::LeaseGone);
        }
        *stream = answered;
        self.registry().sweep(now);
        Ok(())
    }

    pub(crate) async fn renew_on(
        self: &Arc<Self>,
        connection: &Arc<Connection>,
        lease: &Lease,
    ) -> Result<Renewal, Failure> {
        let kept = match lease.id() {
            // It is named after its owner, so every client that has the claim can keep it.
            LeaseId::Claim(claim) => {
                let id = own_id(claim.owner());
                let known = self.registry().lease(id);
                known.unwrap_or_else(|| EtcdLease::for_claim(id, claim, self.clock().now()))
            }
            LeaseId::Shared(id) => {
                let id = id.split('/').next().and_then(|id| i64::from_str_radix(id, 16).ok());
                // One that is not known is not ours, or has ended.
                let Some(kept) = id.and_then(|id| self.registry().lease(id)) else {
                    return Ok(Renewal::NotHeld);
                };
                kept
            }
            _ => return Ok(Renewal::NotHeld),
        };
        match self.keep_alive(connection, &kept).await {
            Ok(()) => {}
            Err(Failure::LeaseGone) => return Ok(Renewal::NotHeld),
            Err(failure) => return Err(failure),
        }
        if let Some(claim) = lease.claim() {
            // Its key can have been deleted while its lease lives on.
            let head = self.head_of(connection, claim.name()).await?;
            let head = head.filter(|head| is_of(head, claim) && !is_reserved(head));
            let is_held = match head {
                Some(head) => self.keep_reserved(connection, claim, &kept, &head).await?,
                None => false,
            };
            if !is_held {
                kept.ended();
                return Ok(Renewal::NotHeld);
            }
        }
        self.check(connection, &kept);
        Ok(Renewal::Renewed)
    }

    /// Checks in the background what a lease keeps: holders whose keys are gone learn of it, and claims that should have gone are released
    /// once more. For whenever the lease was kept for another ttl.
    pub(crate) fn check(self: &Arc<Self>, connection: &Arc<Connection>, lease: &Arc<EtcdLease>) {
        let Some(checking) = lease.begin_check() else { return };
        let (client, worked, lease) = (Arc::clone(self), Arc::clone(connection), Arc::clone(lease));
        connection.runtime().spawn(async move {
            let _checking = checking;
            let checked = client.check_held(&worked, &lease).await;
            let released = client.release_overdue(&worked, &lease).await;
            if let Err(failure) = checked.and(released) {
                tracing::debug!(target: "fencelock", ?failure, "what a lease keeps is checked again when it is kept again");
            }
        });
    }

    async fn check_held(&self, connection: &Connection, lease: &EtcdLease) -> Result<(), Failure> {
        for batch in self.registry().held(lease).chunks(BATCH) {
            let keys_only = || Some(GetOptions::new().with_keys_only());
            let gets: Vec<_> = batch.iter().map(|held| TxnOp::get(&*held.key, keys_only())).collect();
            let answer = connection.txn(Txn::new().and_then(gets)).await?;
            for (held, found) in batch.iter().zip(answer.op_responses()) {
                let TxnOpResponse::Get(found) = found else {
                    return Err(Failure::Nonsense);
                };
                let found = found.kvs().first();
                if found.is_none_or(|found| found.create_revision() != held.created) {
                    held.revoker.revoke(LossReason::NotHeld);
                }
            }
        }
        Ok(())
    }

    /// Releases what could not be released and would live as long as the lease. Returns the last failure, if there was one.
    async fn release_overdue(&self, connection: &Connection, lease: &EtcdLease) -> Result<(), Failure> {
        let before = self.clock().now() - self.settings().op_timeout;
        let mut outcome = Ok(());
        for (claim, after) in self.registry().overdue(lease, before) {
            // It may have been asked for again meanwhile.
            if self.registry().is_given_up(&claim)
                && let Err(failure) = self.release_on(connection, &claim, after).await
            {
                outcome = Err(failure);
            }
        }
        outcome
    }
}

/// Whether no other claim may share the claim's lease.
pub(crate) fn has_own_lease(claim: &Claim) -> bool {
    claim.own_lease() || claim.at_least().is_some()
}

/// The lease of a claim that shares none.
pub(crate) fn own_id(owner: OwnerId) -> i64 {
    let [a, b, c, d, e, f, g, h, ..] = *owner.as_bytes();
    // Not zero, by the version that is in it.
    i64::from_be_bytes([a, b, c, d, e, f, g, h]) & i64::MAX
}

/// The leases of the reservation of a claim: the one that it is made with, and the one for the rest of its time after the release.
///
/// They are named after the owner as well, so every release of the claim can revoke them.
pub(crate) fn reservation_ids(owner: OwnerId) -> [i64; 2] {
    let [.., a, b, c, d, e, f, g, h] = *owner.as_bytes();
    // Not zero.
    let id = i64::from_be_bytes([a, b, c, d, e, f, g, h]) & i64::MAX | 2;
    [id, id ^ 1]
}

/// etcd counts in seconds; never less than what was asked for.
pub(crate) fn seconds(ttl: Duration) -> u64 {
    ttl.as_secs() + u64::from(ttl.subsec_nanos() > 0)
}

pub(crate) fn whole(seconds: u64) -> i64 {
    i64::try_from(seconds).unwrap_or(i64::MAX)
}

pub(crate) fn ttl(seconds: i64) -> Result<Duration, Failure> {
    let seconds = u64::try_from(seconds).map_err(|_| Failure::Nonsense)?;
    Ok(Duration::from_secs(seconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ttls_are_rounded_up() {
        assert_eq!(seconds(Duration::from_secs(2)), 2);
        assert_eq!(seconds(Duration::from_millis(2001)), 3);
        assert_eq!(seconds(Duration::from_nanos(1)), 1);
    }

    #[test]
    fn leases_of_one_claim_have_numbers_that_etcd_takes() {
        for _ in 0..1000 {
            let owner = OwnerId::random();
            let [first, second] = reservation_ids(owner);
            assert!(own_id(owner) > 0 && first > 0 && second > 0 && first != second);
        }
    }
}
