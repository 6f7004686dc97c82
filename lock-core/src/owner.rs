//! Identifiers of acquisitions.

use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};

use uuid::Uuid;

/// Names one acquisition, not a process or a client: a v4 UUID, made anew before anything is sent.
///
/// Because every acquisition has its own owner, a stale guard can never release or renew what its successor holds.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct OwnerId(Uuid);

impl OwnerId {
    /// A fresh, random owner.
    #[must_use]
    pub fn random() -> Self {
        Self(Uuid::new_v4())
    }

    fn plus(self, count: u64) -> Self {
        // The bits behind those that say which kind of UUID it is.
        const COUNTED: u64 = u64::MAX >> 2;
        let (high, low) = self.0.as_u64_pair();
        let counted = low.wrapping_add(count) & COUNTED;
        Self(Uuid::from_u64_pair(high, low & !COUNTED | counted))
    }

    /// The 128 bits, most significant byte first.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; 16] {
        self.0.as_bytes()
    }
}

/// Makes the owners of one client: a random one, and those that follow it, which saves a system call for each lock. They are no secrets. A forked
/// child cannot use it, so that no two processes have the same.
#[derive(Debug)]
pub(crate) struct Owners {
    first: OwnerId,
    made: AtomicU64,
}

impl Default for Owners {
    fn default() -> Self {
        Self {
            first: OwnerId::random(),
            made: AtomicU64::new(0),
        }
    }
}

impl Owners {
    pub(crate) fn next(&self) -> OwnerId {
        self.first.plus(self.made.fetch_add(1, Ordering::Relaxed))
    }
}

impl fmt::Display for OwnerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl fmt::Debug for OwnerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// The text was not a UUID.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not an owner id; expected a UUID such as 67e55044-10b1-426f-9247-bb680e5fe0c8")]
pub struct ParseOwnerIdError;

impl FromStr for OwnerId {
    type Err = ParseOwnerIdError;

    fn from_str(s: &str) -> Result<Self, ParseOwnerIdError> {
        s.parse().map(Self).map_err(|_| ParseOwnerIdError)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_owners_of_a_client_are_uuids_and_differ() {
        let owners = Owners {
            first: OwnerId(Uuid::from_u64_pair(0x4000, 0xbfff_ffff_ffff_fffe)),
            made: AtomicU64::new(0),
        };
        let made: std::collections::BTreeSet<_> = (0..9).map(|_| owners.next()).collect();
        assert_eq!(made.len(), 9);
        assert!(
            made.iter()
                .all(|owner| owner.0.get_version_num() == 4 && owner.0.get_variant() == uuid::Variant::RFC4122)
        );
    }

    #[test]
    fn owners_differ_and_survive_text() {
        let (a, b) = (OwnerId::random(), OwnerId::random());
        assert_ne!(a, b);
        assert_eq!(a.to_string().parse(), Ok(a));
        assert_eq!("x".parse::<OwnerId>(), Err(ParseOwnerIdError));
    }
}
