//! What keeps the locks, as a person wants to see it.

use std::fmt;

/// The program that keeps the locks. For people and for tooling; what a backend can do is told by
/// [`Capabilities`](crate::Capabilities).
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct BackendVersion {
    /// Its name, as its makers write it: `Redis`, `PostgreSQL`.
    pub product: String,
    /// Its version, as it tells it itself: `8.0.2`.
    pub version: String,
}

impl BackendVersion {
    /// For backends to answer with.
    pub fn new(product: impl Into<String>, version: impl Into<String>) -> Self {
        Self {
            product: product.into(),
            version: version.into(),
        }
    }
}

/// `Redis 8.0.2`.
impl fmt::Display for BackendVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.product, self.version)
    }
}
