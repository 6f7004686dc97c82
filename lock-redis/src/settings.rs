//! What a client and its connections share.

use std::collections::HashMap;
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use lock_core::{Clock, Executor, LockError, Options, OwnerId, Stamp};

use crate::config::{RedisConfig, Target};
use crate::keys::Keys;
use crate::subscriptions::Subscriptions;

const DAY: Duration = Duration::from_secs(24 * 60 * 60);
const SECOND: Duration = Duration::from_secs(1);
const RETENTION: RangeInclusive<Duration> = SECOND..=DAY.saturating_mul(365);
const MAX_TTL: RangeInclusive<Duration> = SECOND..=DAY;

/// What a client and its connections share. Nodes of several independent ones differ in server, credentials and database alone.
#[derive(Clone)]
pub(crate) struct Settings {
    pub(crate) config: RedisConfig,
    pub(crate) keys: Keys,
    pub(crate) executor: Executor,
    pub(crate) clock: Clock,
    began: Stamp,
    client: String,
    pub(crate) subscriptions: Subscriptions,
    /// If the server is one of several independent ones.
    pub(crate) node: Option<Membership>,
}

impl Settings {
    pub(crate) fn new(mut config: RedisConfig) -> Result<Self, LockError> {
        if !RETENTION.contains(&config.counter_retention) {
            return Err(LockError::configuration(
                "counters cannot be kept for that time; give a counter_retention of 1s to 365days",
            ));
        }
        if !MAX_TTL.contains(&config.max_ttl) {
            return Err(LockError::configuration(
                "max_ttl cannot be used; give a time of 1s to 1day, such as 1m",
            ));
        }
        config.op_timeout = Options::usable_op_timeout(config.op_timeout)?;
        match (&config.target, &config.nodes) {
            (_, Some(nodes)) if [3, 5, 7].contains(&nodes.len()) => {}
            (_, Some(nodes)) => {
                return Err(LockError::configuration(format!(
                    "{} cannot be the number of nodes; give 3, 5 or 7 independent servers: an even number tolerates no more failures \
                     than one less",
                    nodes.len()
                )));
            }
            (Target::Sentinels(service), _) if service.sentinels.is_empty() || service.name.is_empty() => {
                return Err(LockError::configuration(
                    "there is no sentinel, or no name of a service; give at least one sentinel and the name that it knows the service by",
                ));
            }
            (Target::Cluster(nodes), _) if nodes.is_empty() => {
                return Err(LockError::configuration(
                    "no node of the cluster is given; give one at least",
                ));
            }
            (Target::Cluster(_), _) if config.database != 0 => {
                return Err(LockError::configuration(format!(
                    "a Redis Cluster has no database {}; leave the number out, and use namespaces to keep locks apart",
                    config.database
                )));
            }
            _ => {}
        }
        let clock = Clock::system();
        Ok(Self {
            keys: Keys::new(&config.namespace)?,
            executor: Executor::new(config.runtime.clone()),
            began: clock.now(),
            clock,
            client: OwnerId::random().to_string(),
            subscriptions: Subscriptions::default(),
            node: None,
            config,
        })
    }

    /// The settings of each of the nodes, if there are several independent ones.
    pub(crate) fn nodes(&self) -> Result<Vec<Self>, LockError> {
        let nodes = self.config.nodes.as_deref().unwrap_or_default();
        let (found, mut places) = (Found::default(), HashMap::new());
        let node = |(number, node): (usize, &RedisConfig)| {
            if node.nodes.is_some() || !matches!(node.target, Target::Server(_)) {
                return Err(LockError::configuration(
                    "a node of several is one server; sentinels and clusters replace servers, and a failover would lose what a node has \
                     granted: give the address of each server",
                ));
            }
            if let Some(other) = places.insert(node.target.to_string(), number) {
                return Err(same(other, number));
            }
            let config = RedisConfig {
                target: node.target.clone(),
                nodes: None,
                login: node.login.clone(),
                database: node.database,
                allow_unsafe: node.allow_unsafe,
                ..self.config.clone()
            };
            let node = Some(Membership {
                number,
                found: Arc::clone(&found),
                nodes: nodes.len(),
            });
            Ok(Self {
                config,
                node,
                ..self.clone()
            })
        };
        nodes.iter().enumerate().map(node).collect()
    }

    pub(crate) fn is_cluster(&self) -> bool {
        matches!(self.config.target, Target::Cluster(_))
    }

    /// The client's name at the server with that run id, which is the end of the channel that the client is subscribed to there. In a cluster,
    /// no two nodes know the same channel: a message that no client received at its node is not delivered by another.
    pub(crate) fn client_at(&self, run_id: &str) -> String {
        match self.is_cluster() {
            true => format!("{}/{run_id}", self.client),
            false => self.client.clone(),
        }
    }

    /// Microseconds since the client began: what a stamp is called on the server.
    pub(crate) fn micros(&self, stamp: Stamp) -> u64 {
        u64::try_from(stamp.since(self.began).as_micros()).unwrap_or(u64::MAX)
    }

    /// The stamp that is called so on the server.
    pub(crate) fn stamp(&self, micros: u64) -> Stamp {
        self.began + Duration::from_micros(micros)
    }
}

/// Which of several independent nodes a server is.
#[derive(Clone)]
pub(crate) struct Membership {
    number: usize,
    found: Found,
    /// How many nodes there are.
    pub(crate) nodes: usize,
}

/// The run ids of the servers that were found as each of the nodes.
type Found = Arc<Mutex<HashMap<usize, String>>>;

impl Membership {
    /// Takes note of the server that was found as this node, and refuses one that was found as another node: its failure would count twice.
    pub(crate) fn found(&self, run_id: &str) -> Result<(), LockError> {
        let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        let other = found.iter().find(|(other, id)| **other != self.number && *id == run_id);
        if let Some((other, _)) = other {
            return Err(same(*other, self.number));
        }
        found.insert(self.number, run_id.to_owned());
        Ok(())
    }
}

/// Two nodes, by their numbers from 0, are one server.
fn same(one: usize, other: usize) -> LockError {
    let (one, other) = (one.min(other) + 1, one.max(other) + 1);
    LockError::configuration(format!(
        "nodes {one} and {other} are the same server, whose failure would count twice; give independent servers"
    ))
}
