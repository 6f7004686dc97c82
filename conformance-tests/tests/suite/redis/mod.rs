//! What the suite needs to know of the Redis backend, on one server, behind sentinels, in a cluster, and on several independent servers.

mod disturbance;
mod host;
mod resource;
mod role;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use conformance_tests::{Fault, Harness, Injection, Namespace, Resource};
use futures_util::future::try_join_all;
use lock_core::{DistributedLock, LockError, LockName, OwnerId};
use lock_redis::RedisConfig;
use lock_redis::redis::aio::MultiplexedConnection;
use lock_redis::redis::{AsyncConnectionConfig, Client, Cmd, FromRedisValue, RedisError, Value};
use test_servers::Kind;
use tokio::runtime::Handle;

use crate::hosts::{Hosts, locked};
use disturbance::Disturbance;
pub(crate) use host::Topology;
use host::{Host, Place};
use resource::FencedKey;
use role::{PASSWORD, USER, rule};

/// Tells a child process where the servers of its namespace are.
const PLACE: &str = "FENCELOCK_CONFORMANCE_REDIS";

/// How long the harness waits for a server that it looks at.
const LONGEST_LOOK: Duration = Duration::from_secs(10);

/// One server for all cases at once may be slow on a small machine.
const OP_TIMEOUT: Duration = Duration::from_secs(30);

/// The longest ttl of Redlock, for which nodes without data grant nothing.
const MAX_TTL: Duration = Duration::from_secs(20);

pub(crate) struct RedisHarness {
    title: String,
    kind: &'static Kind,
    topology: Topology,
    hosts: Hosts<Host>,
    disturbance: Option<Arc<Disturbance>>,
    /// What looks at servers, for each namespace, as each has a runtime of its own, and for each server.
    admins: Mutex<HashMap<(String, String), MultiplexedConnection>>,
}

impl RedisHarness {
    pub(crate) fn new(kind: &'static Kind, topology: Topology) -> Self {
        Self {
            title: match topology {
                Topology::Alone => kind.title().to_owned(),
                Topology::Watched => "Redis Sentinel".to_owned(),
                Topology::Cluster => "Redis Cluster".to_owned(),
                Topology::Redlock(count) => format!("Redlock, {count} nodes"),
            },
            kind,
            topology,
            hosts: Hosts::new(move |is_own| Host::start(kind, topology, is_own)),
            disturbance: None,
            admins: Mutex::default(),
        }
    }

    /// With a minority of the nodes that is stopped, killed, or emptied all the time, except where a case has nodes of its own.
    pub(crate) fn disturbed(self) -> Self {
        Self {
            title: format!("{}, a minority failing", self.title),
            disturbance: Some(Arc::default()),
            ..self
        }
    }

    /// What disturbs the servers of the namespace.
    fn disturbance(&self, namespace: &Namespace) -> Option<&Arc<Disturbance>> {
        let disturbance = self.disturbance.as_ref();
        disturbance.filter(|_| !namespace.wants_own_server() && std::env::var(PLACE).is_err())
    }

    async fn place(&self, namespace: &Namespace) -> Result<Place, LockError> {
        if let Ok(told) = std::env::var(PLACE) {
            return Ok(Place::of_told(&told));
        }
        let host = self.hosts.of(namespace).await?;
        if let Some(disturbance) = self.disturbance(namespace) {
            disturbance.begin(host.nodes(), namespace.name());
        }
        Ok(host.place())
    }

    /// A client as a user who may do no more than a user should be allowed to.
    async fn connect(
        &self,
        namespace: &Namespace,
        place: Place,
        op_timeout: Duration,
        runtime: Option<Handle>,
    ) -> Result<Arc<dyn DistributedLock>, LockError> {
        if let Topology::Redlock(count) = self.topology {
            let nodes = place.servers[..count].iter().map(|url| RedisConfig::from_url(url));
            let config = RedisConfig::redlock(nodes.collect::<Result<Vec<_>, _>>()?).max_ttl(MAX_TTL);
            let config = config.op_timeout(op_timeout).namespace(namespace.name());
            let mut config = config.credentials(USER, PASSWORD);
            if let Some(runtime) = runtime {
                config = config.runtime(runtime);
            }
            return Ok(Arc::new(config.connect().await?));
        }
        let config = RedisConfig::from_url(&place.url)?.op_timeout(op_timeout);
        let mut config = config.namespace(namespace.name()).credentials(USER, PASSWORD);
        if let Some(runtime) = runtime {
            config = config.runtime(runtime);
        }
        Ok(Arc::new(config.connect().await?))
    }

    /// The answers of the server that has the key, or of all that grant locks. Of nodes that are disturbed, of those that answer.
    async fn ask<T>(&self, namespace: &Namespace, key: Option<&str>, command: &Cmd) -> Result<Vec<T>, LockError>
    where
        T: FromRedisValue,
    {
        let servers = self.place(namespace).await?.servers;
        let nodes = match (self.topology, key) {
            (Topology::Redlock(count), _) => &servers[..count],
            (Topology::Cluster, Some(key)) => {
                let node = self.node_of(namespace, &servers, key).await?;
                &servers[node..=node]
            }
            _ => &servers[..],
        };
        let disturbance = self.disturbance(namespace);
        let ask = async |(node, url): (usize, &String)| {
            if disturbance.is_some_and(|disturbance| disturbance.is_away(node)) {
                return Ok(None);
            }
            match self.ask_one(namespace, url, command).await {
                Ok(answer) => Ok(Some(answer)),
                // It may have failed meanwhile, and be back already.
                Err(_) if disturbance.is_some() => Ok(None),
                Err(error) => Err(error),
            }
        };
        let answers = try_join_all(nodes.iter().enumerate().map(ask)).await?;
        Ok(answers.into_iter().flatten().collect())
    }

    /// Which node of a cluster serves the key, as the slots are divided.
    async fn node_of(&self, namespace: &Namespace, nodes: &[String], key: &str) -> Result<usize, LockError> {
        let question = command("CLUSTER KEYSLOT").arg(key).clone();
        let slot: usize = self.ask_one(namespace, &nodes[0], &question).await?;
        let node = (0..nodes.len()).rev().find(|part| slot >= part * 16384 / nodes.len());
        Ok(node.unwrap_or_default())
    }

    /// By a connection that stays, since cases look every few milliseconds.
    async fn ask_one<T: FromRedisValue>(
        &self,
        namespace: &Namespace,
        url: &str,
        command: &Cmd,
    ) -> Result<T, LockError> {
        let place = (namespace.name().to_owned(), url.to_owned());
        let known = locked(&self.admins).get(&place).cloned();
        if let Some(mut known) = known {
            match command.query_async(&mut known).await {
                // The server was restarted, or its address is that of another one now.
                Err(error) if error.is_io_error() || error.is_connection_dropped() => {}
                answer => return answer.map_err(failed),
            }
        }
        let mut connection = connect(url).await?;
        let answer = command.query_async(&mut connection).await;
        locked(&self.admins).insert(place, connection);
        answer.map_err(failed)
    }

    /// A stranger's record takes the place of the holder's.
    async fn steal(&self, namespace: &Namespace, name: &LockName) -> Result<Injection, LockError> {
        let (lock, counter) = (key(namespace, name, "lock"), key(namespace, name, "fence"));
        let count = command("INCR").arg(&counter).clone();
        let tokens: Vec<u64> = self.ask(namespace, Some(&counter), &count).await?;
        let token = tokens.into_iter().max().unwrap_or_default();
        let stranger = format!("1 {} {token} 0 stranger 0 host", OwnerId::random());
        let count = command("SET").arg(&counter).arg(token).clone();
        let steal = command("SET").arg(&lock).arg(stranger).arg("XX").arg("KEEPTTL").clone();
        for step in [count, steal] {
            self.ask::<Value>(namespace, Some(&lock), &step).await?;
        }
        Ok(Injection::Done)
    }

    /// What is done to whole servers is felt by all who use them.
    async fn inject_into_servers(&self, namespace: &Namespace, fault: &Fault) -> Result<Injection, LockError> {
        if !self.hosts.shared().await?.is_ours() {
            return Ok(Injection::NotPossible);
        }
        if !namespace.wants_own_server() {
            return Ok(Injection::NeedsOwnServer);
        }
        let step = match fault {
            Fault::DeleteAll => command("FLUSHALL"),
            Fault::Revoke => command("ACL SETUSER").arg(USER).arg("resetkeys").clone(),
            Fault::Permit => command("ACL SETUSER").arg(rule(self.topology)).clone(),
            Fault::Full => command("CONFIG SET maxmemory 1"),
            Fault::Room => command("CONFIG SET maxmemory 0"),
            fault => return self.hosts.of(namespace).await?.inject(fault).await,
        };
        self.ask::<Value>(namespace, None, &step).await?;
        Ok(Injection::Done)
    }
}

#[async_trait]
impl Harness for RedisHarness {
    fn name(&self) -> &str {
        &self.title
    }

    fn known_skips(&self) -> Option<&str> {
        Some(match self.topology {
            Topology::Cluster => include_str!("../skips/redis-cluster.txt"),
            Topology::Redlock(_) if self.disturbance.is_some() => include_str!("../skips/redlock-failing.txt"),
            Topology::Redlock(_) => include_str!("../skips/redlock.txt"),
            _ if !self.kind.is_started_here() => return None,
            _ => include_str!("../skips/redis.txt"),
        })
    }

    async fn begin(&self) -> Result<Option<String>, LockError> {
        let host = self.hosts.shared().await?;
        if let Some(disturbance) = &self.disturbance {
            let disturbing = Arc::clone(disturbance).go_on(Arc::clone(&host));
            lock_core::background()?.spawn(disturbing);
        }
        Ok(Some(host.to_string()))
    }

    async fn client(&self, namespace: &Namespace) -> Result<Arc<dyn DistributedLock>, LockError> {
        let place = self.place(namespace).await?;
        self.connect(namespace, place, OP_TIMEOUT, None).await
    }

    async fn client_on(&self, namespace: &Namespace, runtime: Handle) -> Result<Arc<dyn DistributedLock>, LockError> {
        let place = self.place(namespace).await?;
        self.connect(namespace, place, OP_TIMEOUT, Some(runtime)).await
    }

    /// Of the nodes of Redlock, the one without which the client at a proxy has no majority. Nodes of a cluster tell clients of each other.
    async fn address(&self, namespace: &Namespace) -> Result<Option<String>, LockError> {
        if self.topology == Topology::Cluster || self.disturbance.is_some() {
            return Ok(None);
        }
        let host = self.hosts.of(namespace).await?;
        Ok(Some(host.nodes()[0].authority().to_owned()))
    }

    async fn client_at(
        &self,
        namespace: &Namespace,
        address: SocketAddr,
    ) -> Result<Arc<dyn DistributedLock>, LockError> {
        let place = self.hosts.of(namespace).await?.place_at(address)?;
        self.connect(namespace, place, Duration::from_secs(5), None).await
    }

    async fn in_line(&self, namespace: &Namespace, name: &LockName) -> Result<Option<usize>, LockError> {
        if let Topology::Redlock(_) = self.topology {
            return Ok(None);
        }
        let order = key(namespace, name, "order");
        let length = command("ZCARD").arg(&order).clone();
        Ok(self.ask(namespace, Some(&order), &length).await?.pop())
    }

    async fn over(&self, namespace: &Namespace) {
        if !self.hosts.end(namespace).await
            && let Ok(place) = self.place(namespace).await
        {
            // What is left would only be in the way of those who look through all keys.
            let keys = command("KEYS").arg(format!("{{*{}:*", namespace.name())).clone();
            for server in &place.servers {
                let keys: Vec<String> = self.ask_one(namespace, server, &keys).await.unwrap_or_default();
                for key in keys {
                    let unlink = command("UNLINK").arg(key).clone();
                    let _ = self.ask_one::<Value>(namespace, server, &unlink).await;
                }
            }
        }
        locked(&self.admins).retain(|(of, _), _| of != namespace.name());
    }

    async fn leftovers(&self, namespace: &Namespace) -> Result<Option<Vec<String>>, LockError> {
        let keys = command("KEYS").arg(format!("{{{}:*", namespace.name())).clone();
        let keys: Vec<Vec<String>> = self.ask(namespace, None, &keys).await?;
        let mut keys = keys.concat();
        // Counters stay for a while, and what says since when a node of Redlock has its data for good.
        keys.retain(|key| !key.ends_with("}:fence") && !key.ends_with("}:born"));
        keys.sort_unstable();
        // On several nodes it is one thing. A node that was away may keep its part until the lease ends.
        let fewest = match self.topology {
            Topology::Redlock(count) if self.disturbance.is_some() => count / 2 + 1,
            _ => 1,
        };
        let left = keys.chunk_by(|a, b| a == b).filter(|same| same.len() >= fewest);
        Ok(Some(left.map(|same| same[0].clone()).collect()))
    }

    async fn inject(&self, namespace: &Namespace, fault: &Fault) -> Result<Injection, LockError> {
        let (lock, counter) = (
            |name| key(namespace, name, "lock"),
            |name| key(namespace, name, "fence"),
        );
        let (key, step) = match fault {
            Fault::Expire(name) => (lock(name), command("PEXPIRE").arg(lock(name)).arg(1).clone()),
            Fault::Delete(name) => (lock(name), command("DEL").arg(lock(name)).clone()),
            Fault::DeleteCounter(name) => (counter(name), command("DEL").arg(counter(name)).clone()),
            Fault::SetBackCounter(name) => (counter(name), command("SET").arg(counter(name)).arg(5).clone()),
            Fault::Steal(name) => return self.steal(namespace, name).await,
            Fault::DropPrepared => {
                // Others only have to send theirs once more.
                self.ask::<Value>(namespace, None, &command("SCRIPT FLUSH")).await?;
                return Ok(Injection::Done);
            }
            fault => return self.inject_into_servers(namespace, fault).await,
        };
        self.ask::<Value>(namespace, Some(&key), &step).await?;
        Ok(Injection::Done)
    }

    async fn resource(&self, namespace: &Namespace, resource: &str) -> Result<Option<Arc<dyn Resource>>, LockError> {
        // Apart from the locks.
        let resource = format!("{{resource/{}:{resource}}}", namespace.name());
        let servers = self.place(namespace).await?.servers;
        let server = match self.topology {
            Topology::Cluster => self.node_of(namespace, &servers, &resource).await?,
            _ => servers.len() - 1,
        };
        let connection = connect(&servers[server]).await?;
        Ok(Some(Arc::new(FencedKey::new(connection, resource))))
    }

    fn child_environment(&self, namespace: &Namespace) -> Vec<(String, String)> {
        let Some(host) = self.hosts.known(namespace) else {
            return Vec::new();
        };
        if let Some(disturbance) = self.disturbance(namespace) {
            disturbance.begin(host.nodes(), namespace.name());
        }
        vec![(PLACE.to_owned(), host.place().told())]
    }

    /// One of several nodes may be asked again by itself.
    fn leases_count_from_the_call(&self) -> bool {
        !matches!(self.topology, Topology::Redlock(_))
    }

    // Sent by one task, answered by another.
    fn fewest_polls(&self) -> usize {
        2
    }

    fn connects_without_runtime(&self) -> bool {
        true
    }
}

/// As the user that the URL names, who may do everything.
async fn connect(url: &str) -> Result<MultiplexedConnection, LockError> {
    let client = Client::open(url).map_err(failed)?;
    // A busy machine may need longer than the library's second to connect and half a second to answer.
    let patient = AsyncConnectionConfig::new()
        .set_connection_timeout(Some(LONGEST_LOOK))
        .set_response_timeout(Some(LONGEST_LOOK));
    let connecting = client.get_multiplexed_async_connection_with_config(&patient);
    connecting.await.map_err(failed)
}

/// A command of these words. Those that may have spaces are added to it.
fn command(words: &str) -> Cmd {
    let mut command = Cmd::new();
    command.arg(words.split(' ').collect::<Vec<_>>());
    command
}

/// The key of that kind of a lock.
fn key(namespace: &Namespace, name: &LockName, kind: &str) -> String {
    format!("{{{}:{name}}}:{kind}", namespace.name())
}

fn failed(error: RedisError) -> LockError {
    LockError::failed("looking at the server", error)
}
