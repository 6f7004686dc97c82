//! Redis: who else locks there, the bare round trips, and what the server counts.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use distkit::DistkitRedisKey;
use distkit::lock::{LockError as DistkitLockError, LockOptions, Mutex};
use distributed_lock_core::error::LockError as DistributedLockError;
use distributed_lock_core::traits::{DistributedLock as _, LockHandle as _, LockProvider as _};
use distributed_lock_redis::RedisLockProvider;
use futures_util::StreamExt as _;
use redis::aio::{ConnectionManager, MultiplexedConnection};
use redis::io::tcp::TcpSettings;
use redis::{Client, IntoConnectionInfo as _};
use redis_lock::LockAcrossOptions;
use rslock::LockManager;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

use crate::backend::{Orders, Peer};
use crate::contestant::{Body, Contestant, Failure, Kept, Trips};

pub(crate) const FLOOR: &str = "2 x PING";

pub(crate) const RSLOCK: &str = "rslock 0.10";

pub(crate) const PEERS: &[Peer] = &[
    Peer::new(RSLOCK),
    Peer::new("distkit 0.7"),
    Peer::new("redis-lock 0.5"),
    Peer::new("distributed-lock-redis 0.2"),
];

/// A client of one of the peers.
pub(crate) async fn peer(who: &str, url: &str, ttl: Duration) -> Result<Arc<dyn Contestant>, Failure> {
    Ok(match who {
        RSLOCK => rslock(&[url], ttl),
        "distkit 0.7" => {
            let manager = client(url)?.get_connection_manager().await?;
            Arc::new(Distkit { manager, ttl })
        }
        "redis-lock 0.5" => {
            let client = redis_0_27::Client::open(url)?;
            let connection = client.get_multiplexed_async_connection().await?;
            Arc::new(RedisLock {
                connections: [Arc::new(tokio::sync::Mutex::new(connection))],
                ttl,
            })
        }
        "distributed-lock-redis 0.2" => {
            let built = RedisLockProvider::builder()
                .url(url)
                .expiry(ttl)
                .extension_cadence(ttl / 3)
                .min_validity(ttl.mul_f64(0.9));
            Arc::new(DistributedLock(built.build().await?))
        }
        other => return Err(format!("there is no contestant {other} on Redis").into()),
    })
}

fn client(url: &str) -> Result<Client, Failure> {
    let info = url.into_connection_info()?;
    // As any client that cares for latency; fencelock does the same.
    Ok(Client::open(
        info.set_tcp_settings(TcpSettings::default().set_nodelay(true)),
    )?)
}

/// A client of rslock on these servers, of which a majority has to grant each lock.
pub(crate) fn rslock<T: AsRef<str>>(urls: &[T], ttl: Duration) -> Arc<dyn Contestant> {
    Arc::new(Rslock {
        manager: LockManager::new(urls.iter().map(AsRef::as_ref).collect::<Vec<&str>>()),
        ttl,
    })
}

struct Rslock {
    manager: LockManager,
    ttl: Duration,
}

#[async_trait]
impl Contestant for Rslock {
    async fn section(&self, name: &str, body: Body) -> Result<(), Failure> {
        let guard = self.manager.acquire(name, self.ttl).await?;
        body.await;
        guard.release().await;
        Ok(())
    }
}

struct Distkit {
    manager: ConnectionManager,
    ttl: Duration,
}

impl Distkit {
    fn mutex(&self, name: &str) -> Result<Arc<Mutex>, Failure> {
        let key = DistkitRedisKey::try_from(name.to_owned())?;
        Ok(Mutex::new(
            LockOptions::builder(key, self.manager.clone()).ttl(self.ttl).build(),
        ))
    }
}

#[async_trait]
impl Contestant for Distkit {
    async fn section(&self, name: &str, body: Body) -> Result<(), Failure> {
        let guard = self.mutex(name)?.lock().await?;
        body.await;
        guard.release().await?;
        Ok(())
    }

    async fn within(&self, name: &str, limit: Duration, body: Body) -> Option<Result<bool, Failure>> {
        let attempt = async {
            match self.mutex(name)?.try_lock_with_timeout(limit).await {
                Ok(guard) => {
                    body.await;
                    guard.release().await?;
                    Ok(true)
                }
                Err(distkit::DistkitError::LockError(DistkitLockError::Timeout { .. })) => Ok(false),
                Err(error) => Err(error.into()),
            }
        };
        Some(attempt.await)
    }

    async fn keep(&self, name: &str) -> Option<Result<Kept, Failure>> {
        let taking = async { Ok(Box::new(self.mutex(name)?.lock().await?) as Kept) };
        Some(taking.await)
    }
}

struct RedisLock {
    connections: [Arc<tokio::sync::Mutex<redis_0_27::aio::MultiplexedConnection>>; 1],
    ttl: Duration,
}

#[async_trait]
impl Contestant for RedisLock {
    async fn section(&self, name: &str, body: Body) -> Result<(), Failure> {
        let options = LockAcrossOptions {
            ttl: self.ttl,
            // As long as it takes. How often it asks is left as it is.
            duration: Duration::from_secs(3600),
            ..LockAcrossOptions::default()
        };
        redis_lock::lock_across(&self.connections, name, body, options)
            .await
            .map_err(|error| error.to_string().into())
    }

    async fn within(&self, name: &str, limit: Duration, body: Body) -> Option<Result<bool, Failure>> {
        let options = LockAcrossOptions {
            ttl: self.ttl,
            duration: limit,
            ..LockAcrossOptions::default()
        };
        Some(
            match redis_lock::lock_across(&self.connections, name, body, options).await {
                Ok(()) => Ok(true),
                Err(redis_lock::LockAcrossError::Acquire(_)) => Ok(false),
                Err(error) => Err(error.to_string().into()),
            },
        )
    }
}

struct DistributedLock(RedisLockProvider);

#[async_trait]
impl Contestant for DistributedLock {
    async fn section(&self, name: &str, body: Body) -> Result<(), Failure> {
        let handle = self.0.create_lock(name).acquire(None).await?;
        body.await;
        handle.release().await?;
        Ok(())
    }

    async fn within(&self, name: &str, limit: Duration, body: Body) -> Option<Result<bool, Failure>> {
        Some(match self.0.create_lock(name).acquire(Some(limit)).await {
            Ok(handle) => {
                body.await;
                handle.release().await.map(|()| true).map_err(Into::into)
            }
            Err(DistributedLockError::Timeout(_)) => Ok(false),
            Err(error) => Err(error.into()),
        })
    }
}

/// The bare round trips, pipelined on one connection.
pub(crate) struct Pings(MultiplexedConnection);

pub(crate) async fn trips(url: &str) -> Result<Arc<dyn Trips>, Failure> {
    Ok(Arc::new(Pings(client(url)?.get_multiplexed_async_connection().await?)))
}

#[async_trait]
impl Trips for Pings {
    async fn first(&self, _name: &str) -> Result<(), Failure> {
        Ok(redis::cmd("PING").exec_async(&mut self.0.clone()).await?)
    }

    async fn second(&self, name: &str) -> Result<(), Failure> {
        self.first(name).await
    }
}

const CHANNEL: &str = "bench:push";

/// Tells of each message, which another process sent by [`say`].
pub(crate) async fn hear(
    url: &str,
    times: usize,
    ready: impl FnOnce(),
    mut heard: impl FnMut(),
) -> Result<(), Failure> {
    let mut subscription = client(url)?.get_async_pubsub().await?;
    subscription.subscribe(CHANNEL).await?;
    ready();
    let mut messages = subscription.into_on_message();
    for _ in 0..times {
        messages.next().await.ok_or("the subscription ended")?;
        heard();
    }
    Ok(())
}

/// Sends a message at each order.
pub(crate) async fn say(url: &str, ready: impl FnOnce(), mut orders: Orders) -> Result<(), Failure> {
    let mut connection = client(url)?.get_multiplexed_async_connection().await?;
    ready();
    while let Some(done) = orders.recv().await {
        redis::cmd("PUBLISH")
            .arg(CHANNEL)
            .arg("x")
            .exec_async(&mut connection)
            .await?;
        let _ = done.send(());
    }
    Ok(())
}

/// Counts the commands that clients send; what a script does is none of them.
pub(crate) struct Monitor {
    count: Arc<AtomicU64>,
    task: JoinHandle<()>,
}

impl Monitor {
    pub(crate) async fn start(authority: &str) -> Result<Self, Failure> {
        let mut lines = BufReader::new(TcpStream::connect(authority).await?);
        lines.write_all(b"MONITOR\r\n").await?;
        let mut line = Vec::new();
        lines.read_until(b'\n', &mut line).await?;
        let count = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&count);
        let task = tokio::spawn(async move {
            loop {
                line.clear();
                match lines.read_until(b'\n', &mut line).await {
                    Ok(1..) => {}
                    _ => return,
                }
                // +1732212345.123456 [0 lua] "GET" ...: where a client's address stands otherwise.
                let by_script = line.iter().position(|&byte| byte == b']').is_some_and(|end| {
                    let head = &line[..end];
                    head.ends_with(b" lua")
                });
                if !by_script {
                    counted.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
        Ok(Self { count, task })
    }

    pub(crate) fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The memory that the servers use for what they keep, in bytes.
pub(crate) async fn memory(urls: &[String]) -> Result<u64, Failure> {
    let mut bytes = 0;
    for url in urls {
        let info = info(url, "memory").await?;
        let used = info.lines().find_map(|line| line.strip_prefix("used_memory:"));
        let used = used.ok_or("the server does not tell what memory it uses")?;
        bytes += used.trim().parse::<u64>()?;
    }
    Ok(bytes)
}

/// How many scripts clients have run on the server by their hash.
pub(crate) async fn scripts(url: &str) -> Result<u64, Failure> {
    let info = info(url, "commandstats").await?;
    let calls = info
        .lines()
        .find_map(|line| line.strip_prefix("cmdstat_evalsha:calls="));
    // The server does not list commands that it has not seen.
    let calls = calls.map_or("0", |calls| calls.split(',').next().unwrap_or_default());
    Ok(calls.parse()?)
}

/// Lets a node of several grant locks as if it were new together with the others. It holds none.
pub(crate) async fn begin_anew(url: &str) -> Result<(), Failure> {
    let mut connection = client(url)?.get_multiplexed_async_connection().await?;
    let born = "{fencelock:}:born";
    Ok(redis::cmd("DEL").arg(born).query_async(&mut connection).await?)
}

async fn info(url: &str, section: &str) -> Result<String, Failure> {
    let mut connection = client(url)?.get_multiplexed_async_connection().await?;
    Ok(redis::cmd("INFO").arg(section).query_async(&mut connection).await?)
}
