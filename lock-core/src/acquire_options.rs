//! A request to acquire that was checked.

use std::sync::Arc;
use std::time::Duration;

use crate::{Claim, LockName, Mode};

/// The operation, in the words of [`LockError::NotSupported`](crate::LockError::NotSupported).
pub(crate) const SHARES: &str = "locks that several share (shared, downgrade)";

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

/// A checked request.
#[derive(Debug)]
pub(crate) struct AcquireOptions {
    pub(crate) name: LockName,
    pub(crate) ttl: Duration,
    /// `None` waits for ever.
    pub(crate) wait: Option<Duration>,
    pub(crate) renew: Renew,
    pub(crate) max_hold: Option<Duration>,
    pub(crate) label: Option<Arc<str>>,
    pub(crate) at_least: Option<Duration>,
    /// Whether the claim may be kept for the next holder.
    pub(crate) may_linger: bool,
    pub(crate) mode: Mode,
}

impl AcquireOptions {
    pub(crate) fn waits(&self) -> bool {
        self.wait != Some(Duration::ZERO)
    }

    /// Whether one claim serves both requests.
    pub(crate) fn asks_for_the_same(&self, other: &Self) -> bool {
        let claimed = |options: &Self| {
            (
                options.ttl,
                options.at_least,
                options.renew == Renew::Never,
                options.mode,
            )
        };
        self.name == other.name && claimed(self) == claimed(other) && self.label == other.label
    }

    /// Whether the claim may go to other waiters of this client without a request.
    pub(crate) fn may_run(&self) -> bool {
        self.mode == Mode::Exclusive && self.renew == Renew::UntilReleased && self.at_least.is_none()
    }

    /// A claim of its own for every acquisition.
    pub(crate) fn claim(&self) -> Claim {
        let mut claim = Claim::new(self.name.clone(), self.ttl).with_mode(self.mode);
        if let Some(label) = &self.label {
            claim = claim.with_label(label);
        }
        if let Some(length) = self.at_least {
            // Where a lease is a session, the reservation is made in it, and waits for the disk: no other lock is to wait with it.
            claim = claim.with_at_least(length).with_own_lease();
        }
        match self.renew {
            Renew::UntilReleased => claim,
            Renew::Never => claim.with_own_lease(),
        }
    }
}
