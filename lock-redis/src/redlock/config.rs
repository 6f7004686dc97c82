//! How a client of several nodes is set up.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use lock_core::{Executor, LockError, Options};
use tokio::runtime::Handle;
use tokio::time::sleep;

use super::RedlockLock;
use super::membership::{Found, Membership, same};
use super::quorum::Quorum;
use crate::client::{Client, Identity};
use crate::config::{RedisConfig, Target};
use crate::reconnect::{Discovery, Reconnecting};
use crate::router::SingleServer;

/// How long connecting waits for nodes that are slower than the majority.
const STRAGGLERS: Duration = Duration::from_secs(1);

/// Independent Redis servers, the nodes, and how to work with them.
///
/// ```
/// use std::time::Duration;
/// use lock_redis::{RedisConfig, RedlockConfig};
///
/// let nodes = ["a.example", "b.example", "c.example"].map(|host| RedisConfig::new(host, 6379).password("secret"));
/// let config = RedlockConfig::new(nodes).namespace("shop").max_ttl(Duration::from_secs(30));
/// RedlockConfig::from_url("redlock://:secret@a.example,b.example,c.example?namespace=shop&max_ttl=30s")?;
/// # Ok::<(), lock_core::LockError>(())
/// ```
#[derive(Clone, Debug)]
pub struct RedlockConfig {
    pub(super) nodes: Vec<RedisConfig>,
    max_ttl: Duration,
    op_timeout: Duration,
    runtime: Option<Handle>,
}

impl RedlockConfig {
    /// Those nodes: 3, 5 or 7 servers that share nothing and do not replicate each other. Namespace, time to keep counters and time for
    /// requests of the first one count for all.
    pub fn new(nodes: impl IntoIterator<Item = RedisConfig>) -> Self {
        let nodes: Vec<_> = nodes.into_iter().collect();
        Self {
            max_ttl: Duration::from_secs(60),
            op_timeout: nodes.first().map_or(Duration::from_secs(5), |node| node.op_timeout),
            runtime: None,
            nodes,
        }
    }

    /// Reads an address such as `redlock://host1,host2:7000,host3`; `redlocks:` is for TLS.
    ///
    /// Every host can have credentials of its own; those of the first host are for all hosts without any. A database number, as in
    /// `redlock://host1,host2,host3/2`, is for all. The parameters are those of [`RedisConfig::from_url`] and
    ///
    /// | parameter | meaning | default |
    /// |---|---|---|
    /// | `max_ttl` | see [`max_ttl`](Self::max_ttl); `30s`, `5m` | `1m` |
    /// | `node2.user`, `node2.password`, `node2.db`, `node2.ca` | of the second host alone | what is for all |
    ///
    /// # Errors
    ///
    /// [`LockError::Configuration`] if the address is not one of these, or a parameter is unknown, repeated or wrong. It
    /// never shows the address.
    pub fn from_url(url: &str) -> Result<Self, LockError> {
        read(url)
    }

    /// Sets the longest ttl of a lock, between 1 s and one day; 1 minute if not set. All clients of a namespace must set the same.
    ///
    /// A node that was restarted, or has lost its data, grants nothing for this time, because it may have forgotten leases of this length.
    /// So two holders are excluded also if nodes are emptied, or restart without their last data, as long as a majority grants. A
    /// client that sets another time than those before it is refused with [`LockError::Configuration`].
    #[must_use]
    pub fn max_ttl(mut self, ttl: Duration) -> Self {
        self.max_ttl = ttl;
        self
    }

    /// See [`RedisConfig::namespace`].
    #[must_use]
    pub fn namespace(mut self, namespace: impl Into<String>) -> Self {
        let namespace = namespace.into();
        self.nodes
            .iter_mut()
            .for_each(|node| node.namespace.clone_from(&namespace));
        self
    }

    /// See [`RedisConfig::op_timeout`].
    #[must_use]
    pub fn op_timeout(mut self, limit: Duration) -> Self {
        self.op_timeout = limit;
        self
    }

    /// Credentials for all nodes; see [`RedisConfig::credentials`].
    #[must_use]
    pub fn credentials(mut self, user: impl Into<String>, password: impl Into<String>) -> Self {
        let (user, password) = (user.into(), password.into());
        self.nodes = self
            .nodes
            .into_iter()
            .map(|node| node.credentials(&user, &password))
            .collect();
        self
    }

    /// See [`RedisConfig::runtime`].
    #[must_use]
    pub fn runtime(mut self, runtime: Handle) -> Self {
        self.runtime = Some(runtime);
        self
    }

    /// Connects to the nodes; a minority of them may be down. Dropping the future leaves nothing behind.
    ///
    /// # Errors
    ///
    /// - [`LockError::Configuration`] if there are not 3, 5 or 7 nodes, two of them are the same server, or one of them is set up in a
    ///   way that [`RedisConfig::connect`] refuses.
    /// - [`LockError::UnsafeConfiguration`] if locks on one of them might not exclude.
    /// - [`LockError::Unavailable`] if a majority cannot be reached, or did not answer in time.
    pub async fn connect(self) -> Result<RedlockLock, LockError> {
        let lock = self.connect_lazy()?;
        let quorum = Arc::clone(&lock.quorum);
        let executor = quorum.executor.clone();
        // The caller may be outside of a runtime.
        executor
            .run("connecting", async move { quorum.connect().await })
            .await??;
        Ok(lock)
    }

    /// Connects at the first request, which fails as [`connect`](Self::connect) does.
    ///
    /// # Errors
    ///
    /// [`LockError::Configuration`] if there are not 3, 5 or 7 nodes, or a setting cannot be used.
    pub fn connect_lazy(self) -> Result<RedlockLock, LockError> {
        let count = self.nodes.len();
        if ![3, 5, 7].contains(&count) {
            return Err(LockError::configuration(format!(
                "{count} cannot be the number of nodes; give 3, 5 or 7 independent servers: an even number tolerates no more failures \
                 than one less"
            )));
        }
        let mut places = HashMap::new();
        for (index, node) in self.nodes.iter().enumerate() {
            if let Some(other) = places.insert(node.target.to_string(), index) {
                return Err(same(other, index));
            }
            if !matches!(node.target, Target::Server(_)) {
                return Err(LockError::configuration(
                    "a node of several is one server; sentinels and clusters replace servers, and a failover would lose what a node has \
                     granted: give the address of each server",
                ));
            }
        }
        if !(Duration::from_secs(1)..=Duration::from_secs(24 * 60 * 60)).contains(&self.max_ttl) {
            return Err(LockError::configuration(
                "max_ttl cannot be used; give a time of 1s to 1day, such as 1m",
            ));
        }
        let executor = Executor::new(self.runtime);
        let (namespace, retention) = (self.nodes[0].namespace.clone(), self.nodes[0].counter_retention);
        let op_timeout = Options::usable_op_timeout(self.op_timeout)?;
        let (identity, found) = (Identity::new(), Found::default());
        let client = |(number, node): (usize, RedisConfig)| {
            let node = node
                .namespace(namespace.clone())
                .counter_retention(retention)
                .op_timeout(op_timeout);
            let Target::Server(place) = node.target.clone() else {
                return Err(LockError::closed());
            };
            let membership = Membership::new(number, &found, count, self.max_ttl);
            let settings = Arc::new(node.settings(executor.clone(), Some(membership))?);
            let feed = identity.feed(&settings);
            let server = SingleServer(Reconnecting::new(Discovery::Fixed(place), Arc::clone(&settings), feed));
            Ok(Arc::new(Client::new(settings, identity.clone(), server)))
        };
        let nodes = self
            .nodes
            .into_iter()
            .enumerate()
            .map(client)
            .collect::<Result<_, LockError>>()?;
        let held = identity.subscriptions.clone();
        let quorum = Quorum::new(nodes, executor, op_timeout, self.max_ttl, held);
        Ok(RedlockLock {
            quorum: Arc::new(quorum),
        })
    }
}

impl Quorum<Client> {
    /// Connects to as many nodes as answer soon, and at least to a majority.
    async fn connect(&self) -> Result<(), LockError> {
        let mut round = self.ask("connecting", &(), |_, node, ()| async move { node.connect().await });
        let (mut connected, mut errors) = (0, Vec::new());
        let mut late = std::pin::pin!(sleep(self.op_timeout));
        loop {
            let answer = tokio::select! {
                biased;
                answer = round.next() => answer,
                () = &mut late => None,
            };
            match answer {
                None => break,
                Some((_, Ok(()))) => {
                    connected += 1;
                    if connected == self.majority() {
                        late.as_mut()
                            .reset(tokio::time::Instant::now() + STRAGGLERS.min(self.op_timeout));
                    }
                }
                // No retry mends it: that it is but one node now does not make it right.
                Some((node, Err(error))) if !error.is_retryable() => {
                    return Err(self.no_majority("connecting", vec![(node, error)]));
                }
                Some((node, Err(error))) => errors.push((node, error)),
            }
        }
        if connected < self.majority() {
            return Err(self.no_majority("connecting", errors));
        }
        for (node, error) in &errors {
            let place = &self.nodes[*node].settings().target;
            tracing::warn!(target: "fencelock", "locks do without node {place}, which cannot be reached: {error}");
        }
        if connected < self.len() {
            return Ok(());
        }
        match self.open_new().await {
            Err(error) if error.is_retryable() => {
                tracing::debug!(target: "fencelock", "it is not known since when the nodes have their data: {error}");
                Ok(())
            }
            done => done.map(drop),
        }
    }
}

/// The parameters that a single node can have.
const OF_NODE: [&str; 4] = ["user", "password", "db", "ca"];

/// Reads an address. No error shows any of it but the names of parameters.
fn read(url: &str) -> Result<RedlockConfig, LockError> {
    let (scheme, rest) = url.split_once("://").ok_or_else(|| wrong(FORM))?;
    let scheme = match scheme {
        "redlock" => "redis",
        "redlocks" => "rediss",
        _ => return Err(wrong(FORM)),
    };
    if rest.contains('#') {
        return Err(wrong("holds a #; write it as %23"));
    }
    let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (hosts, path) = rest.split_once('/').unwrap_or((rest, ""));
    let hosts: Vec<_> = hosts.split(',').collect();
    let login = |host: &str| host.rsplit_once('@').map(|(login, _)| login.to_owned());
    let shared = login(hosts[0]);
    let mut for_all = Vec::new();
    let mut of_node = vec![Vec::new(); hosts.len()];
    let mut max_ttl = None;
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        if name == "max_ttl" {
            let time =
                humantime::parse_duration(value).map_err(|_| wrong("has a wrong max_ttl; give a time such as 1m"))?;
            if max_ttl.replace(time).is_some() {
                return Err(wrong("gives max_ttl twice; give it once"));
            }
        } else if let Some((node, name)) = name.strip_prefix("node").and_then(|name| name.split_once('.')) {
            let node: usize = node.parse().map_err(|_| wrong(NODES))?;
            let own = node
                .checked_sub(1)
                .and_then(|node| of_node.get_mut(node))
                .ok_or_else(|| wrong(NODES))?;
            if !OF_NODE.contains(&name) {
                return Err(wrong(NODES));
            }
            if own.iter().any(|(known, _)| *known == name) {
                return Err(wrong(format!("gives node{node}.{name} twice; give it once")));
            }
            own.push((name, value));
        } else {
            for_all.push(pair);
        }
    }
    let mut nodes = Vec::new();
    for (host, own) in hosts.iter().zip(of_node) {
        let given = |name: &str| own.iter().find(|(known, _)| *known == name).map(|(_, value)| *value);
        let bare = host.rsplit_once('@').map_or(*host, |(_, bare)| bare);
        if bare.is_empty() {
            return Err(wrong(
                "names no host between two commas, or before the first one; give HOST,HOST,HOST",
            ));
        }
        let mut login = login(host).or_else(|| shared.clone()).unwrap_or_default();
        if given("user").is_some() || given("password").is_some() {
            let (user, password) = login.split_once(':').unwrap_or((&login, ""));
            let (user, password) = (given("user").unwrap_or(user), given("password").unwrap_or(password));
            login = format!("{user}:{password}");
        }
        let at = if login.is_empty() { "" } else { "@" };
        let database = given("db").unwrap_or(path);
        let query: Vec<_> = for_all
            .iter()
            .filter(|pair| !(pair.starts_with("ca=") && given("ca").is_some()))
            .map(|pair| (*pair).to_owned())
            .chain(given("ca").map(|ca| format!("ca={ca}")))
            .collect();
        let url = format!("{scheme}://{login}{at}{bare}/{database}?{}", query.join("&"));
        nodes.push(RedisConfig::from_url(&url)?);
    }
    let mut config = RedlockConfig::new(nodes);
    if let Some(time) = max_ttl {
        config = config.max_ttl(time);
    }
    Ok(config)
}

const FORM: &str = "must start with redlock:// or redlocks:// (TLS), as in redlock://host1,host2,host3";

const NODES: &str =
    "has a wrong parameter of a node; known are user, password, db and ca, as in node2.password=..., counted from 1";

fn wrong(why: impl std::fmt::Display) -> LockError {
    LockError::configuration(format!("the address of the Redis servers {why}"))
}
