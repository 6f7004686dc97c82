//! Leases.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::{Claim, LossReason, Revocation, Revoker, Stamp};

/// What keeps locks at the server: the client renews it at a third of its ttl, and counts on it until its deadline.
///
/// A backend makes one per lock ([`Lease::for_claim`]) or one that many locks share ([`Lease::shared`]). Clones are the same lease.
///
/// **Invariant.** The deadline is the *send* time of the last refresh that the server acknowledged, plus the ttl
/// granted, less an allowance for drift between the clocks (ttl/100 + 2 ms). The server started to count no earlier than
/// that send, so it keeps the lease at least until the deadline. Once the deadline has passed, the lease is over for
/// good: a late acknowledgement does not revive it.
#[derive(Clone)]
pub struct Lease(Arc<Inner>);

struct Inner {
    id: LeaseId,
    ttl: Duration,
    deadline: AtomicU64,
    revocation: Revocation,
}

/// What a lease belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LeaseId {
    /// One claim, whose name and owner identify it on the server.
    Claim(Claim),
    /// Many claims; the text is the backend's own.
    Shared(Arc<str>),
}

impl fmt::Display for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Claim(claim) => write!(f, "lock \"{}\"", claim.name()),
            Self::Shared(id) => write!(f, "the lease {id}, which several locks share"),
        }
    }
}

impl Lease {
    /// The lease of one claim. `sent` is when the request that was granted left this process.
    #[must_use]
    pub fn for_claim(claim: &Claim, sent: Stamp) -> Self {
        Self::new(LeaseId::Claim(claim.clone()), claim.ttl(), sent)
    }

    /// A lease that many claims share. `ttl` is what the server granted, `sent` when the last refresh that it
    /// acknowledged left this process.
    #[must_use]
    pub fn shared(id: impl Into<Arc<str>>, ttl: Duration, sent: Stamp) -> Self {
        Self::new(LeaseId::Shared(id.into()), ttl, sent)
    }

    fn new(id: LeaseId, ttl: Duration, sent: Stamp) -> Self {
        Self(Arc::new(Inner {
            id,
            ttl,
            deadline: AtomicU64::new(deadline(sent, ttl).as_nanos()),
            revocation: Revocation::new(),
        }))
    }

    /// What the lease belongs to.
    #[must_use]
    pub fn id(&self) -> &LeaseId {
        &self.0.id
    }

    /// The claim, if the lease is not shared.
    #[must_use]
    pub fn claim(&self) -> Option<&Claim> {
        match &self.0.id {
            LeaseId::Claim(claim) => Some(claim),
            LeaseId::Shared(_) => None,
        }
    }

    /// The ttl that the server granted.
    #[must_use]
    pub fn ttl(&self) -> Duration {
        self.0.ttl
    }

    /// When the lease ends unless it is renewed before.
    #[must_use]
    pub fn deadline(&self) -> Stamp {
        Stamp::from_nanos(self.0.deadline.load(Ordering::Acquire))
    }

    /// Returns whether the server keeps the lease at `now`, as far as the client knows.
    #[must_use]
    pub fn is_valid(&self, now: Stamp) -> bool {
        now < self.deadline() && self.0.revocation.reason().is_none()
    }

    /// Ends the lease for good if its deadline has passed at `now`. Says whether it is still valid.
    pub(crate) fn expire(&self, now: Stamp) -> bool {
        if now >= self.deadline() {
            self.0.revocation.fire(LossReason::Expired);
        }
        self.0.revocation.reason().is_none()
    }

    /// Records that the server acknowledged a refresh that was sent at `sent`; `now` is when that was learnt.
    ///
    /// Returns false, and ends the lease, if its deadline had passed by then.
    pub fn refreshed(&self, sent: Stamp, now: Stamp) -> bool {
        if !self.expire(now) {
            return false;
        }
        self.0
            .deadline
            .fetch_max(deadline(sent, self.0.ttl).as_nanos(), Ordering::AcqRel);
        true
    }

    /// Lets the backend end the lease early, and with it every lock that it keeps.
    #[must_use]
    pub fn revoker(&self) -> Revoker {
        self.0.revocation.revoker()
    }

    /// Whether the lease was ended, by the server or by time.
    #[must_use]
    pub fn revocation(&self) -> &Revocation {
        &self.0.revocation
    }

    /// Tells leases apart within this process.
    pub(crate) fn serial(&self) -> u64 {
        self.0.revocation.serial().0
    }
}

fn deadline(sent: Stamp, ttl: Duration) -> Stamp {
    let drift = ttl / 100 + Duration::from_millis(2);
    sent + ttl.saturating_sub(drift)
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease")
            .field("id", &self.0.id)
            .field("ttl", &self.0.ttl)
            .field("deadline", &self.deadline())
            .field("revocation", &self.0.revocation)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Clock;

    #[test]
    fn the_deadline_counts_from_the_send_and_allows_for_drift() {
        let (clock, hand) = Clock::manual();
        let (sent, ttl) = (clock.now(), Duration::from_secs(10));
        hand.advance(Duration::from_secs(3));
        let lease = Lease::shared("s", ttl, sent);
        assert_eq!(lease.deadline(), sent + ttl - Duration::from_millis(102));
        // A ttl that is smaller than the drift is never believed.
        let lease = Lease::shared("s", Duration::from_millis(1), clock.now());
        assert!(!lease.is_valid(clock.now()));
    }
}
