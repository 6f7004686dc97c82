//! What a backend answers to a claim.

use std::time::Duration;

use crate::{Claim, FencingToken, Holder, Lease, LockError, LossReason, Revocation, Revoker, Stamp};

/// A claim that the backend accepted.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Grant {
    /// What was asked for.
    pub claim: Claim,
    /// Higher than every token granted for this name before. The highest of the block, if the grant comes with one.
    pub token: FencingToken,
    /// What must be kept alive.
    pub lease: Lease,
    first_token: FencingToken,
    revocation: Revocation,
}

impl Grant {
    /// A grant of `claim`, kept by `lease`.
    #[must_use]
    pub fn new(claim: Claim, token: FencingToken, lease: Lease) -> Self {
        Self {
            claim,
            token,
            first_token: token,
            revocation: lease.revocation().child(),
            lease,
        }
    }

    /// Makes it a grant of a block of tokens: from `first` to [`token`](Self::token), both included. Every token of the block is higher than
    /// all tokens granted for this name before, and every later grant has higher tokens than the block. It has at most
    /// [`Claim::tokens_wanted`] tokens, and after a loss of the server's data, later grants must still be higher.
    ///
    /// A `first` above the last token counts as that.
    #[must_use]
    pub fn with_first_token(mut self, first: FencingToken) -> Self {
        self.first_token = first.min(self.token);
        self
    }

    /// The lowest token of the block.
    #[must_use]
    pub fn first_token(&self) -> FencingToken {
        self.first_token
    }

    /// Lets the backend take back this one grant while its lease lives on, as when a lock is released by force that
    /// shares its lease with others.
    #[must_use]
    pub fn revoker(&self) -> Revoker {
        self.revocation.revoker()
    }

    /// Whether this one grant was taken back, or its lease has ended.
    #[must_use]
    pub fn revocation(&self) -> &Revocation {
        &self.revocation
    }

    /// Why the grant no longer stands, leaving the clock aside.
    #[must_use]
    pub fn revoked(&self) -> Option<LossReason> {
        self.revocation.reason()
    }

    /// Whether it is a grant of `claim` that is good at `now`.
    pub(crate) fn check(&self, claim: &Claim, now: Stamp) -> Result<(), LockError> {
        let message = if self.claim != *claim {
            "the backend granted another claim; please report it to its authors".to_owned()
        } else if !self.lease.is_valid(now) {
            format!(
                "the grant arrived after its lease of {:?} had run out; if round trips to the server take that long, raise the ttl",
                self.lease.ttl()
            )
        } else if let Some(reason) = self.revoked() {
            format!("the lock was granted and lost at once: {reason}")
        } else {
            return Ok(());
        };
        Err(LockError::unavailable("acquire", message))
    }
}

/// The answer to an attempt to acquire.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Attempt {
    /// The claim holds the name.
    Granted(Grant),
    /// Another claim does.
    Busy(Busy),
}

impl Attempt {
    /// Busy, and nothing more is known.
    #[must_use]
    pub fn busy() -> Self {
        Self::Busy(Busy::default())
    }

    /// The grant, if there is one.
    #[must_use]
    pub fn granted(self) -> Option<Grant> {
        match self {
            Self::Granted(grant) => Some(grant),
            Self::Busy(_) => None,
        }
    }
}

/// What is known about a name that another claim holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Busy {
    /// When it is worth asking again at the latest: the holder's lease ends then, unless renewed.
    pub retry_after: Option<Duration>,
    /// Who holds it, as far as the answer told.
    pub holder: Option<Holder>,
}

impl Busy {
    /// Adds when to ask again at the latest.
    #[must_use]
    pub fn with_retry_after(mut self, after: Duration) -> Self {
        self.retry_after = Some(after);
        self
    }

    /// Adds who holds it.
    #[must_use]
    pub fn with_holder(mut self, holder: Holder) -> Self {
        self.holder = Some(holder);
        self
    }
}

impl From<Busy> for Attempt {
    fn from(busy: Busy) -> Self {
        Self::Busy(busy)
    }
}

/// The answer to a renewal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Renewal {
    /// The server keeps the lease for another full ttl, counted from when the request was sent.
    Renewed,
    /// The server does not know this lease, or it belongs to another owner. Final.
    NotHeld,
}

/// The answer to a release by the claim's owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Released {
    /// The claim held the name until now.
    Released,
    /// The claim did not hold the name; nothing was changed but its place in the queue, if it had one.
    NotHeld,
}
