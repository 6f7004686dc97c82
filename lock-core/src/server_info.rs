//! The server that keeps the locks.

use std::fmt;

/// The server that keeps the locks, for people and for tooling. What a backend can do is in [`Capabilities`](crate::Capabilities).
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct ServerInfo {
    /// The name of the product, as its makers write it: `Redis`, `PostgreSQL`.
    pub product: String,
    /// Its version, as the server reports it: `8.0.2`.
    pub version: String,
    /// Settings of the server that the backend works with, and that put locks at risk. Each is one sentence, which says what can happen and
    /// what to set instead.
    pub warnings: Vec<String>,
}

impl ServerInfo {
    /// A server without warnings.
    pub fn new(product: impl Into<String>, version: impl Into<String>) -> Self {
        Self {
            product: product.into(),
            version: version.into(),
            warnings: Vec::new(),
        }
    }

    /// Sets the warnings.
    #[must_use]
    pub fn with_warnings(mut self, warnings: Vec<String>) -> Self {
        self.warnings = warnings;
        self
    }
}

/// `Redis 8.0.2`.
impl fmt::Display for ServerInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.product, self.version)
    }
}
