//! What the suite needs to know of locks in a Redis Cluster.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use conformance_tests::{Fault, Harness, Injection, Namespace, Resource};
use futures_util::future::try_join_all;
use lock_core::{DistributedLock, LockError, LockName, OwnerId};
use lock_redis::RedisConfig;
use lock_redis::redis::aio::MultiplexedConnection;
use lock_redis::redis::{self, Cmd, FromRedisValue};
use test_servers::{Data, Kind, RedisCluster, Server, ServerError};
use tokio::runtime::Handle;
use tokio::sync::OnceCell;

use crate::redis::resource::FencedKey;
use crate::redis::role::{PASSWORD, USER, rule_of};
use crate::redis::{connect, counter, failed, lock, no_server};

/// Tells a child process where the nodes of its namespace are.
const URLS: &str = "FENCELOCK_CONFORMANCE_CLUSTER";

/// How many primaries a cluster has.
const PRIMARIES: usize = 3;

type Place = Arc<OnceCell<Arc<RedisCluster>>>;

/// One cluster for all namespaces, and one more for each that wants its own.
pub(crate) struct ClusterHarness {
    kind: &'static Kind,
    shared: Place,
    own: Mutex<HashMap<String, Place>>,
}

/// The user with the rights in the documentation.
fn rule() -> Vec<String> {
    rule_of("nodes")
}

async fn start(kind: &'static Kind) -> Result<Arc<RedisCluster>, LockError> {
    // As an argument, so that the user is there after every restart.
    let rule = rule();
    let user: Vec<_> = ["--user"].into_iter().chain(rule.iter().map(String::as_str)).collect();
    RedisCluster::start(kind, PRIMARIES, &user)
        .await
        .map(Arc::new)
        .map_err(no_server)
}

impl ClusterHarness {
    pub(crate) fn new(kind: &'static Kind) -> Self {
        Self {
            kind,
            shared: Place::default(),
            own: Mutex::default(),
        }
    }

    fn place(&self, namespace: &Namespace) -> Place {
        if namespace.wants_own_server() {
            Arc::clone(self.own().entry(namespace.name().to_owned()).or_default())
        } else {
            Arc::clone(&self.shared)
        }
    }

    async fn cluster(&self, namespace: &Namespace) -> Result<Arc<RedisCluster>, LockError> {
        self.place(namespace)
            .get_or_try_init(|| start(self.kind))
            .await
            .cloned()
    }

    fn own(&self) -> MutexGuard<'_, HashMap<String, Place>> {
        self.own.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn urls(&self, namespace: &Namespace) -> Result<Vec<String>, LockError> {
        match std::env::var(URLS) {
            Ok(urls) => Ok(urls.split(',').map(str::to_owned).collect()),
            Err(_) => Ok(urls(&*self.cluster(namespace).await?)),
        }
    }

    /// As a user who may do no more than a user should be allowed to.
    async fn config(&self, namespace: &Namespace) -> Result<RedisConfig, LockError> {
        let urls = self.urls(namespace).await?;
        let hosts: Vec<_> = urls.iter().map(|url| url.trim_start_matches("redis://")).collect();
        let config = RedisConfig::from_url(&format!("redis+cluster://{}", hosts.join(",")))?;
        Ok(config.credentials(USER, PASSWORD).namespace(namespace.name()))
    }

    /// A connection to the node that serves the key.
    async fn connection(&self, namespace: &Namespace, key: &str) -> Result<MultiplexedConnection, LockError> {
        let urls = self.urls(namespace).await?;
        let mut connection = connect(&urls[0]).await?;
        let mut question = redis::cmd("CLUSTER");
        question.arg("KEYSLOT").arg(key);
        let slot: usize = question.query_async(&mut connection).await.map_err(failed)?;
        // As the slots are divided.
        let node = (0..urls.len()).rev().find(|part| slot >= part * 16384 / urls.len());
        connect(&urls[node.unwrap_or_default()]).await
    }

    /// A command about the key.
    async fn ask<T: FromRedisValue>(&self, namespace: &Namespace, key: &str, command: &Cmd) -> Result<T, LockError> {
        let mut connection = self.connection(namespace, key).await?;
        command.query_async(&mut connection).await.map_err(failed)
    }

    /// The same command on every node.
    async fn ask_all<T: FromRedisValue>(&self, namespace: &Namespace, command: &Cmd) -> Result<Vec<T>, LockError> {
        let urls = self.urls(namespace).await?;
        let ask = async |url: &String| {
            let mut connection = connect(url).await?;
            command.query_async(&mut connection).await.map_err(failed)
        };
        try_join_all(urls.iter().map(ask)).await
    }

    /// What is done to whole nodes is felt by all who use them.
    async fn inject_into_nodes(&self, namespace: &Namespace, fault: &Fault) -> Result<Injection, LockError> {
        if !namespace.wants_own_server() {
            return Ok(Injection::NeedsOwnServer);
        }
        let cluster = self.cluster(namespace).await?;
        let limit_memory = |bytes: &str| redis::cmd("CONFIG").arg("SET").arg("maxmemory").arg(bytes).clone();
        let command = match fault {
            Fault::DeleteAll => redis::cmd("FLUSHALL"),
            Fault::Revoke => redis::cmd("ACL").arg("SETUSER").arg(USER).arg("resetkeys").clone(),
            Fault::Permit => redis::cmd("ACL").arg("SETUSER").arg(rule()).clone(),
            Fault::Full => limit_memory("1"),
            Fault::Room => limit_memory("0"),
            Fault::Freeze(time) => return freeze(&cluster, *time).await,
            Fault::Restart => return done(cluster.restart(Data::Kept).await),
            Fault::RestartWithoutData => return done(cluster.restart(Data::Lost).await),
            Fault::Copy => return done(try_join_all(cluster.nodes().iter().map(Server::copy)).await.map(drop)),
            Fault::Restore => return done(cluster.restart(Data::Copied).await),
            _ => return Ok(Injection::NotPossible),
        };
        self.ask_all::<redis::Value>(namespace, &command).await?;
        Ok(Injection::Done)
    }
}

async fn freeze(cluster: &RedisCluster, time: Duration) -> Result<Injection, LockError> {
    let freezing = cluster.nodes().iter().map(|node| node.pause_for(time));
    done(try_join_all(freezing).await.map(drop))
}

fn done(outcome: Result<(), ServerError>) -> Result<Injection, LockError> {
    outcome.map(|()| Injection::Done).map_err(no_server)
}

fn urls(cluster: &RedisCluster) -> Vec<String> {
    cluster.nodes().iter().map(|node| node.url().to_owned()).collect()
}

#[async_trait]
impl Harness for ClusterHarness {
    fn name(&self) -> &str {
        "Redis Cluster"
    }

    fn known_skips(&self) -> Option<&str> {
        Some(include_str!("skips/redis-cluster.txt"))
    }

    async fn begin(&self) -> Result<Option<String>, LockError> {
        let cluster = self.shared.get_or_try_init(|| start(self.kind)).await?;
        Ok(Some(format!(
            "{PRIMARIES} primaries, each {}, as the ACL user {USER:?} with the rights in docs/redis.md",
            cluster.nodes()[0].version()
        )))
    }

    async fn client(&self, namespace: &Namespace) -> Result<Arc<dyn DistributedLock>, LockError> {
        Ok(Arc::new(self.config(namespace).await?.connect().await?))
    }

    async fn client_on(&self, namespace: &Namespace, runtime: Handle) -> Result<Arc<dyn DistributedLock>, LockError> {
        let config = self.config(namespace).await?.runtime(runtime);
        Ok(Arc::new(config.connect().await?))
    }

    async fn in_line(&self, namespace: &Namespace, name: &LockName) -> Result<Option<usize>, LockError> {
        let order = format!("{{{}:{name}}}:order", namespace.name());
        let length = redis::cmd("ZCARD").arg(&order).clone();
        self.ask(namespace, &order, &length).await.map(Some)
    }

    async fn over(&self, namespace: &Namespace) {
        let own = self.own().remove(namespace.name());
        if own.is_some() {
            // That takes as long as the engine takes.
            let _ = tokio::task::spawn_blocking(move || drop(own)).await;
            return;
        }
        // What is left would only be in the way of those who look through all keys.
        let Ok(urls) = self.urls(namespace).await else { return };
        for (url, pattern) in urls
            .iter()
            .flat_map(|url| ["{", "{resource/"].map(|start| (url, start)))
        {
            let keys = redis::cmd("KEYS")
                .arg(format!("{pattern}{}:*", namespace.name()))
                .clone();
            let Ok(mut connection) = connect(url).await else {
                continue;
            };
            let keys: Vec<String> = keys.query_async(&mut connection).await.unwrap_or_default();
            for key in keys {
                let _ = redis::cmd("UNLINK").arg(key).exec_async(&mut connection).await;
            }
        }
    }

    async fn leftovers(&self, namespace: &Namespace) -> Result<Option<Vec<String>>, LockError> {
        let pattern = format!("{{{}:*", namespace.name());
        let keys: Vec<Vec<String>> = self.ask_all(namespace, redis::cmd("KEYS").arg(pattern)).await?;
        let mut keys = keys.concat();
        // Counters stay for a while.
        keys.retain(|key| !key.ends_with("}:fence"));
        keys.sort_unstable();
        Ok(Some(keys))
    }

    async fn inject(&self, namespace: &Namespace, fault: &Fault) -> Result<Injection, LockError> {
        let (key, command) = match fault {
            Fault::Expire(name) => {
                let key = lock(namespace, name);
                (key.clone(), redis::cmd("PEXPIRE").arg(key).arg(1).clone())
            }
            Fault::Delete(name) => {
                let key = lock(namespace, name);
                (key.clone(), redis::cmd("DEL").arg(key).clone())
            }
            Fault::Steal(name) => {
                let (key, count) = (lock(namespace, name), counter(namespace, name));
                let count = redis::cmd("INCR").arg(count).clone();
                let token: u64 = self.ask(namespace, &key, &count).await?;
                let stranger = format!("1 {} {token} 0 stranger 0 host", OwnerId::random());
                let steal = redis::cmd("SET").arg(&key).arg(stranger).arg("KEEPTTL").clone();
                (key, steal)
            }
            Fault::DeleteCounter(name) => {
                let key = counter(namespace, name);
                (key.clone(), redis::cmd("DEL").arg(key).clone())
            }
            Fault::SetBackCounter(name) => {
                let key = counter(namespace, name);
                (key.clone(), redis::cmd("SET").arg(key).arg(5).clone())
            }
            // Others only have to send theirs once more.
            Fault::DropPrepared => {
                let flush = redis::cmd("SCRIPT").arg("FLUSH").clone();
                self.ask_all::<redis::Value>(namespace, &flush).await?;
                return Ok(Injection::Done);
            }
            fault => return self.inject_into_nodes(namespace, fault).await,
        };
        self.ask::<redis::Value>(namespace, &key, &command).await?;
        Ok(Injection::Done)
    }

    async fn resource(&self, namespace: &Namespace, resource: &str) -> Result<Option<Arc<dyn Resource>>, LockError> {
        // Apart from the locks.
        let resource = format!("{{resource/{}:{resource}}}", namespace.name());
        let connection = self.connection(namespace, &resource).await?;
        Ok(Some(Arc::new(FencedKey::new(connection, resource))))
    }

    fn child_environment(&self, namespace: &Namespace) -> Vec<(String, String)> {
        let cluster = self.place(namespace).get().cloned();
        let urls = cluster.map(|cluster| (URLS.to_owned(), urls(&cluster).join(",")));
        urls.into_iter().collect()
    }

    // Sent by one task, answered by another.
    fn fewest_polls(&self) -> usize {
        2
    }

    fn connects_without_runtime(&self) -> bool {
        true
    }
}
