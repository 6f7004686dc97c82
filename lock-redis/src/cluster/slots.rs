//! Which node of the cluster serves which slot.

use lock_transport::Endpoint;
use redis::Value;

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
    primaries: Vec<Endpoint>,
    replicas: Vec<Endpoint>,
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
            let (first, last) = (number(range.next()?)?, number(range.next()?)?);
            let nodes: Vec<_> = range.collect();
            slots.ids.extend(nodes.iter().filter_map(id));
            let mut nodes = nodes.into_iter().map(|node| endpoint(node, asked));
            // A node whose host the others do not know yet cannot be asked.
            let Some(primary) = nodes.next()?.ok()? else { continue };
            let primary = slots.primary(primary);
            slots
                .owners
                .get_mut(usize::from(first)..=usize::from(last))?
                .fill(primary);
            for replica in nodes {
                let replica = replica.ok()?.filter(|replica| !slots.replicas.contains(replica));
                slots.replicas.extend(replica);
            }
        }
        slots.ids.sort_unstable();
        slots.ids.dedup();
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

    pub(super) fn primaries(&self) -> &[Endpoint] {
        &self.primaries
    }

    pub(super) fn replicas(&self) -> &[Endpoint] {
        &self.replicas
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

/// The endpoint of a node: host, port, and what does not matter here. `Ok(None)` if its host is not known.
fn endpoint(node: Value, asked: &Endpoint) -> Result<Option<Endpoint>, ()> {
    let mut fields = array(node).ok_or(())?.into_iter();
    let host: Option<String> = redis::from_redis_value(fields.next().ok_or(())?).map_err(|_| ())?;
    let port = fields.next().and_then(number).ok_or(())?;
    let host = match host.as_deref() {
        None | Some("") => asked.host.clone(),
        Some("?") => return Ok(None),
        Some(host) => host.to_owned(),
    };
    // It has not told the others its address yet.
    if port == 0 {
        return Ok(None);
    }
    Ok(Some(Endpoint::new(host, port)))
}

/// The third field of a node.
fn id(node: &Value) -> Option<String> {
    match node {
        Value::Array(fields) => redis::from_redis_value(fields.get(2)?.clone()).ok(),
        _ => None,
    }
}

fn array(value: Value) -> Option<Vec<Value>> {
    match value {
        Value::Array(items) => Some(items),
        _ => None,
    }
}

fn number(value: Value) -> Option<u16> {
    redis::from_redis_value(value).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::Keys;

    fn asked() -> Endpoint {
        Endpoint::new("seed", 7000)
    }

    fn answer(text: &str) -> Option<Slots> {
        Slots::read(redis::parse_redis_value(text.as_bytes()).unwrap(), &asked())
    }

    #[test]
    fn slots_are_those_that_the_server_computes() {
        // By CLUSTER KEYSLOT.
        for (key, expected) in [
            ("123456789", 12739),
            ("{fencelock:a}:lock", 1421),
            ("{fencelock:b}:lock", 13806),
        ] {
            assert_eq!(slot(key), expected, "{key}");
        }
    }

    #[test]
    fn all_keys_of_a_name_are_in_one_slot() {
        let keys = Keys::new("ns").unwrap();
        for name in ["a", "{a}", "a}", "}a", "{", "}", "{}", "a{b}c", "é"] {
            let name = name.parse().unwrap();
            let expected = slot(&keys.lock(&name));
            let all = keys.of(&name).into_iter().chain([keys.never(&name)]);
            for key in all {
                assert_eq!(slot(&key), expected, "{key}");
            }
        }
    }

    #[test]
    fn an_answer_tells_who_serves_what() {
        let node = |host: &str, port: u16| format!("*3\r\n{host}:{port}\r\n$1\r\nx\r\n");
        let text = format!(
            "*3\r\n*4\r\n:0\r\n:99\r\n{}{}*3\r\n:100\r\n:100\r\n{}*3\r\n:200\r\n:16383\r\n{}",
            node("$1\r\na\r\n", 1),
            node("$1\r\nb\r\n", 2),
            node("_\r\n", 3),
            node("$1\r\n?\r\n", 4),
        );
        let mut slots = answer(&text).unwrap();
        assert_eq!(slots.owner(0), Some(&Endpoint::new("a", 1)));
        assert_eq!(slots.owner(99), Some(&Endpoint::new("a", 1)));
        assert_eq!(slots.owner(100), Some(&Endpoint::new("seed", 3)));
        assert_eq!((slots.owner(101), slots.owner(200)), (None, None));
        assert_eq!(slots.unserved(), 16384 - 101);
        assert_eq!(slots.replicas(), [Endpoint::new("b", 2)]);
        slots.moved(99, Endpoint::new("b", 2));
        assert_eq!(slots.owner(99), Some(&Endpoint::new("b", 2)));
        assert_eq!(slots.owner(98), Some(&Endpoint::new("a", 1)));
        assert_eq!(slots.primaries().len(), 3);
    }

    #[test]
    fn what_is_no_answer_is_refused() {
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
}
