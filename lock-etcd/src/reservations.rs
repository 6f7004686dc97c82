//! Names that stay taken for a time, whatever becomes of their holder.
//!
//! **Invariant.** The key of a reservation is put in the transaction that puts the key of its claim, so both have the same create revision,
//! and it is never put anew: later puts compare that revision. It is therefore older than the key of every claim that the name is not to be
//! granted to, and keeps the name from them as the claim's own key does. At first it is on the lease of the claim, and ends with
//! it. A reservation that is made puts it on a lease of its own, which no keepalive of the hold touches.
//!
//! Only a claim whose key is there can reserve, so a late request of a claim that was released changes nothing.

use std::sync::Arc;
use std::time::Duration;

use etcd_client::{Compare, CompareOp, LeaseGrantOptions, PutOptions, Txn, TxnOp};
use lock_core::{Claim, Released, Renewal, Stamp};

use crate::failure::{Failure, unavailable};
use crate::keys;
use crate::leases::{Kept, already_exists, reservation_ids, seconds, ttl, whole};
use crate::link::Link;
use crate::queue::{is_of, is_reserved, kvs, text};
use crate::record;
use crate::requests::After;
use crate::session::Session;

/// The key by which a claim holds its name.
pub(crate) struct Holding {
    pub(crate) key: Arc<str>,
    pub(crate) created: i64,
    /// What its token counts from, if it is known.
    pub(crate) base: Option<u64>,
}

/// What is known of the reservation of a claim.
#[derive(Default)]
pub(crate) struct Reserved {
    /// Until when it lasts at least, once it was made.
    pub(crate) until: Option<Stamp>,
    /// Its leases that may be on the server.
    pub(crate) leases: Vec<i64>,
}

impl Reserved {
    /// A request that grants this lease is about to be sent.
    pub(crate) fn is_granted(&mut self, lease: i64) {
        if !self.leases.contains(&lease) {
            self.leases.push(lease);
        }
    }
}

impl Session {
    /// Reserves the name of a claim that holds it.
    pub(crate) async fn reserve_on(&self, link: &Link, claim: &Claim, length: Duration) -> Result<Renewal, Failure> {
        let Some(holding) = self.holding_of(link, claim).await? else {
            return Ok(Renewal::NotHeld);
        };
        let [lease, _] = reservation_ids(claim.owner());
        match self
            .put_reservation(link, claim, &holding, (lease, length), None)
            .await?
        {
            true => Ok(Renewal::Renewed),
            false => Ok(Renewal::NotHeld),
        }
    }

    /// Lets go of a claim, and leaves its name reserved until `until` at least.
    ///
    /// The reservation counts from before the answer to [`reserve_on`](Self::reserve_on), and `until` from after it. Unless rounding has
    /// made up for that, the rest gets a lease that is granted now. The other lease keeps nothing any more, and ends by itself.
    pub(crate) async fn release_reserved_on(
        &self,
        link: &Link,
        claim: &Claim,
        until: Stamp,
    ) -> Result<Released, Failure> {
        let kept = self.table().reservation(claim, |reserved| reserved.until).flatten();
        let is_too_short = kept.is_none_or(|kept| kept < until);
        if is_too_short && let Some(holding) = self.holding_of(link, claim).await? {
            let [_, lease] = reservation_ids(claim.owner());
            let rest = until.since(self.clock().now());
            // With the key of the claim, unless a release has to see to more than that.
            let last = self.table().is_sure(claim).then(|| TxnOp::delete(&*holding.key, None));
            let releases = last.is_some();
            let put = self.put_reservation(link, claim, &holding, (lease, rest), last).await?;
            if put && releases {
                let after = After::Reserved(until);
                self.over(link, claim, Some(&holding.key), after).await?;
                return Ok(Released::Released);
            }
        }
        self.release_on(link, claim, After::Reserved(until)).await
    }

    /// Puts the reservation of a claim that holds its name on a lease of that length, and does `more`. False if the claim does not hold
    /// it, and nothing is changed.
    async fn put_reservation(
        &self,
        link: &Link,
        claim: &Claim,
        holding: &Holding,
        (lease, length): (i64, Duration),
        more: Option<TxnOp>,
    ) -> Result<bool, Failure> {
        // From here on the lease can be there, and the release of the claim revokes it.
        self.table().reservation(claim, |reserved| reserved.is_granted(lease));
        let until = self.reservation_lease(link, claim, lease, length).await?;
        let key = keys::reservation(&holding.key, claim.owner());
        let as_created = |key: &str| Compare::create_revision(key, CompareOp::Equal, holding.created);
        let value = record::value(claim, holding.base, true);
        let put = TxnOp::put(&*key, value, Some(PutOptions::new().with_lease(lease)));
        let txn = Txn::new()
            .when([as_created(&holding.key), as_created(&key)])
            .and_then([put].into_iter().chain(more).collect::<Vec<_>>())
            .or_else([TxnOp::get(&*key, None)]);
        let answer = link.txn(txn).await?;
        if answer.succeeded() {
            self.table().reservation(claim, |reserved| reserved.until = Some(until));
            return Ok(true);
        }
        // An earlier attempt, whose answer was lost, may have put it there.
        if !kvs(&answer, 0)?.iter().any(|found| found.lease() == lease) {
            self.revoke_all(link, [lease]).await?;
        }
        Ok(false)
    }

    /// Grants a lease of that length at least, and returns until when it lasts at least.
    async fn reservation_lease(&self, link: &Link, claim: &Claim, id: i64, length: Duration) -> Result<Stamp, Failure> {
        let (sent, wanted) = (self.clock().now(), seconds(length).max(1));
        let options = LeaseGrantOptions::new().with_id(id);
        match link.grant_lease(whole(wanted), Some(options)).await {
            Ok(granted) => Ok(sent + ttl(granted.ttl())?),
            // By an earlier attempt, whose answer was lost: it counts anew from here.
            Err(failure) if already_exists(&failure) => {
                let kept = Kept::new(id, length, sent, Ok(claim.clone()), 0);
                self.keep_alive(link, &kept).await?;
                let granted = link.time_to_live(id).await?.granted_ttl();
                if granted < whole(wanted) {
                    let why = "the claim has a shorter reservation, which cannot be lengthened";
                    return Err(Failure::Known(unavailable("reservation", why)));
                }
                Ok(sent + ttl(granted)?)
            }
            Err(failure) => Err(failure),
        }
    }

    /// The key by which the claim holds its name, as far as that can be known before a transaction that compares it.
    async fn holding_of(&self, link: &Link, claim: &Claim) -> Result<Option<Holding>, Failure> {
        if let Some(holding) = self.table().holding_of(claim) {
            return Ok(Some(holding));
        }
        // It may have been granted to another client.
        let head = self.head_of(link, claim.name()).await?;
        let head = head.filter(|head| is_of(head, claim) && !is_reserved(head));
        head.map(|head| {
            Ok(Holding {
                key: text(head.key())?.into(),
                created: head.create_revision(),
                base: record::base(head.value()),
            })
        })
        .transpose()
    }
}
