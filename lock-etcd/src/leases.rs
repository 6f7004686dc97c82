//! Leases: one that claims of the same ttl share, or one of a claim's own.

use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex as StdMutex, MutexGuard, PoisonError};
use std::time::Duration;

use etcd_client::{Error, LeaseGrantOptions, LeaseKeepAliveStream, LeaseKeeper, PutOptions, Txn, TxnOp};
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use lock_core::{Claim, Lease, LeaseId, LossReason, OwnerId, Renewal, Stamp};
use tokio::sync::Mutex;
use tokio::time::sleep;

use crate::failure::{self, Failure};
use crate::link::Link;
use crate::queue::{is_of, is_reserved};
use crate::session::Session;
use crate::watches::{Seen, Watch};

/// A lease in etcd that this client may keep alive.
///
/// The core sees one [`Lease`] of it as long as the core itself renews it. What waiters and new claims do for it keeps it too,
/// but guards are told of no more than their own renewals: whoever cannot renew shall notice. So a claim that comes when the
/// last `Lease` has little left gets another one, of the same lease in etcd.
pub(crate) struct Kept {
    id: i64,
    ttl: Duration,
    /// Whose it is, unless it is shared.
    claim: Option<Claim>,
    /// The key that lives as long as it does, if it is shared.
    key: Option<String>,
    /// The revision at which that key was written last.
    written: AtomicI64,
    life: StdMutex<Life>,
    stream: Mutex<Option<Stream>>,
    watch: StdMutex<Option<Watch>>,
    looked_after: AtomicBool,
}

struct Life {
    /// When the last keepalive that was acknowledged was sent.
    sent: Stamp,
    ended: bool,
    leases: Vec<Lease>,
    /// Tells the leases of the core apart.
    made: u64,
}

/// **Invariant.** No keepalive is under way on a stream that is kept: the next answer is that to the next keepalive. A stream
/// whose answer was given up is dropped with it.
struct Stream {
    link: u64,
    keeper: LeaseKeeper,
    answers: LeaseKeepAliveStream,
}

impl Kept {
    pub(crate) fn new(id: i64, ttl: Duration, sent: Stamp, owner: Result<Claim, String>, written: i64) -> Arc<Self> {
        let (claim, key) = match owner {
            Ok(claim) => (Some(claim), None),
            Err(key) => (None, Some(key)),
        };
        Arc::new(Self {
            id,
            ttl,
            claim,
            key,
            written: AtomicI64::new(written),
            life: StdMutex::new(Life {
                sent,
                ended: false,
                leases: Vec::new(),
                made: 0,
            }),
            stream: Mutex::new(None),
            watch: StdMutex::new(None),
            looked_after: AtomicBool::new(false),
        })
    }

    pub(crate) fn id(&self) -> i64 {
        self.id
    }

    pub(crate) fn ttl(&self) -> Duration {
        self.ttl
    }

    /// The lease as the core sees it, for a grant that was asked for at `asked`.
    pub(crate) fn lease(&self, asked: Stamp, now: Stamp) -> Lease {
        let mut life = self.life();
        life.leases.retain(|lease| lease.is_valid(now));
        let sent = life.sent.min(asked);
        let lease = match (&self.claim, life.leases.last()) {
            (Some(claim), _) => Lease::for_claim(claim, sent),
            (None, Some(last)) if last.deadline().since(now) >= self.ttl / 2 => return last.clone(),
            (None, _) => Lease::shared(format!("{:016x}/{}", self.id, life.made), self.ttl, sent),
        };
        life.made += 1;
        life.leases.push(lease.clone());
        if life.ended {
            lease.revoker().revoke(LossReason::Revoked);
        }
        lease
    }

    /// Whether the server keeps it at `now`, for all that this client knows.
    pub(crate) fn is_valid(&self, now: Stamp) -> bool {
        let life = self.life();
        let drift = self.ttl / 100 + Duration::from_millis(2);
        !life.ended && now < life.sent + self.ttl.saturating_sub(drift)
    }

    fn life(&self) -> MutexGuard<'_, Life> {
        // Nothing here panics while holding the mutex.
        self.life.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The key of a shared lease, and the revision at which it was written last.
    pub(crate) fn mark(&self) -> Option<(&str, i64)> {
        let key = self.key.as_deref()?;
        Some((key, self.written.load(Ordering::Acquire)))
    }

    /// Its key was found to have been written then.
    pub(crate) fn marked(&self, revision: i64) {
        self.written.fetch_max(revision, Ordering::AcqRel);
    }

    /// The key of a shared lease, unless it is watched over that link.
    pub(crate) fn unwatched_key(&self, link: u64) -> Option<&str> {
        let watch = self.watch.lock().unwrap_or_else(PoisonError::into_inner);
        let watched = watch.as_ref().is_some_and(|watch| watch.watches_on(link));
        self.key.as_deref().filter(|_| !watched)
    }

    /// Whether nobody looks after it yet: the caller does so from now on, until it says that it is [done](Self::looked_after).
    pub(crate) fn is_to_be_looked_after(&self) -> bool {
        !self.looked_after.swap(true, Ordering::AcqRel)
    }

    pub(crate) fn looked_after(&self) {
        self.looked_after.store(false, Ordering::Release);
    }

    /// The server has ended it.
    pub(crate) fn ended(&self) {
        let leases = {
            let mut life = self.life();
            life.ended = true;
            std::mem::take(&mut life.leases)
        };
        for lease in leases {
            lease.revoker().revoke(LossReason::Revoked);
        }
    }

    /// When whoever uses it should send a keepalive.
    pub(crate) fn due(&self) -> Stamp {
        self.life().sent + self.ttl / 3
    }

    /// Sends a keepalive over that stream, or else over a new one, which the first keepalive opens.
    async fn beat_over(&self, link: &Link, stream: Option<Stream>) -> Result<Stream, Error> {
        let Some(mut stream) = stream else {
            let (keeper, answers) = link.client().lease_client().keep_alive(self.id).await?;
            return Ok(Stream {
                link: link.serial(),
                keeper,
                answers,
            });
        };
        stream.keeper.keep_alive().await?;
        match stream.answers.message().await? {
            Some(answer) if answer.ttl() > 0 => Ok(stream),
            Some(_) => Err(Error::LeaseKeepAliveError("lease not found".to_owned())),
            None => Err(Error::LeaseKeepAliveError("the stream ended".to_owned())),
        }
    }

    /// Has the client told at once when the server ends the lease at revision `from` or later.
    pub(crate) fn watch(self: &Arc<Self>, link: &Link, from: i64) {
        let Some(key) = &self.key else { return };
        let kept = Arc::downgrade(self);
        let watch = link.watches().watch(key.clone(), from, move |seen| {
            if let (Seen::Deleted, Some(kept)) = (seen, kept.upgrade()) {
                kept.ended();
            }
        });
        *self.watch.lock().unwrap_or_else(PoisonError::into_inner) = Some(watch);
    }
}

impl Session {
    /// A lease for the claim that has at least two thirds of its ttl left.
    pub(crate) async fn lease_for(&self, link: &Link, claim: &Claim) -> Result<Arc<Kept>, Failure> {
        loop {
            let kept = self.some_lease_for(link, claim).await?;
            if self.clock().now() < kept.due() {
                return Ok(kept);
            }
            match self.keep_alive_if_due(link, &kept).await {
                Ok(()) => return Ok(kept),
                Err(Failure::LeaseGone) => {}
                Err(failure) => return Err(failure),
            }
        }
    }

    async fn some_lease_for(&self, link: &Link, claim: &Claim) -> Result<Arc<Kept>, Failure> {
        let valid = |kept: &Arc<Kept>| kept.is_valid(self.clock().now());
        if let Some(kept) = self.table().lease_of(claim).filter(valid) {
            return Ok(kept);
        }
        let seconds = seconds(claim.ttl());
        if claim.own_lease() {
            self.still_open()?;
            if let Some(kept) = self.table().lease(own_id(claim.owner())).filter(valid) {
                return Ok(kept);
            }
            return self.own_lease(link, claim, seconds).await;
        }
        if let Some(kept) = self.table().shared(seconds, self.clock().now()) {
            return Ok(kept);
        }
        // One makes it for all who come meanwhile.
        let _making = self.making().lock().await;
        self.still_open()?;
        if let Some(kept) = self.table().shared(seconds, self.clock().now()) {
            return Ok(kept);
        }
        self.shared_lease(link, seconds).await
    }

    async fn shared_lease(&self, link: &Link, seconds: u64) -> Result<Arc<Kept>, Failure> {
        let sent = self.clock().now();
        let granted = link.grant_lease(whole(seconds), None).await?;
        let (id, ttl) = (granted.id(), ttl(granted.ttl())?);
        let key = self.settings().keys.lease(id);
        let puts = [key.clone(), self.settings().keys.unforced(id)];
        let puts = puts.map(|key| TxnOp::put(key, "", Some(PutOptions::new().with_lease(id))));
        let answer = link.txn(Txn::new().and_then(puts)).await?;
        let written = self.seen(answer.header());
        let kept = Kept::new(id, ttl, sent, Err(key), written);
        kept.watch(link, written + 1);
        self.table().add(&kept, Some(seconds), self.clock().now());
        Ok(kept)
    }

    /// The lease of one claim is named after its owner, so whoever releases the claim can revoke it, whether it is known that it
    /// was granted or not.
    async fn own_lease(&self, link: &Link, claim: &Claim, seconds: u64) -> Result<Arc<Kept>, Failure> {
        let id = own_id(claim.owner());
        let sent = self.clock().now();
        let options = LeaseGrantOptions::new().with_id(id);
        let kept = Kept::new(id, claim.ttl(), sent, Ok(claim.clone()), 0);
        match link.grant_lease(whole(seconds), Some(options)).await {
            Ok(_) => {}
            // By a request whose answer was not heard: it counts from the keepalive.
            Err(failure) if already_exists(&failure) => self.keep_alive(link, &kept).await?,
            Err(failure) => return Err(failure),
        }
        self.table().add(&kept, None, self.clock().now());
        Ok(kept)
    }

    /// The server knows it no more.
    pub(crate) fn lease_is_gone(&self, kept: &Kept) {
        kept.ended();
        self.table().forget_lease(kept.id);
    }

    /// Keeps a lease for another full ttl.
    pub(crate) async fn keep_alive(&self, link: &Link, kept: &Kept) -> Result<(), Failure> {
        let mut slot = kept.stream.lock().await;
        self.beat(link, kept, &mut slot).await
    }

    /// The same, unless somebody else has done it.
    pub(crate) async fn keep_alive_if_due(&self, link: &Link, kept: &Kept) -> Result<(), Failure> {
        let mut slot = kept.stream.lock().await;
        if kept.is_valid(self.clock().now()) && self.clock().now() < kept.due() {
            return Ok(());
        }
        self.beat(link, kept, &mut slot).await
    }

    /// As of 3.6 and some late versions of 3.5, etcd looks at the login of a keepalive, too.
    async fn beat(&self, link: &Link, kept: &Kept, slot: &mut Option<Stream>) -> Result<(), Failure> {
        for _ in 0..link.logins() {
            let sent = self.clock().now();
            match self.beat_once(link, kept, slot).await {
                Err(Failure::Etcd(error)) if failure::logged_in_before_a_change(&error) => {
                    link.log_in_again(sent).await?;
                }
                beaten => return beaten,
            }
        }
        self.beat_once(link, kept, slot).await
    }

    async fn beat_once(&self, link: &Link, kept: &Kept, slot: &mut Option<Stream>) -> Result<(), Failure> {
        let mut stream = slot.take().filter(|stream| stream.link == link.serial());
        let sent = self.clock().now();
        // A follower passes a keepalive on to the leader that it knows of when it comes, and goes on waiting for that one if it has
        // stopped and there is another. So one that takes long is sent anew, over another stream. The first answer counts, and all
        // other streams are dropped.
        let beating = async {
            let mut beats = FuturesUnordered::from_iter([kept.beat_over(link, stream.take())]);
            loop {
                tokio::select! {
                    Some(beaten) = beats.next() => return beaten,
                    () = sleep(kept.ttl / 10) => beats.push(kept.beat_over(link, None)),
                }
            }
        };
        let beaten = link.ask(beating).await;
        match beaten {
            Ok(stream) => {
                *slot = Some(stream);
                let mut life = kept.life();
                life.sent = life.sent.max(sent);
                Ok(())
            }
            Err(failure) => {
                if matches!(failure, Failure::LeaseGone) {
                    self.lease_is_gone(kept);
                }
                Err(failure)
            }
        }
    }

    pub(crate) async fn renew_on(self: &Arc<Self>, link: &Arc<Link>, lease: &Lease) -> Result<Renewal, Failure> {
        let kept = match lease.id() {
            // It is named after its owner, so anyone who has the claim can keep it.
            LeaseId::Claim(claim) => {
                let id = own_id(claim.owner());
                let now = self.clock().now();
                let known = self.table().lease(id);
                known.unwrap_or_else(|| Kept::new(id, claim.ttl(), now, Ok(claim.clone()), 0))
            }
            LeaseId::Shared(id) => {
                let id = id.split('/').next().and_then(|id| i64::from_str_radix(id, 16).ok());
                // One that is not known is not ours, or was let go of.
                let Some(kept) = id.and_then(|id| self.table().lease(id)) else {
                    return Ok(Renewal::NotHeld);
                };
                kept
            }
            _ => return Ok(Renewal::NotHeld),
        };
        match self.keep_alive(link, &kept).await {
            Ok(()) => {}
            Err(Failure::LeaseGone) => return Ok(Renewal::NotHeld),
            Err(failure) => return Err(failure),
        }
        if let Some(claim) = lease.claim() {
            // Its key can have been deleted while its lease lives on.
            let head = self.head_of(link, claim.name()).await?;
            if !head.is_some_and(|head| is_of(&head, claim) && !is_reserved(&head)) {
                kept.ended();
                return Ok(Renewal::NotHeld);
            }
        }
        self.look_after(link, &kept);
        Ok(Renewal::Renewed)
    }
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

/// Whether a lease was not granted because there is one of that number.
pub(crate) fn already_exists(failure: &Failure) -> bool {
    matches!(failure, Failure::Etcd(error) if error.to_string().contains("lease already exists"))
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
