//! Taking locks, and looking who has them.

use std::future::Future;
use std::time::Duration;

use lock_core::{
    Attempt, Claim, DistributedLock, FencingToken, Grant, Lease, LockGuard, LockName, Locks, LossReason, Renewal, Stamp,
};

use super::{Case, Party};
use crate::link::Link;
use crate::outcome::{Outcome, Stop, checked, ensure, fail};

impl Case {
    /// The claim must be granted at once.
    pub(crate) async fn take(&self, client: &Link, claim: &Claim) -> Outcome<Grant> {
        checked();
        match client.try_acquire(claim).await? {
            Attempt::Granted(grant) => Ok(grant),
            other => fail!(
                "the backend",
                "grants {:?}, which is free; it said {other:?}",
                claim.name()
            ),
        }
    }

    /// The claim must be granted before `limit` is over. Says too when the answer was there.
    pub(crate) async fn take_within(&self, client: &Link, claim: &Claim, limit: Duration) -> Outcome<(Grant, Stamp)> {
        checked();
        let start = self.now();
        loop {
            let attempt = client.try_quietly(claim).await;
            let now = self.now();
            match attempt {
                Ok(Attempt::Granted(grant)) => {
                    self.note(format!(
                        "{:?} granted after polling, token {}",
                        claim.name(),
                        grant.token
                    ));
                    return Ok((grant, now));
                }
                // A busy machine may be too slow for a claim with a short ttl.
                Err(error) if !error.is_retryable() || now.since(start) > limit => return Err(error.into()),
                _ if now.since(start) > limit => {
                    fail!(
                        "the backend",
                        "{:?} is free within {limit:?}; it is still busy",
                        claim.name()
                    )
                }
                _ => tokio::time::sleep(Duration::from_millis(1)).await,
            }
        }
    }

    /// As [`take_within`](Self::take_within), across a fault: failures that are worth a retry are waited out.
    pub(crate) async fn take_through(&self, client: &Link, claim: &Claim, limit: Duration) -> Outcome<Grant> {
        checked();
        let start = self.now();
        loop {
            let attempt = client.try_acquire(claim).await;
            let over = self.now().since(start) > limit;
            match attempt {
                Ok(Attempt::Granted(grant)) => return Ok(grant),
                Err(error) if over || !error.is_retryable() => return Err(error.into()),
                _ if over => fail!("the backend", "{:?} is free {limit:?} after a fault", claim.name()),
                _ => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        }
    }

    /// A guard, across a fault: failures that are worth a retry are waited out.
    pub(crate) async fn lock_through(&self, locks: &Locks, name: &str, ttl: Duration) -> Outcome<LockGuard> {
        checked();
        let start = self.now();
        loop {
            match locks.lock(name).ttl(ttl).wait_for(self.hang_limit()).await {
                Ok(guard) => return Ok(guard),
                Err(error) if !error.is_retryable() || self.now().since(start) > self.hang_limit() => {
                    return Err(error.into());
                }
                Err(error) => self.note(format!("asking again: {error}")),
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// The name must be busy for everyone else now.
    pub(crate) async fn is_busy(&self, client: &Link, name: &LockName) -> Outcome {
        checked();
        let claim = self.claim(name.as_str());
        match client.try_acquire(&claim).await? {
            Attempt::Busy(_) => Ok(()),
            other => {
                client.release(&claim, None).await?;
                fail!(
                    "the backend",
                    "{name:?} is held and refused to others; it said {other:?}"
                )
            }
        }
    }

    /// Nobody may hold the name now, as far as the backend tells.
    pub(crate) async fn is_gone(&self, client: &Link, name: &str) -> Outcome {
        if !self.capabilities().holder {
            return Ok(());
        }
        checked();
        match client.holders(&self.name(name)).await?.first() {
            None => Ok(()),
            Some(holder) => fail!("the backend", "{name:?} was released; it is held by {holder}"),
        }
    }

    /// The name must be free now, and is free again afterwards.
    pub(crate) async fn is_free(&self, client: &Link, name: &LockName) -> Outcome {
        self.is_free_within(client, name, Duration::ZERO).await.map(drop)
    }

    /// The name must become free before `limit` is over, and is free again afterwards. Says when it was.
    pub(crate) async fn is_free_within(&self, client: &Link, name: &LockName, limit: Duration) -> Outcome<Stamp> {
        let claim = self.claim(name.as_str());
        let (_, at) = self.take_within(client, &claim, limit).await?;
        client.release(&claim, None).await?;
        Ok(at)
    }

    /// The condition must come to hold.
    pub(crate) async fn eventually(&self, whom: &str, what: &str, mut condition: impl FnMut() -> bool) -> Outcome {
        checked();
        let (start, limit) = (self.now(), self.hang_limit());
        while !condition() {
            if self.now().since(start) > limit {
                return Err(Stop::Failed(format!("expected of {whom}: {what} within {limit:?}")));
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        Ok(())
    }

    /// The holder must learn of a loss at the latest when the first renewal of each of the party's locks is answered. The server knew
    /// of it so long after the first of them was granted, which should be before any is renewed.
    pub(crate) async fn learns_by_a_renewal(
        &self,
        party: &Party,
        guard: &LockGuard,
        lost_after: Duration,
        locks: usize,
    ) -> Outcome<LossReason> {
        let reason = self.soon("the loss is seen", guard.lost().wait()).await?;
        let sent = party.link.counts().renewals();
        if lost_after > guard.ttl() / 4 {
            self.too_slow(format!(
                "how many renewals a loss takes, since it came after {lost_after:.1?}"
            ));
            return Ok(reason);
        }
        ensure!(
            sent <= locks,
            "the client",
            "a loss is seen within one renewal; it took {sent} of {locks} locks"
        );
        Ok(reason)
    }

    /// The future must end.
    pub(crate) async fn soon<T>(&self, what: &str, future: impl Future<Output = T>) -> Outcome<T> {
        self.within(self.hang_limit(), what, future).await
    }

    /// The future must end before `limit` is over.
    pub(crate) async fn within<T>(&self, limit: Duration, what: &str, future: impl Future<Output = T>) -> Outcome<T> {
        checked();
        match tokio::time::timeout(limit, future).await {
            Ok(value) => Ok(value),
            Err(_) => fail!("the backend", "{what} within {limit:?}"),
        }
    }
}

/// The token of a later grant must be higher than that of an earlier one.
pub(crate) fn rises(earlier: impl Into<Option<FencingToken>>, later: FencingToken) -> Outcome {
    let earlier = earlier.into();
    ensure!(
        earlier < Some(later),
        "the backend",
        "the next token is higher; {later} came after {earlier:?}"
    );
    Ok(())
}

/// The guard must know that another is granted its name.
pub(crate) fn is_over(guard: &LockGuard) -> Outcome {
    ensure!(
        !guard.is_held(),
        "the guard",
        "it is not held once the next one is granted"
    );
    Ok(())
}

/// A renewal must be answered like that.
pub(crate) async fn renews(client: &Link, lease: &Lease, expected: Renewal, why: &str) -> Outcome {
    let renewal = client.renew(lease).await?;
    ensure!(renewal == expected, "the backend", "{why}; it said {renewal:?}");
    Ok(())
}
