//! Names that stay taken for a time, whatever becomes of their holder.
//!
//! **Invariant.** A reservation puts the key of the claim anew, on a lease of its own. That leaves its create revision as it is, so it stays
//! before all claims that came after it. No keepalive of the hold touches that lease. A renewal puts the key back on the lease of the claim
//! when that keeps it for longer.
//!
//! Every such put compares the owner of the key, and that the claim was not released, so a late request changes nothing.

use std::time::Duration;

use etcd_client::{KeyValue, PutOptions, Txn, TxnOp};
use lock_core::{Claim, Renewal, Stamp};

use crate::client::Client;
use crate::connection::Connection;
use crate::error::{Failure, unavailable};
use crate::lease::EtcdLease;
use crate::leases::{reservation_ids, seconds, ttl, whole};
use crate::record::{self, State};

impl Client {
    /// Reserves the name of a claim that holds it.
    pub(crate) async fn reserve_on(
        &self,
        connection: &Connection,
        claim: &Claim,
        length: Duration,
    ) -> Result<Renewal, Failure> {
        let known = self.registry().known(claim);
        let Some((key, base)) = known.and_then(|known| Some((known.key, known.base?))) else {
            return Ok(Renewal::NotHeld);
        };
        let [lease, _] = reservation_ids(claim.owner());
        // The claim is believed in for a ttl, or until it is renewed.
        self.reservation_lease(connection, claim, lease, length.max(claim.ttl()))
            .await?;
        let on_lease = PutOptions::new().with_lease(lease);
        let put = TxnOp::put(&*key, record::value(claim, base, State::Held), Some(on_lease));
        let txn = Txn::new()
            .when(record::is_claim_of(&key, claim.owner()))
            .and_then([put]);
        if connection.txn(txn).await?.succeeded() {
            return Ok(Renewal::Renewed);
        }
        self.revoke(connection, lease).await?;
        Ok(Renewal::NotHeld)
    }

    /// The operation of a release that leaves the name reserved until `until` at least.
    ///
    /// The first lease of the reservation counts from before the answer to [`reserve_on`](Self::reserve_on), and `until` from after it. So
    /// the rest gets a lease that is granted now.
    pub(crate) async fn put_reserved(
        &self,
        connection: &Connection,
        claim: &Claim,
        key: &str,
        base: u64,
        until: Stamp,
    ) -> Result<TxnOp, Failure> {
        let [_, lease] = reservation_ids(claim.owner());
        let rest = until.since(self.clock().now());
        self.reservation_lease(connection, claim, lease, rest).await?;
        let on_lease = PutOptions::new().with_lease(lease);
        Ok(TxnOp::put(
            key,
            record::value(claim, base, State::Reserved),
            Some(on_lease),
        ))
    }

    /// Grants a lease that lasts that long from now on at least.
    async fn reservation_lease(
        &self,
        connection: &Connection,
        claim: &Claim,
        id: i64,
        length: Duration,
    ) -> Result<(), Failure> {
        let wanted = whole(seconds(length).max(1));
        match connection.grant_lease(wanted, Some(id)).await {
            Ok(_) => return Ok(()),
            Err(failure) if failure.is_lease_there() => {}
            Err(failure) => return Err(failure),
        }
        // By an earlier attempt, whose answer was lost: it counts anew from here.
        let lease = EtcdLease::for_claim(id, claim, self.clock().now());
        self.keep_alive(connection, &lease).await?;
        if connection.time_to_live(id).await?.granted_ttl() < wanted {
            let why = "the claim has a shorter reservation, which cannot be lengthened";
            return Err(Failure::Known(unavailable("reservation", why)));
        }
        Ok(())
    }

    /// Sees to it that the first key under the name, which is that of the claim, lasts for a ttl from the renewal on, which has just kept the
    /// claim's `own` lease. False if the key is gone.
    ///
    /// **Invariant.** The reservation is not shortened: the key moves only if less than a ttl was left of the reservation, to a lease that was
    /// kept for a full ttl after that was read.
    pub(crate) async fn keep_reserved(
        &self,
        connection: &Connection,
        claim: &Claim,
        own: &EtcdLease,
        head: &KeyValue,
    ) -> Result<bool, Failure> {
        if head.lease() == own.id() {
            return Ok(true);
        }
        let left = match connection.time_to_live(head.lease()).await {
            Ok(left) => ttl(left.ttl().max(0))?,
            Err(Failure::LeaseGone) => return Ok(false),
            Err(failure) => return Err(failure),
        };
        // etcd tells whole seconds, rounded down.
        if left >= claim.ttl() {
            return Ok(true);
        }
        match self.keep_alive(connection, own).await {
            Ok(()) => {}
            Err(Failure::LeaseGone) => return Ok(false),
            Err(failure) => return Err(failure),
        }
        let on_lease = PutOptions::new().with_lease(own.id());
        let put = TxnOp::put(head.key(), head.value(), Some(on_lease));
        let key = String::from_utf8_lossy(head.key());
        let txn = Txn::new()
            .when(record::is_claim_of(&key, claim.owner()))
            .and_then([put]);
        Ok(connection.txn(txn).await?.succeeded())
    }
}
