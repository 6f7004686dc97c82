//! Identifiers of acquisitions.

use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};

use uuid::Uuid;

/// Identifier of one acquisition: a v4 UUID. Each acquisition has a new one, so a stale guard can never release or renew what its successor
/// holds.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct OwnerId(Uuid);

impl OwnerId {
    /// A new, random identifier.
    #[must_use]
    pub fn random() -> Self {
        Self(Uuid::new_v4())
    }

    /// A different identifier for each count. Both halves differ, as backends make shorter identifiers of them.
    fn varied(self, count: u64) -> Self {
        // All bits but those of the version and the variant.
        const HIGH: u64 = !0xf000;
        const LOW: u64 = u64::MAX >> 2;
        // Odd, so no two counts have the same product: 2^64 divided by the golden ratio.
        let bits = count.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let (high, low) = self.0.as_u64_pair();
        Self(Uuid::from_u64_pair(
            high ^ bits & HIGH,
            low ^ bits.rotate_left(32) & LOW,
        ))
    }

    /// The 128 bits, most significant byte first.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; 16] {
        self.0.as_bytes()
    }
}

/// Makes the identifiers of one client: a random one, and variations of it, which saves a system call for each lock. They are no secrets. A
/// forked child cannot use the client, so no two processes have the same.
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
        self.first.varied(self.made.fetch_add(1, Ordering::Relaxed))
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
    fn the_owners_of_a_client_are_uuids_that_differ_and_survive_text() {
        const COUNT: usize = 10_000;
        let owners = Owners::default();
        let made: Vec<_> = (0..COUNT).map(|_| owners.next()).collect();
        let halves = [0, 1].map(|half| {
            let half = |owner: &OwnerId| <[u64; 2]>::from(owner.0.as_u64_pair())[half];
            made.iter().map(half).collect::<std::collections::BTreeSet<_>>().len()
        });
        assert_eq!(halves, [COUNT; 2]);
        for owner in made {
            assert_eq!(
                (owner.0.get_version_num(), owner.0.get_variant()),
                (4, uuid::Variant::RFC4122)
            );
            assert_eq!(owner.to_string().parse(), Ok(owner));
        }
        assert_eq!("x".parse::<OwnerId>(), Err(ParseOwnerIdError));
    }
}
