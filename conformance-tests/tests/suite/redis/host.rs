//! Where the locks of a namespace are.

use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use conformance_tests::{Fault, Injection};
use futures_util::future::try_join_all;
use lock_core::LockError;
use test_servers::{FakeSentinel, Kind, RedisCluster, RedisSentinels, Server};

use super::role::{USER, rule};
use super::{command, connect, failed};
use crate::hosts::{data_after, inject_into, no_server};

/// Longer than any case: no server is replaced.
const NEVER: Duration = Duration::from_secs(3600);

/// How many primaries a cluster has.
const PRIMARIES: usize = 3;

/// How servers belong together, and how clients find them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Topology {
    /// One, by its address.
    Alone,
    /// One that sentinels watch. Nothing makes them replace it.
    Watched,
    Cluster,
    /// So many that do not know each other.
    Redlock(usize),
}

/// Started servers.
pub(crate) enum Host {
    Alone(Server),
    Watched(RedisSentinels),
    Cluster(RedisCluster),
    /// The nodes, and one more for the resources.
    Redlock(Vec<Server>),
}

/// How any process reaches them.
#[derive(Clone)]
pub(crate) struct Place {
    /// The address for clients. Those of Redlock take the servers.
    pub(crate) url: String,
    /// The addresses of those that grant locks, and of the one for the resources of Redlock.
    pub(crate) servers: Vec<String>,
}

impl Place {
    /// As it is told to a child process.
    pub(crate) fn told(&self) -> String {
        format!("{} {}", self.url, self.servers.join(" "))
    }

    pub(crate) fn of_told(told: &str) -> Self {
        let mut words = told.split(' ').map(str::to_owned);
        Self {
            url: words.next().unwrap_or_default(),
            servers: words.collect(),
        }
    }
}

impl Host {
    /// Servers with the user of the tests; or else, if they are to be shared, the one that the environment names.
    pub(crate) async fn start(kind: &'static Kind, topology: Topology, is_own: bool) -> Result<Self, LockError> {
        // As an argument, so that the user is there after every restart.
        let user = rule(topology);
        let user: Vec<_> = ["--user"].into_iter().chain(user.iter().map(String::as_str)).collect();
        let started = match topology {
            Topology::Alone if is_own || kind.is_started_here() => {
                Server::start_own(kind, &user).await.map(Self::Alone)
            }
            Topology::Alone => {
                let server = Server::start(kind).await.map_err(no_server)?;
                let mut connection = connect(server.url()).await?;
                let add = command("ACL SETUSER").arg(rule(topology)).clone();
                add.exec_async(&mut connection).await.map_err(failed)?;
                Ok(Self::Alone(server))
            }
            Topology::Watched => {
                let (replicas, sentinels) = if is_own { (1, 1) } else { (2, 3) };
                let watched = RedisSentinels::start(kind, replicas, sentinels, NEVER, &user).await;
                watched.map(Self::Watched)
            }
            Topology::Cluster => RedisCluster::start(kind, PRIMARIES, &user).await.map(Self::Cluster),
            Topology::Redlock(count) => {
                let starting = (0..=count).map(|_| Server::start_own(kind, &user));
                try_join_all(starting).await.map(Self::Redlock)
            }
        };
        started.map_err(no_server)
    }

    /// Those that grant locks, and the one for the resources of Redlock.
    fn servers(&self) -> &[Server] {
        match self {
            Self::Alone(server) => std::slice::from_ref(server),
            Self::Watched(sentinels) => &sentinels.servers()[..1],
            Self::Cluster(cluster) => cluster.nodes(),
            Self::Redlock(servers) => servers,
        }
    }

    /// Those that grant locks.
    pub(crate) fn nodes(&self) -> &[Server] {
        match self {
            Self::Redlock(servers) => &servers[..servers.len() - 1],
            _ => self.servers(),
        }
    }

    pub(crate) fn place(&self) -> Place {
        let hosts: Vec<_> = self.nodes().iter().map(Server::authority).collect();
        Place {
            url: match self {
                Self::Alone(server) => server.url().to_owned(),
                Self::Watched(sentinels) => sentinels.url(),
                Self::Cluster(_) => format!("redis+cluster://{}", hosts.join(",")),
                Self::Redlock(_) => "redlock".to_owned(),
            },
            servers: self.servers().iter().map(|server| server.url().to_owned()).collect(),
        }
    }

    /// The same through the proxy at that address, which stands before the first server. Of the nodes of Redlock a minority cannot be
    /// reached, so that everything depends on that one.
    pub(crate) fn place_at(&self, address: SocketAddr) -> Result<Place, LockError> {
        let mut place = self.place();
        match self {
            Self::Watched(_) => {
                let named = FakeSentinel::naming(&address.ip().to_string(), address.port(), 0);
                let named = named.map_err(|error| LockError::failed("standing in for a sentinel", error))?;
                place.url = FakeSentinel::url(&[named]);
            }
            Self::Redlock(servers) => {
                place.servers[0] = servers[0].url_at(address);
                let count = self.nodes().len();
                for (number, url) in place.servers[..count].iter_mut().enumerate().skip(count / 2 + 1) {
                    // Nothing listens on these ports.
                    *url = format!("redis://127.0.0.1:{number}");
                }
            }
            _ => place.url = self.servers()[0].url_at(address),
        }
        Ok(place)
    }

    pub(crate) fn is_ours(&self) -> bool {
        self.servers()[0].is_ours()
    }

    /// What is done to the servers themselves.
    pub(crate) async fn inject(&self, fault: &Fault) -> Result<Injection, LockError> {
        match (self, data_after(fault)) {
            (Self::Cluster(cluster), Some(data)) => {
                let restarted = cluster.restart(data).await;
                restarted.map(|()| Injection::Done).map_err(no_server)
            }
            _ => inject_into(self.servers(), fault).await,
        }
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (first, count) = (&self.nodes()[0], self.nodes().len());
        match self {
            Self::Alone(_) => first.fmt(f)?,
            Self::Watched(service) => {
                let (replicas, sentinels) = (service.servers().len() - 1, service.sentinels().len());
                write!(f, "{first} with {replicas} replicas and {sentinels} sentinels")?;
            }
            Self::Cluster(_) => write!(f, "{count} primaries, each {}", first.version())?,
            Self::Redlock(_) => write!(f, "{count} servers, each {}", first.version())?,
        }
        write!(f, ", as the ACL user {USER:?} with the rights in docs/redis.md")
    }
}
