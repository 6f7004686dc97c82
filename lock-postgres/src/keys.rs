//! What a name is called on the server.

use std::sync::Arc;

use lock_core::{LockError, LockName};
use sha2::{Digest, Sha256};

/// The keys of one namespace.
///
/// Two names that share a key wait for each other, also within one client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Keys(Arc<str>);

impl Keys {
    pub(crate) fn new(namespace: &str) -> Result<Self, LockError> {
        let usable = |c: char| c.is_ascii_alphanumeric() || "-_./".contains(c);
        if namespace.is_empty() || namespace.len() > 128 || !namespace.chars().all(usable) {
            return Err(LockError::configuration(
                "a namespace has 1 to 128 letters, digits and any of - _ . /; choose another",
            ));
        }
        Ok(Self(namespace.into()))
    }

    /// The key of a name, as the server's functions for advisory locks take it.
    pub(crate) fn of(&self, name: &LockName) -> i64 {
        let hash = Sha256::new()
            .chain_update(self.0.as_bytes())
            .chain_update([0])
            .chain_update(name.as_str());
        first_eight(&hash.finalize())
    }

    /// The namespace as sessions show it: 8 hexadecimal digits.
    pub(crate) fn mark(&self) -> String {
        let hash = first_eight(&Sha256::digest(self.0.as_bytes()));
        format!("{:08x}", hash as u64 >> 32)
    }
}

fn first_eight(hash: &[u8]) -> i64 {
    hash.iter().take(8).fold(0, |key, byte| key << 8 | i64::from(*byte))
}

/// The key as people see it.
pub(crate) fn shown(key: i64) -> String {
    format!("{key:016x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_the_first_eight_bytes_of_the_hash() {
        // printf 'fencelock\0stock/10000' | sha256sum
        let key = Keys::new("fencelock").unwrap().of(&"stock/10000".parse().unwrap());
        assert_eq!(shown(key), "2797d70f4826cca3");
        let other = Keys::new("shop").unwrap().of(&"stock/10000".parse().unwrap());
        assert_ne!(key, other);
    }

    #[test]
    fn a_namespace_that_could_be_mistaken_is_refused() {
        for namespace in ["", "a b", "a:b", "é", &"x".repeat(129)] {
            assert!(Keys::new(namespace).is_err(), "{namespace}");
        }
    }
}
