//! How a client of a cluster is set up.

use std::sync::Arc;
use std::time::Duration;

use lock_core::{Executor, LockError, Options};
use tokio::runtime::Handle;

use super::slots::Endpoint;
use super::topology::Topology;
use super::{ClusterLock, address};
use crate::RedisConfig;
use crate::discovery::Target;
use crate::transport::Place;

/// A Redis Cluster, and how to work with it.
///
/// ```
/// use lock_redis::{ClusterConfig, RedisConfig};
///
/// let seeds = ["a.example", "b.example"].map(|host| RedisConfig::new(host, 6379).password("secret"));
/// let config = ClusterConfig::new(seeds).namespace("shop");
/// ClusterConfig::from_url("redis+cluster://:secret@a.example,b.example?namespace=shop")?;
/// # Ok::<(), lock_core::LockError>(())
/// ```
#[derive(Clone, Debug)]
pub struct ClusterConfig {
    pub(super) seeds: Vec<RedisConfig>,
}

impl ClusterConfig {
    /// The cluster that these nodes belong to. One that answers is enough, also under a name that stands for all; the others are
    /// found through it. Everything else that the first one sets counts for all nodes.
    pub fn new(seeds: impl IntoIterator<Item = RedisConfig>) -> Self {
        Self {
            seeds: seeds.into_iter().collect(),
        }
    }

    /// Reads an address such as `redis+cluster://user:password@host1,host2:7000`; `rediss+cluster:` is for TLS. `valkey+cluster:` and
    /// `valkeys+cluster:` mean the same.
    ///
    /// The parameters are those of [`RedisConfig::from_url`].
    ///
    /// # Errors
    ///
    /// [`LockError::Configuration`] if the address is not one of these, or a parameter is unknown, repeated or wrong. It
    /// never shows the address.
    pub fn from_url(url: &str) -> Result<Self, LockError> {
        address::read(url)
    }

    /// See [`RedisConfig::namespace`].
    #[must_use]
    pub fn namespace(self, namespace: impl Into<String>) -> Self {
        let namespace = namespace.into();
        self.each(|seed| seed.namespace(namespace.clone()))
    }

    /// See [`RedisConfig::op_timeout`]. A failover that takes longer is an error of the requests in that time; waits and renewals are
    /// tried again.
    #[must_use]
    pub fn op_timeout(self, limit: Duration) -> Self {
        self.each(|seed| seed.op_timeout(limit))
    }

    /// Credentials for all nodes; see [`RedisConfig::credentials`].
    #[must_use]
    pub fn credentials(self, user: impl Into<String>, password: impl Into<String>) -> Self {
        let (user, password) = (user.into(), password.into());
        self.each(|seed| seed.credentials(&user, &password))
    }

    /// See [`RedisConfig::runtime`].
    #[must_use]
    pub fn runtime(self, runtime: Handle) -> Self {
        self.each(|seed| seed.runtime(runtime.clone()))
    }

    fn each(mut self, set: impl Fn(RedisConfig) -> RedisConfig) -> Self {
        self.seeds = self.seeds.into_iter().map(set).collect();
        self
    }

    /// Connects to one of the nodes, and learns of the others. Dropping the future leaves nothing behind.
    ///
    /// # Errors
    ///
    /// - [`LockError::Configuration`] if a setting cannot be used, the node is in no cluster, or for the reasons of
    ///   [`RedisConfig::connect`].
    /// - [`LockError::UnsafeConfiguration`] if locks on it might not exclude.
    /// - [`LockError::Unavailable`] if no node can be reached, or none answered in time.
    pub async fn connect(self) -> Result<ClusterLock, LockError> {
        let lock = self.connect_lazy()?;
        let topology = Arc::clone(lock.topology());
        let executor = topology.executor().clone();
        // The caller may be outside of a runtime.
        let connecting = async move { topology.refresh(0).await };
        executor.run("connecting", connecting).await??;
        Ok(lock)
    }

    /// Connects at the first request, which fails as [`connect`](Self::connect) does. The next one tries again.
    ///
    /// # Errors
    ///
    /// [`LockError::Configuration`] if no node is given, the database number is not 0, or another setting cannot be used.
    pub fn connect_lazy(self) -> Result<ClusterLock, LockError> {
        let Some(first) = self.seeds.first() else {
            return Err(LockError::configuration(
                "no node of the cluster is given; give one at least",
            ));
        };
        let mut config = first.clone();
        config.op_timeout = Options::usable_op_timeout(config.op_timeout)?;
        if config.database != 0 {
            return Err(LockError::configuration(format!(
                "a Redis Cluster has no database {}; leave the number out, and use namespaces to keep locks apart",
                config.database
            )));
        }
        let endpoint = |seed: &RedisConfig| match &seed.target {
            Target::Server(Place::Tcp(host, port)) => Ok(Endpoint::new(host, *port)),
            #[cfg(feature = "tls")]
            Target::Server(Place::Tls(host, port, _)) => Ok(Endpoint::new(host, *port)),
            #[cfg(unix)]
            Target::Server(Place::Unix(_)) => Err(LockError::configuration(
                "a node of a cluster cannot be reached by a socket of this machine, as the others cannot; give host and port",
            )),
            Target::Service(_) => Err(LockError::configuration(
                "sentinels know no nodes of a cluster, which replaces its primaries by itself; give the address of a node",
            )),
        };
        let seeds: Vec<_> = self.seeds.iter().map(endpoint).collect::<Result<_, _>>()?;
        let executor = Executor::new(config.runtime.clone());
        Ok(ClusterLock::new(Topology::new(seeds, config, executor)?))
    }
}
