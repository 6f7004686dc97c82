//! What nodes say of the slots: which node serves which, and that another one is to be asked.

use lock_core::LockError;
use lock_transport::Endpoint;
use redis::{ErrorKind, FromRedisValue, RedisError, ServerErrorKind, Value};

use crate::error::Failure;

/// How many slots a cluster has.
pub(super) const SLOTS: u16 = 16384;

/// The slot of a key, which follows from the text between its first `{` and the first `}` after that. Every key of a lock has some there.
pub(super) fn slot(key: &str) -> u16 {
    let tag = key.split_once('{').and_then(|(_, rest)| rest.split_once('}'));
    let tag = tag.map_or(key, |(tag, _)| tag);
    crc16::State::<crc16::XMODEM>::calculate(tag.as_bytes()) % SLOTS
}

/// The nodes, and which slots each primary serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Slots {
    /// For each slot the place of its primary in `primaries`, or [`NONE`].
    owners: Vec<u16>,
    pub(super) primaries: Vec<Endpoint>,
    pub(super) replicas: Vec<Endpoint>,
    /// What the nodes call each other, which is different in every cluster.
    ids: Vec<String>,
}

const NONE: u16 = u16::MAX;

impl Slots {
    /// No nodes.
    pub(super) fn empty() -> Self {
        Self {
            owners: vec![NONE; usize::from(SLOTS)],
            primaries: Vec::new(),
            replicas: Vec::new(),
            ids: Vec::new(),
        }
    }

    /// Reads the answer to `CLUSTER SLOTS` from the node at `asked`; `None` if it is something else.
    pub(super) fn read(answer: Value, asked: &Endpoint) -> Option<Self> {
        let mut slots = Self::empty();
        for range in array(answer)? {
            let mut range = array(range)?.into_iter();
            let (first, last): (u16, u16) = (field(range.next())?, field(range.next())?);
            let mut nodes = Vec::new();
            for node in range {
                // Host, port, id, and what does not matter here.
                let mut node = array(node)?.into_iter();
                let (host, port): (Option<String>, u16) = (field(node.next())?, field(node.next())?);
                slots.ids.extend(field::<String>(node.next()));
                // One that has not told the others its address yet has no port.
                let host = Some(host.unwrap_or_default()).filter(|_| port > 0);
                nodes.push(host.and_then(|host| endpoint(&host, port, asked)));
            }
            let mut nodes = nodes.into_iter();
            // A node whose host the others do not know yet cannot be asked.
            let Some(primary) = nodes.next()? else { continue };
            let (primary, served) = (slots.primary(primary), usize::from(first)..=usize::from(last));
            slots.owners.get_mut(served)?.fill(primary);
            slots.replicas.extend(nodes.flatten());
        }
        Some(slots)
    }

    /// Whether both are of one cluster, as far as can be known: a node is in both.
    pub(super) fn is_same_cluster(&self, other: &Self) -> bool {
        self.ids.is_empty() || other.ids.is_empty() || self.ids.iter().any(|id| other.ids.contains(id))
    }

    /// The primary of a slot, if it has one.
    pub(super) fn owner(&self, slot: u16) -> Option<&Endpoint> {
        self.primaries.get(usize::from(*self.owners.get(usize::from(slot))?))
    }

    /// A node said that the slot is served there.
    pub(super) fn moved(&mut self, slot: u16, to: Endpoint) {
        let primary = self.primary(to);
        if let Some(owner) = self.owners.get_mut(usize::from(slot)) {
            *owner = primary;
        }
    }

    /// How many slots have no primary.
    pub(super) fn unserved(&self) -> usize {
        self.owners.iter().filter(|owner| **owner == NONE).count()
    }

    fn primary(&mut self, endpoint: Endpoint) -> u16 {
        let known = self.primaries.iter().position(|known| *known == endpoint);
        let place = known.unwrap_or_else(|| {
            self.primaries.push(endpoint);
            self.primaries.len() - 1
        });
        u16::try_from(place).unwrap_or(NONE)
    }
}

/// A node as another one tells it: without a host if that is the one that was asked, and with `?` if it does not announce one.
fn endpoint(host: &str, port: u16, asked: &Endpoint) -> Option<Endpoint> {
    match host {
        "" => Some(Endpoint::new(&*asked.host, port)),
        "?" => None,
        host => Some(Endpoint::new(host, port)),
    }
}

fn array(value: Value) -> Option<Vec<Value>> {
    match value {
        Value::Array(items) => Some(items),
        _ => None,
    }
}

fn field<T: FromRedisValue>(value: Option<Value>) -> Option<T> {
    redis::from_redis_value(value?).ok()
}

/// What to do after a failure.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Redirect {
    /// Ask the node at that place, which serves the slot from now on.
    Moved(Endpoint),
    /// Ask the node at that place once: the slot is being moved to it, and the keys are there already.
    Moving(Endpoint),
    /// Ask again: the slot is being moved, and some keys are here and some there.
    Again,
    /// Find out which node serves the slot, and ask again.
    Refused,
    /// Nothing; the caller gets the failure.
    Fail,
}

impl Redirect {
    /// What to do after that failure of a request to the node at `asked`.
    pub(super) fn after(failure: &Failure, asked: Option<&Endpoint>) -> Self {
        use ServerErrorKind as Kind;
        let error = match failure {
            Failure::Redis(error) => error,
            // While connecting. A connection is closed when its node has left the cluster.
            Failure::Broken | Failure::Known(LockError::Unavailable { .. } | LockError::Closed { .. }) => {
                return Self::Refused;
            }
            _ => return Self::Fail,
        };
        match error.kind() {
            ErrorKind::Server(Kind::Moved) => redirected(error, asked).map_or(Self::Refused, Self::Moved),
            ErrorKind::Server(Kind::Ask) => redirected(error, asked).map_or(Self::Refused, Self::Moving),
            ErrorKind::Server(Kind::TryAgain) => Self::Again,
            ErrorKind::Server(Kind::ClusterDown | Kind::MasterDown | Kind::ReadOnly | Kind::BusyLoading) => {
                Self::Refused
            }
            _ if failure.is_lost_connection() => Self::Refused,
            _ => Self::Fail,
        }
    }
}

fn redirected(error: &RedisError, asked: Option<&Endpoint>) -> Option<Endpoint> {
    let (host, port) = error.redirect_node()?.0.rsplit_once(':')?;
    endpoint(host, port.parse().ok()?, asked?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::Keys;

    fn asked() -> Endpoint {
        Endpoint::new("seed", 7000)
    }

    #[test]
    fn all_keys_of_a_name_are_in_the_slot_that_the_server_computes() {
        // By CLUSTER KEYSLOT.
        for (key, expected) in [
            ("123456789", 12739),
            ("{fencelock:a}:lock", 1421),
            ("{fencelock:b}:lock", 13806),
        ] {
            assert_eq!(slot(key), expected, "{key}");
        }
        let keys = Keys::new("ns").unwrap();
        for name in ["a", "{a}", "a}", "}a", "{", "}", "{}", "a{b}c", "é"] {
            let name = name.parse().unwrap();
            for key in keys.of(&name).into_iter().chain([keys.never(&name)]) {
                assert_eq!(slot(&key), slot(&keys.lock(&name)), "{key}");
            }
        }
    }

    #[test]
    fn an_answer_tells_who_serves_what() {
        let answer = |text: &str| Slots::read(redis::parse_redis_value(text.as_bytes()).unwrap(), &asked());
        let node = |host: &str, port: u16| format!("*3\r\n{host}:{port}\r\n$1\r\nx\r\n");
        let text = format!(
            "*3\r\n*4\r\n:0\r\n:99\r\n{}{}*3\r\n:100\r\n:100\r\n{}*3\r\n:200\r\n:16383\r\n{}",
            node("$1\r\na\r\n", 1),
            node("$1\r\nb\r\n", 2),
            node("_\r\n", 3),
            node("$1\r\n?\r\n", 4),
        );
        let mut slots = answer(&text).unwrap();
        let [a, b] = [("a", 1), ("b", 2)].map(|(host, port)| Endpoint::new(host, port));
        assert_eq!((slots.owner(0), slots.owner(99)), (Some(&a), Some(&a)));
        assert_eq!(slots.owner(100), Some(&Endpoint::new("seed", 3)));
        assert_eq!((slots.owner(101), slots.owner(200)), (None, None));
        assert_eq!(slots.unserved(), 16384 - 101);
        assert_eq!(slots.replicas, std::slice::from_ref(&b));
        slots.moved(99, b.clone());
        assert_eq!((slots.owner(99), slots.owner(98)), (Some(&b), Some(&a)));
        assert_eq!(slots.primaries.len(), 3);
        for text in [
            "+OK\r\n",
            "*1\r\n:1\r\n",
            "*1\r\n*2\r\n:1\r\n:2\r\n",
            "*1\r\n*3\r\n:1\r\n:16384\r\n*2\r\n$1\r\na\r\n:1\r\n",
            "*1\r\n*3\r\n:2\r\n:1\r\n*2\r\n$1\r\na\r\n$1\r\nx\r\n",
        ] {
            assert_eq!(answer(text), None, "{text:?}");
        }
        assert_eq!(answer("*0\r\n").unwrap().unserved(), 16384);
    }

    #[test]
    fn what_nodes_answer_is_understood() {
        let there = Endpoint::new("10.0.0.1", 7001);
        for (line, redirect) in [
            ("MOVED 1421 10.0.0.1:7001", Redirect::Moved(there.clone())),
            ("MOVED 1421 :7001", Redirect::Moved(Endpoint::new("seed", 7001))),
            ("MOVED 1421 ::1:7001", Redirect::Moved(Endpoint::new("::1", 7001))),
            ("ASK 1421 10.0.0.1:7001", Redirect::Moving(there)),
            ("MOVED 1421 a:x", Redirect::Refused),
            ("MOVED 1421", Redirect::Refused),
            (
                "TRYAGAIN Multiple keys request during rehashing of slot",
                Redirect::Again,
            ),
            ("CLUSTERDOWN Hash slot not served", Redirect::Refused),
            ("LOADING Redis is loading", Redirect::Refused),
            ("READONLY You can't write", Redirect::Refused),
            ("NOPERM no", Redirect::Fail),
            ("OOM command not allowed", Redirect::Fail),
            ("ERR other", Redirect::Fail),
        ] {
            let value = redis::parse_redis_value(format!("-{line}\r\n").as_bytes()).unwrap();
            let error = value.extract_error().unwrap_err();
            assert_eq!(Redirect::after(&error.into(), Some(&asked())), redirect, "{line}");
        }
    }
}
