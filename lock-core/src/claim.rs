//! One wish to hold a name, and what a backend may answer.

use std::fmt;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use crate::{FencingToken, Holder, Lease, LockName, LossReason, OwnerId, Revocation, Revoker};

/// One wish to hold a name. All backend calls are idempotent per claim. Cloning is cheap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim(Arc<Inner>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Inner {
    name: LockName,
    owner: OwnerId,
    ttl: Duration,
    label: Option<Arc<str>>,
    own_lease: bool,
    at_least: Option<Duration>,
    tokens_wanted: NonZeroU32,
    mode: Mode,
}

/// Who else may hold a name at the same time.
///
/// A name has one kind at a time: claims in the modes `Exclusive` and `Shared` go together, and so do permits of the same number. Others are
/// [`LockError::InvalidMode`](crate::LockError::InvalidMode) while the name is held or waited for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum Mode {
    /// No other claim.
    #[default]
    Exclusive,
    /// Other shared claims.
    Shared,
    /// Other permits, `of` in all.
    Permit {
        /// How many claims may hold the name at once.
        of: u32,
    },
}

impl Mode {
    /// Whether one name can be used in both modes.
    #[must_use]
    pub fn is_same_kind(self, other: Self) -> bool {
        match (self, other) {
            (Self::Permit { of }, Self::Permit { of: other }) => of == other,
            (Self::Permit { .. }, _) | (_, Self::Permit { .. }) => false,
            _ => true,
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exclusive => f.write_str("an exclusive lock"),
            Self::Shared => f.write_str("a shared lock"),
            Self::Permit { of } => write!(f, "a semaphore of {of}"),
        }
    }
}

impl Claim {
    /// A claim of `name` for a fresh owner; the server shall keep it for `ttl` after the last sign of life.
    #[must_use]
    pub fn new(name: LockName, ttl: Duration) -> Self {
        Self(Arc::new(Inner {
            name,
            owner: OwnerId::random(),
            ttl,
            label: None,
            own_lease: false,
            at_least: None,
            tokens_wanted: NonZeroU32::MIN,
            mode: Mode::Exclusive,
        }))
    }

    /// The longest label, in bytes.
    pub const MAX_LABEL: usize = 256;

    /// Adds a text for people, shown wherever the holder is shown: its first [`MAX_LABEL`](Self::MAX_LABEL) bytes, with
    /// control characters replaced, since it ends up on terminals.
    #[must_use]
    pub fn with_label(mut self, label: impl AsRef<str>) -> Self {
        let label = label.as_ref();
        let fits = label.char_indices().map(|(at, c)| at + c.len_utf8());
        let end = fits
            .take_while(|end| *end <= Self::MAX_LABEL)
            .last()
            .unwrap_or_default();
        let label = &label[..end];
        let printable = |c: char| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c };
        Arc::make_mut(&mut self.0).label = Some(label.chars().map(printable).collect::<String>().into());
        self
    }

    /// Asks for a lease that is shared with no other claim, so that the server frees it at its ttl if nobody renews.
    #[must_use]
    pub fn with_own_lease(mut self) -> Self {
        Arc::make_mut(&mut self.0).own_lease = true;
        self
    }

    /// Announces a [reservation](crate::DistributedLock::reserve) of that length, which is made once the claim is granted.
    #[must_use]
    pub fn with_at_least(mut self, length: Duration) -> Self {
        Arc::make_mut(&mut self.0).at_least = Some(length).filter(|length| !length.is_zero());
        self
    }

    /// Sets who else may hold the name at the same time.
    #[must_use]
    pub fn with_mode(mut self, mode: Mode) -> Self {
        Arc::make_mut(&mut self.0).mode = mode;
        self
    }

    /// Sets how many tokens the client can use for holders of its own, one after the other, before it asks the server again. One by default.
    #[must_use]
    pub fn with_tokens_wanted(mut self, tokens: NonZeroU32) -> Self {
        Arc::make_mut(&mut self.0).tokens_wanted = tokens;
        self
    }

    /// The same claim for the owner of another one of that name. For the release of what another process acquired.
    #[must_use]
    pub fn with_owner(mut self, owner: OwnerId) -> Self {
        Arc::make_mut(&mut self.0).owner = owner;
        self
    }

    /// What is claimed.
    #[must_use]
    pub fn name(&self) -> &LockName {
        &self.0.name
    }

    /// Who claims it.
    #[must_use]
    pub fn owner(&self) -> OwnerId {
        self.0.owner
    }

    /// How long the server keeps it after the last sign of life.
    #[must_use]
    pub fn ttl(&self) -> Duration {
        self.0.ttl
    }

    /// The text for people.
    #[must_use]
    pub fn label(&self) -> Option<&str> {
        self.0.label.as_deref()
    }

    /// Whether the lease must not be shared with other claims.
    #[must_use]
    pub fn own_lease(&self) -> bool {
        self.0.own_lease
    }

    /// How long the name is to stay taken after the grant, whatever becomes of the holder.
    #[must_use]
    pub fn at_least(&self) -> Option<Duration> {
        self.0.at_least
    }

    /// Who else may hold the name at the same time.
    #[must_use]
    pub fn mode(&self) -> Mode {
        self.0.mode
    }

    /// How many tokens the client can use. A grant may come with fewer, and never with none.
    #[must_use]
    pub fn tokens_wanted(&self) -> NonZeroU32 {
        self.0.tokens_wanted
    }
}

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
            lease,
            first_token: token,
            revocation: Revocation::new(),
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

    /// Lets the backend take back this one grant while its lease lives on, as when somebody forces a lock free that
    /// shares its lease with others.
    #[must_use]
    pub fn revoker(&self) -> Revoker {
        self.revocation.revoker()
    }

    /// Whether this one grant was taken back.
    #[must_use]
    pub fn revocation(&self) -> &Revocation {
        &self.revocation
    }

    /// Why the grant no longer stands, leaving the clock aside.
    #[must_use]
    pub fn revoked(&self) -> Option<LossReason> {
        self.revocation.reason().or_else(|| self.lease.revocation().reason())
    }
}

/// The answer to an attempt to acquire.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Attempt {
    /// The claim holds the name.
    Granted(Grant),
    /// Somebody else does.
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

/// What is known about a name that somebody else holds.
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
    /// The server does not know this lease, or it belongs to somebody else. Final.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_is_cut_and_made_printable() {
        let claim = Claim::new("a".parse().unwrap(), Duration::from_secs(1));
        let label = format!("\u{1b}[31m{}é", "x".repeat(Claim::MAX_LABEL - 6));
        let claim = claim.with_label(label);
        assert_eq!(
            claim.label(),
            Some(format!("\u{fffd}[31m{}", "x".repeat(Claim::MAX_LABEL - 6)).as_str())
        );
    }
}
