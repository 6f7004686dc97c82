//! The backend.

use std::ops::Deref;
use std::sync::Arc;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use lock_core::{DistributedLock, Executor, LockError};

use crate::client::Client;
use crate::config::RedisConfig;
use crate::redlock::Redlock;
use crate::settings::Settings;

/// Locks on a Redis server, on the primary that Sentinels name, in a Redis Cluster, or on a majority of independent servers.
///
/// Every client has one connection to each server that it uses, which is made again when it breaks; clones share it. Dropping the last
/// clone closes it and leaves what it held to expire; [`close`](DistributedLock::close) releases it. On independent servers semaphores are
/// [`LockError::NotSupported`].
#[derive(Clone, Debug)]
pub struct RedisLock(Arc<dyn DistributedLock>);

impl RedisLock {
    /// Connects to the servers at an address such as `redis://user:password@host:6379/0`, `redis+sentinel://host1,host2/service`,
    /// `redis+cluster://host1,host2` or `redlock://host1,host2,host3`; see [`RedisConfig::from_url`].
    ///
    /// # Errors
    ///
    /// As [`RedisConfig::from_url`] and [`RedisConfig::connect`].
    pub async fn connect(url: impl AsRef<str>) -> Result<Self, LockError> {
        RedisConfig::from_url(url.as_ref())?.connect().await
    }
}

impl Deref for RedisLock {
    type Target = dyn DistributedLock;

    fn deref(&self) -> &Self::Target {
        &*self.0
    }
}

type Connecting = BoxFuture<'static, Result<(), LockError>>;

impl RedisConfig {
    /// Connects. Of the nodes of [`redlock`](Self::redlock) a minority may be down. Dropping the future leaves nothing behind.
    ///
    /// # Errors
    ///
    /// - [`LockError::Configuration`] if [`connect_lazy`](Self::connect_lazy) fails, the server refuses the credentials or the database
    ///   number, its certificate is not trusted, the user lacks rights, it is no Redis, or two nodes are the same server.
    /// - [`LockError::UnsafeConfiguration`] if locks on it might not exclude.
    /// - [`LockError::Unavailable`] if it, or a majority, cannot be reached, or did not answer in time.
    pub async fn connect(self) -> Result<RedisLock, LockError> {
        let (lock, executor, connecting) = self.open()?;
        // The caller may be outside of a runtime.
        executor.run("connecting", connecting).await??;
        Ok(lock)
    }

    /// Connects at the first request, which fails as [`connect`](Self::connect) does. The next one tries again.
    ///
    /// # Errors
    ///
    /// [`LockError::Configuration`] if a setting cannot be used: the namespace, a time, the database number of a cluster, or a number of
    /// nodes or sentinels.
    pub fn connect_lazy(self) -> Result<RedisLock, LockError> {
        Ok(self.open()?.0)
    }

    /// The client, what runs its tasks, and its first connection.
    fn open(self) -> Result<(RedisLock, Executor, Connecting), LockError> {
        let settings = Settings::new(self)?;
        let executor = settings.executor.clone();
        if settings.config.nodes.is_some() {
            let redlock = Arc::new(Redlock::new(&settings)?);
            let connecting = Arc::clone(&redlock);
            let connecting = async move { connecting.connect().await }.boxed();
            return Ok((RedisLock(redlock), executor, connecting));
        }
        let client = Arc::new(Client::new(settings));
        let connecting = Arc::clone(&client);
        let connecting = async move { connecting.connect().await }.boxed();
        Ok((RedisLock(client), executor, connecting))
    }
}
