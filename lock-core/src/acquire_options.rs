//! How a lock is to be acquired and held.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use crate::{Claim, LockName, Mode, OwnerId};

/// The operation, in the words of [`LockError::NotSupported`](crate::LockError::NotSupported).
pub(crate) const SHARES: &str = "locks that several share (shared, downgrade)";

/// How many tokens a claim asks for if several wait for it.
const BLOCK: NonZeroU32 = NonZeroU32::new(64).unwrap();

/// Whether a held lock is kept alive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Renew {
    /// Until it is released or lost.
    #[default]
    UntilReleased,
    /// Not at all: the lock ends with its ttl, counted from the grant. It gets a lease of its own on the server.
    Never,
}

/// What a request sets.
#[derive(Clone, Debug)]
pub(crate) struct AcquireOptions {
    pub(crate) ttl: Duration,
    /// `None` waits for ever, and zero not at all.
    pub(crate) wait: Option<Duration>,
    pub(crate) renew: Renew,
    pub(crate) max_hold: Option<Duration>,
    /// As it is shown.
    pub(crate) label: Option<Arc<str>>,
    pub(crate) at_least: Option<Duration>,
    /// Whether the claim may be kept for the next holder.
    pub(crate) may_linger: bool,
    pub(crate) mode: Mode,
}

impl AcquireOptions {
    pub(crate) fn new(ttl: Duration) -> Self {
        Self {
            ttl,
            wait: None,
            renew: Renew::UntilReleased,
            max_hold: None,
            label: None,
            at_least: None,
            may_linger: true,
            mode: Mode::Exclusive,
        }
    }

    pub(crate) fn waits(&self) -> bool {
        self.wait != Some(Duration::ZERO)
    }

    /// Whether a grant of that claim of the same name is what the request asks for.
    pub(crate) fn is_served_by(&self, claim: &Claim) -> bool {
        self.ttl == claim.ttl()
            && self.at_least == claim.at_least()
            && self.mode == claim.mode()
            && self.label.as_deref() == claim.label()
            && self.has_own_lease() == claim.own_lease()
    }

    /// Where a lease is a session, a reservation is made in it, and waits for the disk: no other lock is to wait with it.
    fn has_own_lease(&self) -> bool {
        self.renew == Renew::Never || self.at_least.is_some()
    }

    /// Whether the claim may go to other waiters of this client without a request.
    fn may_run(&self) -> bool {
        self.mode == Mode::Exclusive && self.renew == Renew::UntilReleased && self.at_least.is_none()
    }

    /// A claim of its own for every acquisition. `for_others`: it asks for tokens for others that wait, or that are likely to come.
    pub(crate) fn claim(&self, owner: OwnerId, name: LockName, for_others: bool) -> Claim {
        let mut claim = Claim::of(owner, name, self.ttl).with_mode(self.mode);
        if let Some(label) = &self.label {
            claim = claim.with_printable_label(Arc::clone(label));
        }
        if let Some(length) = self.at_least {
            claim = claim.with_at_least(length);
        }
        if self.has_own_lease() {
            claim = claim.with_own_lease();
        }
        if for_others && self.may_run() {
            claim = claim.with_tokens_wanted(BLOCK);
        }
        claim
    }
}
