//! A lease in etcd: one that claims of the same ttl share, or one of a claim's own.

use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex as StdMutex, MutexGuard, PoisonError};
use std::time::Duration;

use etcd_client::{Client, Error, LeaseKeepAliveStream, LeaseKeeper};
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use lock_core::{Claim, Lease, LossReason, Stamp};
use tokio::sync::Mutex;
use tokio::time::sleep;

/// A lease in etcd that this client may keep alive.
///
/// The core sees one [`Lease`] of it as long as the core itself renews it. What waiters and new claims do for it keeps it too,
/// but guards learn of no more than their own renewals: a client that cannot renew shall notice. So a claim that comes when the
/// last `Lease` has little left gets another one, of the same lease in etcd.
pub(crate) struct EtcdLease {
    id: i64,
    ttl: Duration,
    of: Of,
    life: StdMutex<Life>,
    stream: Mutex<Option<Stream>>,
    is_checked: AtomicBool,
}

enum Of {
    Claim(Claim),
    /// Many claims. The key lives as long as the lease, and was written last at that revision.
    Many {
        key: String,
        written: AtomicI64,
    },
}

struct Life {
    /// When the last keepalive that was acknowledged was sent.
    sent: Stamp,
    ended: bool,
    leases: Vec<Lease>,
    /// Tells the leases of the core apart.
    made: u64,
}

impl Life {
    fn is_valid(&self, ttl: Duration, now: Stamp) -> bool {
        let drift = ttl / 100 + Duration::from_millis(2);
        !self.ended && now < self.sent + ttl.saturating_sub(drift)
    }
}

/// **Invariant.** No keepalive is under way on a stream that is kept: the next answer is that to the next keepalive. A stream
/// whose answer was given up is dropped with it.
pub(crate) struct Stream {
    connection: u64,
    keeper: LeaseKeeper,
    answers: LeaseKeepAliveStream,
}

impl EtcdLease {
    /// A lease that claims share, granted by a request that was sent at `sent`. Its `key` was written at that revision.
    pub(crate) fn shared(id: i64, ttl: Duration, sent: Stamp, key: String, written: i64) -> Arc<Self> {
        let written = AtomicI64::new(written);
        Self::new(id, ttl, sent, Of::Many { key, written })
    }

    /// A lease of one claim.
    pub(crate) fn for_claim(id: i64, claim: &Claim, sent: Stamp) -> Arc<Self> {
        Self::new(id, claim.ttl(), sent, Of::Claim(claim.clone()))
    }

    fn new(id: i64, ttl: Duration, sent: Stamp, of: Of) -> Arc<Self> {
        Arc::new(Self {
            id,
            ttl,
            of,
            life: StdMutex::new(Life {
                sent,
                ended: false,
                leases: Vec::new(),
                made: 0,
            }),
            stream: Mutex::new(None),
            is_checked: AtomicBool::new(false),
        })
    }

    pub(crate) fn id(&self) -> i64 {
        self.id
    }

    pub(crate) fn ttl(&self) -> Duration {
        self.ttl
    }

    /// Whether it is to be kept for longer than its ttl. That of a claim of its own is if the claim has it for a reservation, and not because it
    /// is never renewed.
    pub(crate) fn is_renewed(&self) -> bool {
        match &self.of {
            Of::Claim(claim) => claim.at_least().is_some(),
            Of::Many { .. } => true,
        }
    }

    /// The lease as the core sees it, for a grant that was asked for at `asked`.
    pub(crate) fn lease(&self, asked: Stamp, now: Stamp) -> Lease {
        let mut life = self.life();
        life.leases.retain(|lease| lease.is_valid(now));
        let sent = life.sent.min(asked);
        let lease = match (&self.of, life.leases.last()) {
            (Of::Claim(claim), _) => Lease::for_claim(claim, sent),
            (Of::Many { .. }, Some(last)) if last.deadline().since(now) >= self.ttl / 2 => return last.clone(),
            (Of::Many { .. }, _) => Lease::shared(format!("{:016x}/{}", self.id, life.made), self.ttl, sent),
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
        self.life().is_valid(self.ttl, now)
    }

    /// When the users of the lease should send a keepalive.
    pub(crate) fn due(&self) -> Stamp {
        self.life().sent + self.ttl / 3
    }

    /// The key of a shared lease.
    pub(crate) fn mark_key(&self) -> Option<&str> {
        match &self.of {
            Of::Claim(_) => None,
            Of::Many { key, .. } => Some(key),
        }
    }

    /// The revision at which that was written last, as far as this client knows.
    pub(crate) fn mark(&self) -> Option<i64> {
        match &self.of {
            Of::Claim(_) => None,
            Of::Many { written, .. } => Some(written.load(Ordering::Acquire)),
        }
    }

    /// Its key was found to have been written then.
    pub(crate) fn marked(&self, revision: i64) {
        if let Of::Many { written, .. } = &self.of {
            written.fetch_max(revision, Ordering::AcqRel);
        }
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

    /// What it keeps is checked until the guard is dropped. `None` if that is so already.
    pub(crate) fn begin_check(self: &Arc<Self>) -> Option<Checking> {
        let is_checked = self.is_checked.swap(true, Ordering::AcqRel);
        (!is_checked).then(|| Checking(Arc::clone(self)))
    }

    /// Held while a keepalive is sent: the stream of the last one.
    pub(crate) fn stream(&self) -> &Mutex<Option<Stream>> {
        &self.stream
    }

    /// Sends a keepalive over the connection of that serial number, and waits for the answer: the stream that it came on, or `None` if the
    /// server does not know the lease.
    ///
    /// A follower passes a keepalive on to the leader that it knows of when it comes, and goes on waiting for that one if it has
    /// stopped and there is another. So one that takes long is sent anew, over another stream. The first answer counts, and all
    /// other streams are dropped.
    pub(crate) async fn keep_alive(
        &self,
        client: &Client,
        connection: u64,
        stream: Option<Stream>,
    ) -> Result<Option<Stream>, Error> {
        let stream = stream.filter(|stream| stream.connection == connection);
        let mut beats = FuturesUnordered::from_iter([self.keep_alive_over(client, connection, stream)]);
        loop {
            tokio::select! {
                Some(answered) = beats.next() => return answered,
                () = sleep(self.ttl / 10) => beats.push(self.keep_alive_over(client, connection, None)),
            }
        }
    }

    /// The same over that stream, or else over a new one, which the first keepalive opens.
    async fn keep_alive_over(
        &self,
        client: &Client,
        connection: u64,
        stream: Option<Stream>,
    ) -> Result<Option<Stream>, Error> {
        let Some(mut stream) = stream else {
            return match client.lease_client().keep_alive(self.id).await {
                Ok((keeper, answers)) => Ok(Some(Stream {
                    connection,
                    keeper,
                    answers,
                })),
                // The only reason for which the library makes this error of a first answer.
                Err(Error::LeaseKeepAliveError(_)) => Ok(None),
                Err(error) => Err(error),
            };
        };
        stream.keeper.keep_alive().await?;
        match stream.answers.message().await? {
            Some(answer) => Ok((answer.ttl() > 0).then_some(stream)),
            None => Err(Error::LeaseKeepAliveError("the stream ended".to_owned())),
        }
    }

    /// A keepalive that was sent at `sent` was acknowledged, which this client learnt at `now`. False, and the lease is not believed in any
    /// more, if its deadline had passed by then.
    #[must_use]
    pub(crate) fn kept(&self, sent: Stamp, now: Stamp) -> bool {
        let mut life = self.life();
        let is_valid = life.is_valid(self.ttl, now);
        if is_valid {
            life.sent = life.sent.max(sent);
        }
        is_valid
    }

    fn life(&self) -> MutexGuard<'_, Life> {
        // Nothing here panics while holding the mutex.
        self.life.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A lease that is checked until this is dropped, also with the runtime.
pub(crate) struct Checking(Arc<EtcdLease>);

impl Drop for Checking {
    fn drop(&mut self) {
        self.0.is_checked.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use lock_core::Clock;

    use super::*;

    #[test]
    fn a_keepalive_that_is_answered_after_the_deadline_brings_no_lease_back() {
        let (ttl, sent) = (Duration::from_secs(2), Clock::system().now());
        let lease = EtcdLease::shared(1, ttl, sent, "ns:lease/1".to_owned(), 1);
        assert!(lease.kept(sent + ttl / 3, sent + ttl / 2));
        let late = sent + ttl / 3 + ttl;
        assert!(!lease.kept(sent + ttl, late) && !lease.is_valid(late));
    }
}
