//! A request to hold a name, as backends see it.

use std::fmt;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use crate::{LockName, OwnerId};

/// A request of one acquisition to hold a name. All backend calls are idempotent per claim. Cloning is cheap.
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

/// Which other claims may hold a name at the same time.
///
/// While a name is held or waited for, it is of one kind: a lock, with claims in the modes `Exclusive` and `Shared`, or a semaphore of one
/// number of permits. Other requests are [`LockError::InvalidMode`](crate::LockError::InvalidMode).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum Mode {
    /// No other claim.
    #[default]
    Exclusive,
    /// Other shared claims.
    Shared,
    /// Other permits, up to `of` in all.
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
    /// A claim of `name` for a new owner. The server keeps it for `ttl` after the grant and after each renewal.
    pub fn new(name: LockName, ttl: Duration) -> Self {
        Self::of(OwnerId::random(), name, ttl)
    }

    pub(crate) fn of(owner: OwnerId, name: LockName, ttl: Duration) -> Self {
        Self(Arc::new(Inner {
            name,
            owner,
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

    /// Adds a text that is shown with the holder: its first [`MAX_LABEL`](Self::MAX_LABEL) bytes, with control characters replaced, as it is
    /// printed on terminals.
    pub fn with_label(self, label: impl AsRef<str>) -> Self {
        self.with_printable_label(printable(label.as_ref()))
    }

    /// The same for a label that is [`printable`].
    pub(crate) fn with_printable_label(mut self, label: Arc<str>) -> Self {
        Arc::make_mut(&mut self.0).label = Some(label);
        self
    }

    /// Asks for a lease of its own, so that the server frees the name at its ttl unless this claim is renewed.
    pub fn with_own_lease(mut self) -> Self {
        Arc::make_mut(&mut self.0).own_lease = true;
        self
    }

    /// Announces a [reservation](crate::DistributedLock::reserve) of that length, which follows the grant.
    pub fn with_at_least(mut self, length: Duration) -> Self {
        Arc::make_mut(&mut self.0).at_least = Some(length).filter(|length| !length.is_zero());
        self
    }

    /// Sets which other claims may hold the name at the same time.
    pub fn with_mode(mut self, mode: Mode) -> Self {
        Arc::make_mut(&mut self.0).mode = mode;
        self
    }

    /// Sets how many tokens the client can use, for holders of its own that follow each other without a request. One by default.
    pub fn with_tokens_wanted(mut self, tokens: NonZeroU32) -> Self {
        Arc::make_mut(&mut self.0).tokens_wanted = tokens;
        self
    }

    /// The same claim for another owner, as for the release of what another process acquired.
    pub fn with_owner(mut self, owner: OwnerId) -> Self {
        Arc::make_mut(&mut self.0).owner = owner;
        self
    }

    /// The name.
    #[must_use]
    pub fn name(&self) -> &LockName {
        &self.0.name
    }

    /// The identifier of the acquisition.
    #[must_use]
    pub fn owner(&self) -> OwnerId {
        self.0.owner
    }

    /// How long the server keeps the name after the grant and after each renewal.
    #[must_use]
    pub fn ttl(&self) -> Duration {
        self.0.ttl
    }

    /// The text that is shown with the holder.
    #[must_use]
    pub fn label(&self) -> Option<&str> {
        self.0.label.as_deref()
    }

    /// Whether the lease must not be shared with other claims.
    #[must_use]
    pub fn own_lease(&self) -> bool {
        self.0.own_lease
    }

    /// How long the name is to be reserved after the grant.
    #[must_use]
    pub fn at_least(&self) -> Option<Duration> {
        self.0.at_least
    }

    /// Which other claims may hold the name at the same time.
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

/// A label as it is shown.
pub(crate) fn printable(label: &str) -> Arc<str> {
    let fits = label.char_indices().map(|(at, c)| at + c.len_utf8());
    let fits = fits.take_while(|end| *end <= Claim::MAX_LABEL);
    let label = &label[..fits.last().unwrap_or_default()];
    let printable = |c: char| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c };
    label.chars().map(printable).collect::<String>().into()
}
