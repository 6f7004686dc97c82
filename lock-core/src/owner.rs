//! Who asks.

use std::fmt;
use std::str::FromStr;

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

    /// The 128 bits, most significant byte first.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; 16] {
        self.0.as_bytes()
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
    fn owners_differ_and_survive_text() {
        let (a, b) = (OwnerId::random(), OwnerId::random());
        assert_ne!(a, b);
        assert_eq!(a.to_string().parse(), Ok(a));
        assert_eq!("x".parse::<OwnerId>(), Err(ParseOwnerIdError));
    }
}
