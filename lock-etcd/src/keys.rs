//! What the keys in etcd are called.

use lock_core::LockName;
use lock_transport::Namespace;

/// The namespace, and the keys in it.
///
/// A namespace has no colon, and the slashes of a name are escaped: so all keys of a name, and no others, begin with its
/// [`queue`](Self::queue).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Keys {
    namespace: Namespace,
}

impl Keys {
    pub(crate) fn new(namespace: Namespace) -> Self {
        Self { namespace }
    }

    /// What tokens count from.
    pub(crate) fn base(&self) -> String {
        format!("{}:base", self.namespace)
    }

    /// The key that lives as long as a shared lease.
    pub(crate) fn lease(&self, id: i64) -> String {
        format!("{}:lease/{id:016x}", self.namespace)
    }

    /// How the keys of all claims on a name begin.
    pub(crate) fn queue(&self, name: &LockName) -> String {
        format!("{}/", self.locks(name.as_str()))
    }

    /// How the keys of all claims begin whose names start with `prefix`.
    pub(crate) fn locks(&self, prefix: &str) -> String {
        let escaped = prefix.replace('%', "%25").replace('/', "%2F");
        format!("{}:lock/{escaped}", self.namespace)
    }

    /// The name that the key of a claim belongs to; `None` for any other key.
    pub(crate) fn read(&self, key: &[u8]) -> Option<LockName> {
        let key = std::str::from_utf8(key).ok()?;
        let rest = key.strip_prefix(self.namespace.as_str())?.strip_prefix(":lock/")?;
        let (escaped, _) = rest.split_once('/')?;
        LockName::new(escaped.replace("%2F", "/").replace("%25", "%")).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMES: [&str; 11] = [
        "a",
        "a/b",
        "a/",
        "/a",
        "%2F",
        "a%2Fb",
        "%",
        "%252F",
        "ns:lock/a",
        "é",
        "a b",
    ];

    fn keys_of(namespace: &str) -> Keys {
        Keys::new(Namespace::new(namespace).unwrap())
    }

    fn name(text: &str) -> LockName {
        text.parse().unwrap()
    }

    fn claim(keys: &Keys, text: &str) -> String {
        format!("{}1.0", keys.queue(&name(text)))
    }

    #[test]
    fn a_key_leads_back_to_its_name() {
        let keys = keys_of("ns");
        for text in NAMES {
            let key = claim(&keys, text);
            assert_eq!(keys.read(key.as_bytes()), Some(name(text)), "{key}");
            assert_eq!(keys_of("n").read(key.as_bytes()), None);
        }
        for other in [
            keys.base(),
            keys.lease(7),
            "ns:lock/a".to_owned(),
            "ns:lock//b".to_owned(),
        ] {
            assert_eq!(keys.read(other.as_bytes()), None, "{other}");
        }
    }

    #[test]
    fn the_keys_of_a_name_are_a_range_of_their_own() {
        let keys = keys_of("ns");
        for one in NAMES {
            for other in NAMES {
                let inside = claim(&keys, one).starts_with(&keys.queue(&name(other)));
                assert_eq!(inside, one == other, "{one} and {other}");
            }
        }
    }

    #[test]
    fn a_prefix_of_names_is_a_prefix_of_keys() {
        let keys = keys_of("ns");
        for prefix in ["", "a", "a/", "%"] {
            for name in NAMES {
                let inside = claim(&keys, name).starts_with(&keys.locks(prefix));
                // What begins with `%` may also be an escaped slash, and is looked at again.
                assert!(inside || !name.starts_with(prefix), "{prefix} and {name}");
            }
        }
    }
}
