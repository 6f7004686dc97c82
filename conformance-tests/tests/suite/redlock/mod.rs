//! What the suite needs to know of locks on several independent Redis servers.

mod disturbance;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use conformance_tests::{Fault, Harness, Injection, Namespace, Resource};
use futures_util::future::try_join_all;
use lock_core::{DistributedLock, LockError, OwnerId};
use lock_redis::redis::{self, Cmd, FromRedisValue};
use lock_redis::{RedisConfig, RedlockConfig};
use test_servers::{Data, Kind, Server, ServerError};
use tokio::runtime::Handle;
use tokio::sync::OnceCell;

use disturbance::Disturbance;

use crate::redis::resource::FencedKey;
use crate::redis::role::{PASSWORD, USER, rule};
use crate::redis::{PATIENCE, connect, counter, failed, lock, no_server};

/// Tells a child process where the nodes of its namespace are.
const URLS: &str = "FENCELOCK_CONFORMANCE_REDLOCK";

/// The longest ttl, for which nodes without data grant nothing.
const MAX_TTL: Duration = Duration::from_secs(20);

/// A thousand acquisitions at once are some ten thousand requests, all on one thread, and a machine that runs other tests may take longer for
/// them than the usual five seconds.
const OP_TIMEOUT: Duration = Duration::from_secs(15);

type Place = Arc<OnceCell<Arc<Nodes>>>;

/// Some nodes for all namespaces, and as many more for each that wants its own.
pub(crate) struct RedlockHarness {
    title: String,
    kind: &'static Kind,
    count: usize,
    shared: Place,
    own: Mutex<HashMap<String, Place>>,
    disturbance: Option<Arc<Disturbance>>,
}

/// Independent servers, and one more for the resources, to which nothing happens unless it happens to all.
pub(crate) struct Nodes {
    servers: Vec<Server>,
    count: usize,
}

impl Nodes {
    pub(crate) async fn start(kind: &'static Kind, count: usize) -> Result<Self, LockError> {
        // As an argument, so that the user is there after every restart.
        let rule = rule();
        let user: Vec<_> = ["--user"].into_iter().chain(rule.iter().map(String::as_str)).collect();
        let starting = (0..=count).map(|_| Server::start_own(kind, &user));
        let servers = try_join_all(starting).await.map_err(no_server)?;
        Ok(Self { servers, count })
    }

    fn nodes(&self) -> &[Server] {
        &self.servers[..self.count]
    }

    fn urls(&self) -> Vec<String> {
        self.nodes().iter().map(|server| server.url().to_owned()).collect()
    }

    async fn each<'a, F>(&'a self, work: impl Fn(&'a Server) -> F) -> Result<Injection, LockError>
    where
        F: Future<Output = Result<(), ServerError>> + 'a,
    {
        try_join_all(self.servers.iter().map(work)).await.map_err(no_server)?;
        Ok(Injection::Done)
    }
}

impl RedlockHarness {
    pub(crate) fn new(kind: &'static Kind, count: usize) -> Self {
        Self {
            title: format!("Redlock, {count} nodes"),
            kind,
            count,
            shared: Place::default(),
            own: Mutex::default(),
            disturbance: None,
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

    /// The nodes as clients of the namespace will find them.
    async fn begun(&self, namespace: &Namespace) -> Result<(), LockError> {
        if let Some(disturbance) = &self.disturbance
            && !namespace.wants_own_server()
            && std::env::var(URLS).is_err()
        {
            disturbance.begin(&*self.nodes(namespace).await?, namespace.name());
        }
        Ok(())
    }

    async fn urls(&self, namespace: &Namespace) -> Result<Vec<String>, LockError> {
        match std::env::var(URLS) {
            Ok(urls) => Ok(urls.split(',').take(self.count).map(str::to_owned).collect()),
            Err(_) => Ok(self.nodes(namespace).await?.urls()),
        }
    }

    fn place(&self, namespace: &Namespace) -> Place {
        if namespace.wants_own_server() {
            Arc::clone(self.own().entry(namespace.name().to_owned()).or_default())
        } else {
            Arc::clone(&self.shared)
        }
    }

    async fn nodes(&self, namespace: &Namespace) -> Result<Arc<Nodes>, LockError> {
        let place = self.place(namespace);
        let nodes = place.get_or_try_init(async || Nodes::start(self.kind, self.count).await.map(Arc::new));
        nodes.await.cloned()
    }

    fn own(&self) -> MutexGuard<'_, HashMap<String, Place>> {
        self.own.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn config(&self, namespace: &Namespace) -> Result<RedlockConfig, LockError> {
        config(&self.urls(namespace).await?, namespace)
    }

    /// The same command on every node.
    async fn ask<T: FromRedisValue>(&self, namespace: &Namespace, command: &Cmd) -> Result<Vec<T>, LockError> {
        let urls = self.urls(namespace).await?;
        let disturbed = self.disturbance.as_ref().filter(|_| !namespace.wants_own_server());
        let ask = async |(node, url): (usize, &String)| {
            let is_away = || disturbed.is_some_and(|disturbance| disturbance.is_away(node));
            if is_away() {
                return Ok(None);
            }
            let asking = async {
                let mut connection = connect(url).await?;
                command.query_async(&mut connection).await.map_err(failed)
            };
            match tokio::time::timeout(PATIENCE, asking).await {
                Ok(Ok(answer)) => Ok(Some(answer)),
                // It may have failed meanwhile, and be back already.
                _ if disturbed.is_some() => Ok(None),
                Ok(Err(error)) => Err(error),
                Err(_) => Err(LockError::no_answer("looking at a node", PATIENCE)),
            }
        };
        let answers = try_join_all(urls.iter().enumerate().map(ask)).await?;
        Ok(answers.into_iter().flatten().collect())
    }

    /// What is done to whole nodes is felt by all who use them.
    async fn inject_into_nodes(&self, namespace: &Namespace, fault: &Fault) -> Result<Injection, LockError> {
        if !namespace.wants_own_server() {
            return Ok(Injection::NeedsOwnServer);
        }
        let nodes = self.nodes(namespace).await?;
        let limit_memory = |bytes: &str| redis::cmd("CONFIG").arg("SET").arg("maxmemory").arg(bytes).clone();
        let command = match fault {
            Fault::DeleteAll => redis::cmd("FLUSHALL"),
            Fault::Revoke => redis::cmd("ACL").arg("SETUSER").arg(USER).arg("resetkeys").clone(),
            Fault::Permit => redis::cmd("ACL").arg("SETUSER").arg(rule()).clone(),
            Fault::Full => limit_memory("1"),
            Fault::Room => limit_memory("0"),
            Fault::Freeze(time) => return nodes.each(|node| node.pause_for(*time)).await,
            Fault::Restart => return nodes.each(|node| node.restart(Data::Kept)).await,
            Fault::RestartWithoutData => return nodes.each(|node| node.restart(Data::Lost)).await,
            Fault::Copy => return nodes.each(Server::copy).await,
            Fault::Restore => return nodes.each(|node| node.restart(Data::Copied)).await,
            _ => return Ok(Injection::NotPossible),
        };
        self.ask::<redis::Value>(namespace, &command).await?;
        Ok(Injection::Done)
    }
}

#[async_trait]
impl Harness for RedlockHarness {
    fn name(&self) -> &str {
        &self.title
    }

    fn known_skips(&self) -> Option<&str> {
        Some(match self.disturbance {
            None => include_str!("../skips/redlock.txt"),
            Some(_) => include_str!("../skips/redlock-failing.txt"),
        })
    }

    async fn begin(&self) -> Result<Option<String>, LockError> {
        let place = &self.shared;
        let nodes = place.get_or_try_init(async || Nodes::start(self.kind, self.count).await.map(Arc::new));
        let nodes = nodes.await?;
        if let Some(disturbance) = &self.disturbance {
            let disturbing = Arc::clone(disturbance).go_on(Arc::clone(nodes));
            lock_core::background()?.spawn(disturbing);
        }
        let server = &nodes.servers[0];
        Ok(Some(format!(
            "{} servers, each {}, as the ACL user {USER:?} with the rights in docs/redis.md",
            self.count,
            server.version()
        )))
    }

    async fn client(&self, namespace: &Namespace) -> Result<Arc<dyn DistributedLock>, LockError> {
        self.begun(namespace).await?;
        Ok(Arc::new(self.config(namespace).await?.connect().await?))
    }

    async fn client_on(&self, namespace: &Namespace, runtime: Handle) -> Result<Arc<dyn DistributedLock>, LockError> {
        self.begun(namespace).await?;
        Ok(Arc::new(
            self.config(namespace).await?.runtime(runtime).connect().await?,
        ))
    }

    fn leases_count_from_the_call(&self) -> bool {
        false
    }

    /// The node without which the client at a proxy has no majority.
    async fn address(&self, namespace: &Namespace) -> Result<Option<String>, LockError> {
        if self.disturbance.is_some() {
            return Ok(None);
        }
        Ok(Some(self.nodes(namespace).await?.servers[0].authority().to_owned()))
    }

    /// A minority of the nodes cannot be reached, so that everything depends on the one behind the proxy.
    async fn client_at(
        &self,
        namespace: &Namespace,
        address: SocketAddr,
    ) -> Result<Arc<dyn DistributedLock>, LockError> {
        let nodes = self.nodes(namespace).await?;
        let mut urls = nodes.urls();
        urls[0] = nodes.servers[0].url_at(address);
        let majority = self.count / 2 + 1;
        for (number, url) in urls.iter_mut().enumerate().skip(majority) {
            // Nothing listens on these ports.
            *url = format!("redis://127.0.0.1:{number}");
        }
        let config = config(&urls, namespace)?.op_timeout(Duration::from_secs(5));
        Ok(Arc::new(config.connect().await?))
    }

    async fn over(&self, namespace: &Namespace) {
        let own = self.own().remove(namespace.name());
        if own.is_some() {
            // That takes as long as the engine takes.
            let _ = tokio::task::spawn_blocking(move || drop(own)).await;
        } else {
            let pattern = format!("{{{}:*", namespace.name());
            if let Ok(keys) = self
                .ask::<Vec<String>>(namespace, redis::cmd("KEYS").arg(pattern))
                .await
            {
                let keys: Vec<_> = keys.concat();
                if !keys.is_empty() {
                    let _ = self
                        .ask::<redis::Value>(namespace, redis::cmd("UNLINK").arg(keys))
                        .await;
                }
            }
        }
    }

    async fn leftovers(&self, namespace: &Namespace) -> Result<Option<Vec<String>>, LockError> {
        let pattern = format!("{{{}:*", namespace.name());
        let keys: Vec<Vec<String>> = self.ask(namespace, redis::cmd("KEYS").arg(pattern)).await?;
        let mut keys = keys.concat();
        // Counters stay for a while, and what says since when a node has its data for good.
        keys.retain(|key| !key.ends_with("}:fence") && !key.ends_with("}:born"));
        keys.sort_unstable();
        // On several nodes it is one thing. A node that was away may keep its part until the lease ends.
        let fewest = if self.disturbance.is_some() {
            self.count / 2 + 1
        } else {
            1
        };
        let count = |key: &String| keys.iter().filter(|other| *other == key).count();
        let mut keys: Vec<_> = keys.iter().filter(|key| count(key) >= fewest).cloned().collect();
        keys.dedup();
        Ok(Some(keys))
    }

    async fn inject(&self, namespace: &Namespace, fault: &Fault) -> Result<Injection, LockError> {
        let command = match fault {
            Fault::Expire(name) => redis::cmd("PEXPIRE").arg(lock(namespace, name)).arg(1).clone(),
            Fault::Delete(name) => redis::cmd("DEL").arg(lock(namespace, name)).clone(),
            Fault::Steal(name) => {
                let count = redis::cmd("INCR").arg(counter(namespace, name)).clone();
                let tokens: Vec<u64> = self.ask(namespace, &count).await?;
                let token = tokens.into_iter().max().unwrap_or_default();
                let count = redis::cmd("SET").arg(counter(namespace, name)).arg(token).clone();
                self.ask::<redis::Value>(namespace, &count).await?;
                let stranger = format!("1 {} {token} 0 stranger 0 host", OwnerId::random());
                let mut steal = redis::cmd("SET");
                steal.arg(lock(namespace, name)).arg(stranger).arg("XX").arg("KEEPTTL");
                steal
            }
            Fault::DeleteCounter(name) => redis::cmd("DEL").arg(counter(namespace, name)).clone(),
            Fault::SetBackCounter(name) => redis::cmd("SET").arg(counter(namespace, name)).arg(5).clone(),
            // Others only have to send theirs once more.
            Fault::DropPrepared => redis::cmd("SCRIPT").arg("FLUSH").clone(),
            fault => return self.inject_into_nodes(namespace, fault).await,
        };
        self.ask::<redis::Value>(namespace, &command).await?;
        Ok(Injection::Done)
    }

    async fn resource(&self, namespace: &Namespace, resource: &str) -> Result<Option<Arc<dyn Resource>>, LockError> {
        let url = match std::env::var(URLS) {
            Ok(urls) => urls.split(',').next_back().unwrap_or_default().to_owned(),
            Err(_) => self.nodes(namespace).await?.servers[self.count].url().to_owned(),
        };
        let mut connection = connect(&url).await?;
        // Apart from the locks.
        let select = redis::cmd("SELECT").arg(1).clone();
        select.exec_async(&mut connection).await.map_err(failed)?;
        let resource = format!("{{{}:{resource}}}", namespace.name());
        Ok(Some(Arc::new(FencedKey::new(connection, resource))))
    }

    fn child_environment(&self, namespace: &Namespace) -> Vec<(String, String)> {
        let nodes = self.place(namespace).get().cloned();
        if let (Some(disturbance), Some(nodes), false) = (&self.disturbance, &nodes, namespace.wants_own_server()) {
            disturbance.begin(nodes, namespace.name());
        }
        let urls = nodes.map(|nodes| {
            let all: Vec<_> = nodes.servers.iter().map(Server::url).collect();
            (URLS.to_owned(), all.join(","))
        });
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

/// As a user who may do no more than a user should be allowed to.
fn config(urls: &[String], namespace: &Namespace) -> Result<RedlockConfig, LockError> {
    let nodes: Result<Vec<_>, _> = urls.iter().map(|url| RedisConfig::from_url(url)).collect();
    let config = RedlockConfig::new(nodes?).max_ttl(MAX_TTL).op_timeout(OP_TIMEOUT);
    Ok(config.credentials(USER, PASSWORD).namespace(namespace.name()))
}
