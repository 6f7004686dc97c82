//! The servers, and what is alike on all of them.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use clap::ValueEnum;
use conformance_tests::servers::{Kind, RedisCluster, RedisSentinels, Server};
use fencelock::Options;
use futures_util::future::try_join_all;
use serde::{Deserialize, Serialize};
use tempfile::TempDir;
use tokio::runtime::Handle;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::oneshot;

use crate::contestant::{Contestant, Failure, Trips};
use crate::ours::Ours;
use crate::{etcd, postgres, redis, redis_cluster, redlock, sqlite};

/// fencelock as it is by default.
pub(crate) const OURS: &str = "fencelock";
/// fencelock with `Options::runtime`.
pub(crate) const OURS_HERE: &str = "fencelock, on the caller's runtime";
/// It keeps for a while what it releases.
pub(crate) const OURS_LINGERING: &str = "fencelock, lingering";

/// After what time without an answer a server is replaced: none is.
const NEVER: Duration = Duration::from_secs(3600);

/// Where locks are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Backend {
    Redis,
    #[serde(rename = "redis-cluster")]
    RedisCluster,
    Redlock,
    Postgres,
    Etcd,
    Sqlite,
}

/// What somebody would use instead.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peer {
    pub(crate) name: &'static str,
    /// Whether it serves one task at a time.
    pub(crate) one_task: bool,
}

impl Peer {
    pub(crate) const fn new(name: &'static str) -> Self {
        Self { name, one_task: false }
    }

    pub(crate) const fn for_one_task(name: &'static str) -> Self {
        Self { name, one_task: true }
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Redis => "Redis",
            Self::RedisCluster => "Redis Cluster",
            Self::Redlock => "Redlock",
            Self::Postgres => "Postgres",
            Self::Etcd => "etcd",
            Self::Sqlite => "SQLite",
        })
    }
}

impl Backend {
    /// As files are named for it.
    pub(crate) fn key(self) -> &'static str {
        match self {
            Self::Redis => "redis",
            Self::RedisCluster => "redis-cluster",
            Self::Redlock => "redlock",
            Self::Postgres => "postgres",
            Self::Etcd => "etcd",
            Self::Sqlite => "sqlite",
        }
    }

    pub(crate) fn peers(self) -> &'static [Peer] {
        match self {
            Self::Redis => redis::PEERS,
            Self::RedisCluster => redis_cluster::PEERS,
            Self::Redlock => redlock::PEERS,
            Self::Postgres => postgres::PEERS,
            Self::Etcd => etcd::PEERS,
            Self::Sqlite => sqlite::PEERS,
        }
    }

    /// What the bare round trips are.
    pub(crate) fn floor(self) -> &'static str {
        match self {
            Self::Redis | Self::RedisCluster => redis::FLOOR,
            Self::Redlock => redlock::FLOOR,
            Self::Postgres => postgres::FLOOR,
            Self::Etcd => etcd::FLOOR,
            Self::Sqlite => sqlite::FLOOR,
        }
    }

    /// The same, made on the background thread.
    pub(crate) fn background_floor(self) -> String {
        format!("{}, from a background thread", self.floor())
    }

    /// The same of [`push`](Self::push).
    pub(crate) fn background_push(self) -> Option<String> {
        Some(format!("{}, from and to background threads", self.push()?))
    }

    /// The barest way by which one process wakes another, if there is one.
    pub(crate) fn push(self) -> Option<&'static str> {
        match self {
            Self::Redis => Some("one PUBLISH to a subscriber"),
            Self::Postgres => Some("pg_advisory_unlock to a blocked pg_advisory_lock"),
            Self::Etcd => Some("one put to a watcher"),
            Self::RedisCluster | Self::Redlock | Self::Sqlite => None,
        }
    }
}

/// What to do once more, and whom to tell that it is done.
pub(crate) type Orders = UnboundedReceiver<oneshot::Sender<()>>;

/// Servers that run for the measurement, or a file.
#[derive(Debug)]
pub(crate) struct Site {
    pub(crate) place: Place,
    pub(crate) version: String,
    // All end with it.
    pub(crate) servers: Vec<Server>,
    _cluster: Option<(RedisCluster, RedisSentinels)>,
    _folder: Option<TempDir>,
}

/// How to reach it, from any process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Place {
    pub(crate) backend: Backend,
    /// As fencelock wants it.
    pub(crate) url: String,
    /// Host and port, of several servers with commas between, or the path. Beside a cluster there is a server of its own, which is the
    /// last one.
    pub(crate) authority: String,
}

impl Site {
    pub(crate) async fn start(backend: Backend) -> Result<Self, Failure> {
        let (kind, arguments, count) = match backend {
            Backend::Redis => (&Kind::REDIS, &[][..], 1),
            Backend::RedisCluster => return Self::cluster().await,
            Backend::Redlock => (&Kind::REDIS, &[][..], redlock::NODES),
            Backend::Postgres => (&Kind::POSTGRES, postgres::ARGUMENTS, 1),
            Backend::Etcd => (&Kind::ETCD, &[][..], 1),
            Backend::Sqlite => return Self::file(),
        };
        let servers = try_join_all((0..count).map(|_| Server::start_own(kind, arguments))).await?;
        let authority = servers.iter().map(Server::authority).collect::<Vec<_>>().join(",");
        let url = match backend {
            Backend::Etcd => format!("etcd://{authority}"),
            Backend::Redlock => format!("redlock://{authority}"),
            _ => servers[0].url().to_owned(),
        };
        let version = match count {
            1 => servers[0].version().to_owned(),
            _ => format!("{count} servers, each {}", servers[0].version()),
        };
        let place = Place {
            backend,
            url,
            authority,
        };
        if backend == Backend::Postgres {
            postgres::prepare(&place.url).await?;
        }
        Ok(Self {
            place,
            version,
            servers,
            _cluster: None,
            _folder: None,
        })
    }

    /// A cluster, and a server of its own beside it.
    async fn cluster() -> Result<Self, Failure> {
        let cluster = RedisCluster::start(&Kind::REDIS, redis_cluster::PRIMARIES, &[]).await?;
        // It is reached as the nodes are.
        let alone = RedisSentinels::start(&Kind::REDIS, 0, 1, NEVER, &[]).await?;
        let one = &alone.servers()[0];
        let hosts: Vec<_> = cluster.nodes().iter().map(Server::authority).collect();
        let hosts = hosts.join(",");
        Ok(Self {
            place: Place {
                backend: Backend::RedisCluster,
                url: format!("redis+cluster://{hosts}"),
                authority: format!("{hosts},{}", one.authority()),
            },
            version: format!(
                "{} primaries, and a server beside them, each {}",
                cluster.nodes().len(),
                one.version()
            ),
            servers: Vec::new(),
            _cluster: Some((cluster, alone)),
            _folder: None,
        })
    }

    fn file() -> Result<Self, Failure> {
        let folder = TempDir::new()?;
        let path = folder.path().join("locks.db");
        let path = path.to_str().ok_or("the folder for temporary files is not UTF-8")?;
        Ok(Self {
            place: Place {
                backend: Backend::Sqlite,
                url: format!("sqlite:{path}"),
                authority: path.to_owned(),
            },
            version: format!("SQLite {}", rusqlite::version()),
            servers: Vec::new(),
            _cluster: None,
            _folder: Some(folder),
        })
    }
}

impl Place {
    /// A client of that contestant.
    pub(crate) async fn connect(&self, who: &str, ttl: Duration) -> Result<Arc<dyn Contestant>, Failure> {
        match (who, self.backend) {
            (OURS, _) => Ok(Arc::new(Ours::connect(&self.url, Options::new().ttl(ttl)).await?)),
            (OURS_HERE, _) => {
                let options = Options::new().ttl(ttl).runtime(Handle::current());
                Ok(Arc::new(Ours::connect(&self.url, options).await?))
            }
            (OURS_LINGERING, _) => {
                let options = Options::new().ttl(ttl).linger(ttl);
                Ok(Arc::new(Ours::connect(&self.url, options).await?))
            }
            (_, Backend::Redis) => redis::peer(who, &self.url, ttl).await,
            (_, Backend::RedisCluster) => redis_cluster::peer(who, &self.redis_urls(), ttl).await,
            (_, Backend::Redlock) => redlock::peer(who, &self.redis_urls(), ttl),
            (_, Backend::Postgres) => postgres::peer(who, &self.url, ttl).await,
            (_, Backend::Etcd) => etcd::peer(who, &self.authority, ttl).await,
            (_, Backend::Sqlite) => sqlite::peer(who, &self.authority, ttl),
        }
    }

    /// The addresses of its Redis servers.
    pub(crate) fn redis_urls(&self) -> Vec<String> {
        let servers = self.authority.split(',');
        servers.map(|server| format!("redis://{server}")).collect()
    }

    pub(crate) async fn trips(&self) -> Result<Arc<dyn Trips>, Failure> {
        match self.backend {
            Backend::Redis => redis::trips(&self.url).await,
            Backend::RedisCluster => redis_cluster::trips(&self.redis_urls()).await,
            Backend::Redlock => redlock::trips(&self.redis_urls()).await,
            Backend::Postgres => postgres::trips(&self.url).await,
            Backend::Etcd => etcd::trips(&self.authority).await,
            Backend::Sqlite => sqlite::trips(&self.authority),
        }
    }

    /// Tells of each of that many pushes. `ready` is called when they may begin.
    pub(crate) async fn hear(&self, times: usize, ready: impl FnOnce(), heard: impl FnMut()) -> Result<(), Failure> {
        match self.backend {
            Backend::Redis => redis::hear(&self.url, times, ready, heard).await,
            Backend::Postgres => postgres::hear(&self.url, times, ready, heard).await,
            Backend::Etcd => etcd::hear(&self.authority, times, ready, heard).await,
            Backend::RedisCluster | Backend::Redlock | Backend::Sqlite => Err("no push is known there".into()),
        }
    }

    /// Pushes at each order. `ready` is called when somebody may begin to hear.
    pub(crate) async fn say(&self, ready: impl FnOnce(), orders: Orders) -> Result<(), Failure> {
        match self.backend {
            Backend::Redis => redis::say(&self.url, ready, orders).await,
            Backend::Postgres => postgres::say(&self.url, ready, orders).await,
            Backend::Etcd => etcd::say(&self.authority, ready, orders).await,
            Backend::RedisCluster | Backend::Redlock | Backend::Sqlite => Err("no push is known there".into()),
        }
    }
}

/// What the server has been asked since this was started.
pub(crate) enum Commands {
    Redis(Vec<redis::Monitor>),
    Postgres(postgres::Statements),
    Etcd { authority: String, before: u64 },
}

impl Commands {
    /// Starts to count; None where there is no server.
    pub(crate) async fn start(place: &Place) -> Result<Option<Self>, Failure> {
        Ok(match place.backend {
            Backend::Redis | Backend::RedisCluster | Backend::Redlock => {
                let monitors = place.authority.split(',').map(redis::Monitor::start);
                Some(Self::Redis(try_join_all(monitors).await?))
            }
            Backend::Postgres => Some(Self::Postgres(postgres::Statements::start(&place.url).await?)),
            Backend::Etcd => Some(Self::Etcd {
                authority: place.authority.clone(),
                before: etcd::messages(&place.authority).await?,
            }),
            Backend::Sqlite => None,
        })
    }

    pub(crate) async fn count(&self) -> Result<u64, Failure> {
        match self {
            Self::Redis(monitors) => Ok(monitors.iter().map(redis::Monitor::count).sum()),
            Self::Postgres(statements) => statements.count().await,
            Self::Etcd { authority, before } => Ok(etcd::messages(authority).await? - before),
        }
    }

    /// Whoever counts is in the way of what is timed next.
    pub(crate) async fn stop(self) -> Result<(), Failure> {
        match self {
            Self::Postgres(statements) => statements.stop().await,
            Self::Redis(_) | Self::Etcd { .. } => Ok(()),
        }
    }
}
