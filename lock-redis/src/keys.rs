//! What the keys of a name are called.

use lock_core::{LockError, LockName};
use lock_transport::Namespace;

/// The namespace, and the keys in it.
///
/// The hash slot of a key follows from what lies between its first `{` and the first `}` after that. All keys of a name
/// begin alike up to the end of the name, so they share a slot whatever braces the name has.
#[derive(Clone, Debug)]
pub(crate) struct Keys(Namespace);

const LOCK: &str = "}:lock";
const HOLDERS: &str = "}:holders";

impl Keys {
    /// Keys under `namespace`, which must not be confused with a namespace and the start of a name.
    pub(crate) fn new(namespace: &str) -> Result<Self, LockError> {
        Ok(Self(Namespace::new(namespace)?))
    }

    fn key(&self, name: &LockName, kind: &str) -> String {
        format!("{{{}:{name}{kind}", self.0)
    }

    /// The key that says which claim holds the name alone.
    pub(crate) fn lock(&self, name: &LockName) -> String {
        self.key(name, LOCK)
    }

    /// The keys of the holds that do not exclude others: when each ends, and what is known of it.
    pub(crate) fn shares(&self, name: &LockName) -> [String; 2] {
        [HOLDERS, "}:records"].map(|kind| self.key(name, kind))
    }

    /// A key in the slot of the name that is never stored.
    pub(crate) fn never(&self, name: &LockName) -> String {
        self.key(name, "}:never")
    }

    /// The key that says since when a node of several servers has its data.
    pub(crate) fn born(&self) -> String {
        format!("{{{}:}}:born", self.0)
    }

    /// All keys of the name, in the order in which the scripts expect them.
    pub(crate) fn of(&self, name: &LockName) -> [String; 6] {
        [LOCK, "}:fence", "}:order", "}:waiters", HOLDERS, "}:records"].map(|kind| self.key(name, kind))
    }

    /// The name that a key of its holds belongs to; `None` for any other key.
    pub(crate) fn name(&self, key: &[u8]) -> Option<LockName> {
        let key = std::str::from_utf8(key).ok()?;
        let rest = key
            .strip_prefix('{')?
            .strip_prefix(self.0.as_str())?
            .strip_prefix(':')?;
        let name = rest.strip_suffix(LOCK).or_else(|| rest.strip_suffix(HOLDERS));
        LockName::new(name?).ok()
    }

    /// The glob pattern of the keys with holds of all names that start with `prefix`.
    pub(crate) fn pattern(&self, prefix: &str) -> String {
        let mut pattern = format!("{{{}:", self.0);
        for c in prefix.chars() {
            if "*?[]^-\\".contains(c) {
                pattern.push('\\');
            }
            pattern.push(c);
        }
        pattern + "*}:[lh]o[cl]*"
    }

    /// How the channels of clients begin.
    pub(crate) fn channels(&self) -> String {
        format!("{}:client:", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMES: [&str; 9] = ["a", "{a}", "a}", "}a", "a}:lock", "a}:fence", "ns:a", "a*", "é"];

    fn name(name: &str) -> LockName {
        name.parse().unwrap()
    }

    #[test]
    fn a_key_of_holds_leads_back_to_its_name_and_no_other_key_does() {
        let keys = Keys::new("ns").unwrap();
        for text in NAMES {
            let [lock, fence, order, waiters, holders, records] = keys.of(&name(text));
            for key in [&lock, &holders] {
                assert_eq!(keys.name(key.as_bytes()), Some(name(text)));
            }
            for other in [fence, order, waiters, records] {
                assert_eq!(keys.name(other.as_bytes()), None);
            }
            assert_eq!(Keys::new("n").unwrap().name(lock.as_bytes()), None);
        }
    }
}
