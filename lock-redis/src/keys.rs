//! What the keys of a name are called.

use lock_core::{LockError, LockName};
use lock_transport::Namespace;

/// The namespace, and the keys in it.
///
/// The hash slot of a key follows from what lies between its first `{` and the first `}` after that. All keys of a name
/// begin alike up to the end of the name, so they share a slot whatever braces the name has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Keys {
    namespace: Namespace,
}

const LOCK: &str = "}:lock";
const HOLDERS: &str = "}:holders";

impl Keys {
    /// Keys under `namespace`, which must not be confused with a namespace and the start of a name.
    pub(crate) fn new(namespace: &str) -> Result<Self, LockError> {
        let namespace = Namespace::new(namespace)?;
        Ok(Self { namespace })
    }

    /// The key that says which claim holds the name alone.
    pub(crate) fn lock(&self, name: &LockName) -> String {
        format!("{{{}:{name}{LOCK}", self.namespace)
    }

    /// A key that no name has.
    pub(crate) fn unused(&self) -> String {
        format!("{{{}:}}:none", self.namespace)
    }

    /// A key in the slot of the name that is never stored.
    pub(crate) fn never(&self, name: &LockName) -> String {
        format!("{{{}:{name}}}:never", self.namespace)
    }

    /// The key that says since when a node of several servers has its data.
    pub(crate) fn born(&self) -> String {
        format!("{{{}:}}:born", self.namespace)
    }

    /// All keys of the name, in the order in which the scripts expect them.
    pub(crate) fn of(&self, name: &LockName) -> [String; 6] {
        let key = |kind| format!("{{{}:{name}}}:{kind}", self.namespace);
        let [holders, records] = self.shares(name);
        [
            self.lock(name),
            key("fence"),
            key("order"),
            key("waiters"),
            holders,
            records,
        ]
    }

    /// The keys of the holds that do not exclude others: when each ends, and what is known of it.
    pub(crate) fn shares(&self, name: &LockName) -> [String; 2] {
        [HOLDERS, "}:records"].map(|kind| format!("{{{}:{name}{kind}", self.namespace))
    }

    /// The name that a key of its holds belongs to; `None` for any other key.
    pub(crate) fn name(&self, key: &[u8]) -> Option<LockName> {
        let key = std::str::from_utf8(key).ok()?;
        let rest = key
            .strip_prefix('{')?
            .strip_prefix(self.namespace.as_str())?
            .strip_prefix(':')?;
        let name = rest.strip_suffix(LOCK).or_else(|| rest.strip_suffix(HOLDERS));
        LockName::new(name?).ok()
    }

    /// The glob pattern of the keys with holds of all names that start with `prefix`.
    pub(crate) fn pattern(&self, prefix: &str) -> String {
        let mut pattern = format!("{{{}:", self.namespace);
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
        format!("{}:client:", self.namespace)
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

    #[test]
    fn all_keys_of_a_name_have_one_hash_tag() {
        let tag = |key: &str| {
            let start = key.find('{').unwrap();
            let end = start + key[start..].find('}').unwrap();
            assert!(end > start + 1, "an empty tag is none: {key}");
            key[start..end].to_owned()
        };
        for text in NAMES {
            let [lock, others @ ..] = Keys::new("ns").unwrap().of(&name(text));
            for other in others {
                assert_eq!(tag(&lock), tag(&other));
            }
        }
    }
}
