//! What the keys in etcd are called.

use lock_core::{LockError, LockName, OwnerId};

/// The namespace, and the keys in it.
///
/// A namespace has no colon, and a name's slashes are escaped: so all keys of a name, and no others, begin with its
/// [`queue`](Self::queue).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Keys {
    namespace: String,
}

impl Keys {
    /// Keys under `namespace`, which must not be confused with a namespace and the start of a key.
    pub(crate) fn new(namespace: &str) -> Result<Self, LockError> {
        let fits = |c: char| c.is_ascii_alphanumeric() || "-_./".contains(c);
        if namespace.is_empty() || namespace.len() > 128 || !namespace.chars().all(fits) {
            return Err(LockError::configuration(
                "the namespace cannot be used; give 1 to 128 letters, digits, and any of - _ . /",
            ));
        }
        Ok(Self {
            namespace: namespace.to_owned(),
        })
    }

    /// What tokens count from.
    pub(crate) fn base(&self) -> String {
        format!("{}:base", self.namespace)
    }

    /// The key that lives as long as a shared lease.
    pub(crate) fn lease(&self, id: i64) -> String {
        format!("{}:lease/{id:016x}", self.namespace)
    }

    /// The key that lives as long as a shared lease, unless a lock on that lease is released by force.
    pub(crate) fn unforced(&self, id: i64) -> String {
        format!("{}:unforced/{id:016x}", self.namespace)
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
        let rest = key.strip_prefix(&*self.namespace)?.strip_prefix(":lock/")?;
        let (escaped, _) = rest.split_once('/')?;
        LockName::new(escaped.replace("%2F", "/").replace("%25", "%")).ok()
    }
}

/// How the last part of a reservation's key begins. The key of a claim begins with the number of its client, in hexadecimal.
const RESERVED: &str = "reserved.";

/// The key of the reservation of that owner's claim, in the queue that `beside` is, or in which that key is.
pub(crate) fn reservation(beside: &str, owner: OwnerId) -> String {
    let queue = beside.rsplit_once('/').map_or("", |(queue, _)| queue);
    format!("{queue}/{RESERVED}{owner}")
}

/// Whether a key of a queue is that of a reservation, and not that of a claim.
pub(crate) fn is_reservation(key: &[u8]) -> bool {
    let last = key.rsplit(|byte| *byte == b'/').next();
    last.is_some_and(|last| last.starts_with(RESERVED.as_bytes()))
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

    fn name(text: &str) -> LockName {
        text.parse().unwrap()
    }

    fn claim(keys: &Keys, text: &str) -> String {
        format!("{}1.0.0", keys.queue(&name(text)))
    }

    #[test]
    fn a_key_leads_back_to_its_name() {
        let keys = Keys::new("ns").unwrap();
        for text in NAMES {
            let key = claim(&keys, text);
            assert_eq!(keys.read(key.as_bytes()), Some(name(text)), "{key}");
            assert_eq!(Keys::new("n").unwrap().read(key.as_bytes()), None);
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
        let keys = Keys::new("ns").unwrap();
        for one in NAMES {
            for other in NAMES {
                let inside = claim(&keys, one).starts_with(&keys.queue(&name(other)));
                assert_eq!(inside, one == other, "{one} and {other}");
            }
        }
    }

    #[test]
    fn the_key_of_a_reservation_is_in_the_queue_of_its_name_and_told_from_that_of_a_claim() {
        let keys = Keys::new("ns").unwrap();
        let owner = OwnerId::random();
        for text in NAMES {
            let (queue, claim) = (keys.queue(&name(text)), claim(&keys, text));
            let reserved = reservation(&claim, owner);
            assert_eq!(reserved, reservation(&queue, owner));
            assert!(reserved.starts_with(&queue));
            assert_eq!(keys.read(reserved.as_bytes()), Some(name(text)));
            assert!(is_reservation(reserved.as_bytes()) && !is_reservation(claim.as_bytes()));
        }
        assert!(!is_reservation(claim(&keys, "reserved.1").as_bytes()));
    }

    #[test]
    fn a_prefix_of_names_is_a_prefix_of_keys() {
        let keys = Keys::new("ns").unwrap();
        for prefix in ["", "a", "a/", "%"] {
            for name in NAMES {
                let inside = claim(&keys, name).starts_with(&keys.locks(prefix));
                // What begins with `%` may also be an escaped slash, and is looked at again.
                assert!(inside || !name.starts_with(prefix), "{prefix} and {name}");
            }
        }
    }

    #[test]
    fn a_namespace_that_could_be_part_of_a_key_is_refused() {
        for bad in ["", "a:b", "a b", "a%", "é", &"x".repeat(129)] {
            assert!(Keys::new(bad).is_err(), "{bad}");
        }
    }
}
