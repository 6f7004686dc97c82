//! What the suite needs to know of the Redis backend.

pub(crate) mod host;
pub(crate) mod resource;
pub(crate) mod role;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use conformance_tests::{Fault, Harness, Injection, Namespace, Resource};
use lock_core::{DistributedLock, LockError, LockName, OwnerId};
use lock_redis::RedisConfig;
use lock_redis::redis::aio::MultiplexedConnection;
use lock_redis::redis::{self, AsyncConnectionConfig, Client, Cmd, FromRedisValue, RedisError};
use test_servers::{Data, Kind, ServerError};
use tokio::runtime::Handle;
use tokio::sync::OnceCell;

use host::Host;
use resource::FencedKey;
use role::{PASSWORD, USER, rule};

/// Tells a child process how clients connect to the server of its namespace, and where it is.
const URLS: &str = "FENCELOCK_CONFORMANCE_REDIS";

/// How long the harness waits for a server that it looks at.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

/// One server for all cases at once may be slow on a small machine.
const OP_TIMEOUT: Duration = Duration::from_secs(15);

type Place = Arc<OnceCell<Arc<Host>>>;

/// One server for all namespaces, and one more for each that wants its own.
pub(crate) struct RedisHarness {
    title: &'static str,
    kind: &'static Kind,
    /// By how many sentinels clients find the shared one; 0 if they know its address.
    sentinels: usize,
    shared: Place,
    own: Mutex<HashMap<String, Place>>,
    /// What looks at the server, for each namespace, as each has a runtime of its own.
    admins: Mutex<HashMap<String, MultiplexedConnection>>,
}

impl RedisHarness {
    /// Servers of that kind, which clients know. With sentinels: Redis 8 with replicas, which they find by so many sentinels. Nothing
    /// makes these replace a primary.
    pub(crate) fn new(kind: &'static Kind, sentinels: usize) -> Self {
        Self {
            title: if sentinels > 0 { "Redis Sentinel" } else { kind.title() },
            kind,
            sentinels,
            shared: Place::default(),
            own: Mutex::default(),
            admins: Mutex::default(),
        }
    }
}

#[async_trait]
impl Harness for RedisHarness {
    fn name(&self) -> &str {
        self.title
    }

    fn known_skips(&self) -> Option<&str> {
        let skips = include_str!("../skips/redis.txt");
        Some(skips).filter(|_| self.kind.is_started_here())
    }

    async fn begin(&self) -> Result<Option<String>, LockError> {
        let host = self.shared().await?;
        Ok(Some(format!(
            "{host}, as the ACL user {USER:?} with the rights in docs/redis.md"
        )))
    }

    async fn client(&self, namespace: &Namespace) -> Result<Arc<dyn DistributedLock>, LockError> {
        let config = config(&self.urls(namespace).await?.0, namespace)?;
        Ok(Arc::new(config.connect().await?))
    }

    async fn client_on(&self, namespace: &Namespace, runtime: Handle) -> Result<Arc<dyn DistributedLock>, LockError> {
        let config = config(&self.urls(namespace).await?.0, namespace)?;
        Ok(Arc::new(config.runtime(runtime).connect().await?))
    }

    async fn address(&self, namespace: &Namespace) -> Result<Option<String>, LockError> {
        Ok(Some(self.host(namespace).await?.server().authority().to_owned()))
    }

    async fn client_at(
        &self,
        namespace: &Namespace,
        address: SocketAddr,
    ) -> Result<Arc<dyn DistributedLock>, LockError> {
        let url = self.host(namespace).await?.url_at(address)?;
        let config = config(&url, namespace)?.op_timeout(Duration::from_secs(5));
        Ok(Arc::new(config.connect().await?))
    }

    async fn in_line(&self, namespace: &Namespace, name: &LockName) -> Result<Option<usize>, LockError> {
        let order = format!("{{{}:{name}}}:order", namespace.name());
        self.ask(namespace, redis::cmd("ZCARD").arg(order)).await.map(Some)
    }

    async fn over(&self, namespace: &Namespace) {
        let own = self.own().remove(namespace.name());
        self.admins().remove(namespace.name());
        if own.is_some() {
            // That takes as long as the engine takes.
            let _ = tokio::task::spawn_blocking(move || drop(own)).await;
        } else {
            // What is left would only be in the way of those who look through all keys.
            let _ = self.forget(namespace).await;
        }
    }

    async fn leftovers(&self, namespace: &Namespace) -> Result<Option<Vec<String>>, LockError> {
        let mut keys = self.keys(namespace).await?;
        // Counters stay for a while.
        keys.retain(|key| !key.ends_with("}:fence"));
        keys.sort_unstable();
        Ok(Some(keys))
    }

    async fn inject(&self, namespace: &Namespace, fault: &Fault) -> Result<Injection, LockError> {
        match fault {
            Fault::Expire(name) => {
                let expire = redis::cmd("PEXPIRE").arg(lock(namespace, name)).arg(1).clone();
                self.ask::<()>(namespace, &expire).await?;
            }
            Fault::Delete(name) => {
                self.ask::<()>(namespace, redis::cmd("DEL").arg(lock(namespace, name)))
                    .await?;
            }
            Fault::Steal(name) => {
                let token: u64 = self
                    .ask(namespace, redis::cmd("INCR").arg(counter(namespace, name)))
                    .await?;
                let stranger = format!("1 {} {token} 0 stranger 0 host", OwnerId::random());
                let mut steal = redis::cmd("SET");
                steal.arg(lock(namespace, name)).arg(stranger).arg("KEEPTTL");
                self.ask::<()>(namespace, &steal).await?;
            }
            Fault::DeleteCounter(name) => {
                self.ask::<()>(namespace, redis::cmd("DEL").arg(counter(namespace, name)))
                    .await?;
            }
            Fault::SetBackCounter(name) => {
                self.ask::<()>(namespace, redis::cmd("SET").arg(counter(namespace, name)).arg(5))
                    .await?;
            }
            // Others only have to send theirs once more.
            Fault::DropPrepared => self.ask(namespace, redis::cmd("SCRIPT").arg("FLUSH")).await?,
            fault => return self.inject_into_server(namespace, fault).await,
        }
        Ok(Injection::Done)
    }

    async fn resource(&self, namespace: &Namespace, resource: &str) -> Result<Option<Arc<dyn Resource>>, LockError> {
        let mut connection = self.connection(namespace).await?;
        // Apart from the locks.
        let select = redis::cmd("SELECT").arg(1).clone();
        select.exec_async(&mut connection).await.map_err(failed)?;
        let resource = format!("{{{}:{resource}}}", namespace.name());
        Ok(Some(Arc::new(FencedKey::new(connection, resource))))
    }

    fn child_environment(&self, namespace: &Namespace) -> Vec<(String, String)> {
        let host = self.place(namespace).get().cloned();
        let urls = host.map(|host| (URLS.to_owned(), format!("{} {}", host.url(), host.server().url())));
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

impl RedisHarness {
    /// What is done to the whole server is felt by all who use it.
    async fn inject_into_server(&self, namespace: &Namespace, fault: &Fault) -> Result<Injection, LockError> {
        if !self.shared().await?.server().is_ours() {
            return Ok(Injection::NotPossible);
        }
        if !namespace.wants_own_server() {
            return Ok(Injection::NeedsOwnServer);
        }
        let host = self.host(namespace).await?;
        let server = host.server();
        match fault {
            Fault::DeleteAll => {
                return self
                    .ask(namespace, &redis::cmd("FLUSHALL"))
                    .await
                    .map(|()| Injection::Done);
            }
            Fault::Revoke => {
                let no_keys = redis::cmd("ACL").arg("SETUSER").arg(USER).arg("resetkeys").clone();
                return self.ask::<()>(namespace, &no_keys).await.map(|()| Injection::Done);
            }
            Fault::Permit => {
                let user = redis::cmd("ACL").arg("SETUSER").arg(rule()).clone();
                return self.ask::<()>(namespace, &user).await.map(|()| Injection::Done);
            }
            Fault::Full => return self.limit_memory(namespace, "1").await,
            Fault::Room => return self.limit_memory(namespace, "0").await,
            Fault::Freeze(time) => server.pause_for(*time).await,
            Fault::Restart => server.restart(Data::Kept).await,
            Fault::RestartWithoutData => server.restart(Data::Lost).await,
            Fault::Copy => server.copy().await,
            Fault::Restore => server.restart(Data::Copied).await,
            _ => return Ok(Injection::NotPossible),
        }
        .map_err(no_server)?;
        Ok(Injection::Done)
    }

    async fn limit_memory(&self, namespace: &Namespace, bytes: &str) -> Result<Injection, LockError> {
        let mut limit = redis::cmd("CONFIG");
        limit.arg("SET").arg("maxmemory").arg(bytes);
        self.ask::<()>(namespace, &limit).await?;
        Ok(Injection::Done)
    }

    /// How clients connect, and where the server is.
    async fn urls(&self, namespace: &Namespace) -> Result<(String, String), LockError> {
        if let Some((url, server)) = std::env::var(URLS)
            .ok()
            .as_deref()
            .and_then(|urls| urls.split_once(' '))
        {
            return Ok((url.to_owned(), server.to_owned()));
        }
        let host = self.host(namespace).await?;
        Ok((host.url(), host.server().url().to_owned()))
    }

    fn place(&self, namespace: &Namespace) -> Place {
        if namespace.wants_own_server() {
            Arc::clone(self.own().entry(namespace.name().to_owned()).or_default())
        } else {
            Arc::clone(&self.shared)
        }
    }

    async fn host(&self, namespace: &Namespace) -> Result<Arc<Host>, LockError> {
        if !namespace.wants_own_server() {
            return self.shared().await;
        }
        let place = self.place(namespace);
        let host = place.get_or_try_init(async || {
            let host = match self.sentinels {
                0 => Host::own(self.kind).await,
                _ => Host::watched(self.kind, 1, 1).await,
            };
            host.map(Arc::new)
        });
        host.await.cloned().map_err(no_server)
    }

    async fn shared(&self) -> Result<Arc<Host>, LockError> {
        let host = self.shared.get_or_try_init(async || {
            if self.sentinels > 0 {
                return Host::watched(self.kind, 2, self.sentinels)
                    .await
                    .map(Arc::new)
                    .map_err(no_server);
            }
            let host = Host::shared(self.kind).await.map_err(no_server)?;
            let user = redis::cmd("ACL").arg("SETUSER").arg(rule()).clone();
            let mut connection = connect(host.server().url()).await?;
            user.exec_async(&mut connection).await.map_err(failed)?;
            Ok(Arc::new(host))
        });
        host.await.cloned()
    }

    fn own(&self) -> MutexGuard<'_, HashMap<String, Place>> {
        self.own.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn connection(&self, namespace: &Namespace) -> Result<MultiplexedConnection, LockError> {
        connect(&self.urls(namespace).await?.1).await
    }

    /// By a connection that stays, since cases look every few milliseconds.
    async fn ask<T: FromRedisValue>(&self, namespace: &Namespace, command: &Cmd) -> Result<T, LockError> {
        if let Some(mut known) = self.admin(namespace.name()) {
            match command.query_async(&mut known).await {
                // The server was restarted, or its address is that of another one now.
                Err(error) if error.is_io_error() || error.is_connection_dropped() => {}
                answer => return answer.map_err(failed),
            }
        }
        let mut connection = self.connection(namespace).await?;
        let answer = command.query_async(&mut connection).await;
        self.admins().insert(namespace.name().to_owned(), connection);
        answer.map_err(failed)
    }

    fn admin(&self, namespace: &str) -> Option<MultiplexedConnection> {
        self.admins().get(namespace).cloned()
    }

    fn admins(&self) -> MutexGuard<'_, HashMap<String, MultiplexedConnection>> {
        self.admins.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn keys(&self, namespace: &Namespace) -> Result<Vec<String>, LockError> {
        let pattern = format!("{{{}:*", namespace.name());
        self.ask(namespace, redis::cmd("KEYS").arg(pattern)).await
    }

    async fn forget(&self, namespace: &Namespace) -> Result<(), LockError> {
        let pattern = format!("{{{}:*", namespace.name());
        let mut connection = self.connection(namespace).await?;
        for database in [0, 1] {
            let mut asking = redis::pipe();
            asking.cmd("SELECT").arg(database).ignore();
            asking.cmd("KEYS").arg(&pattern);
            let (keys,): (Vec<String>,) = asking.query_async(&mut connection).await.map_err(failed)?;
            if !keys.is_empty() {
                let forget = redis::cmd("UNLINK").arg(keys).clone();
                forget.exec_async(&mut connection).await.map_err(failed)?;
            }
        }
        Ok(())
    }
}

/// As a user who may do no more than a user should be allowed to.
fn config(url: &str, namespace: &Namespace) -> Result<RedisConfig, LockError> {
    let config = RedisConfig::from_url(url)?;
    Ok(config
        .credentials(USER, PASSWORD)
        .namespace(namespace.name())
        .op_timeout(OP_TIMEOUT))
}

/// As the user that the URL names, who may do everything.
pub(crate) async fn connect(url: &str) -> Result<MultiplexedConnection, LockError> {
    let client = Client::open(url).map_err(failed)?;
    // A busy machine may need longer than the library's second to connect and half a second to answer.
    let patient = AsyncConnectionConfig::new()
        .set_connection_timeout(Some(PATIENCE))
        .set_response_timeout(Some(PATIENCE));
    let connecting = client.get_multiplexed_async_connection_with_config(&patient);
    connecting.await.map_err(failed)
}

pub(crate) fn lock(namespace: &Namespace, name: &LockName) -> String {
    format!("{{{}:{name}}}:lock", namespace.name())
}

pub(crate) fn counter(namespace: &Namespace, name: &LockName) -> String {
    format!("{{{}:{name}}}:fence", namespace.name())
}

pub(crate) fn failed(error: RedisError) -> LockError {
    LockError::failed("looking at the server", error)
}

/// Its debug output is what people should read.
pub(crate) fn no_server(error: ServerError) -> LockError {
    LockError::unavailable("seeing to a server", format!("{error:?}"))
}
