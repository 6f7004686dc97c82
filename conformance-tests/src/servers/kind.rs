//! The servers that there are backends for.

use std::io;
use std::net::SocketAddr;
use std::path::Path;

use super::{etcd, postgres, redis};

/// A kind of server, of one version.
#[derive(Debug)]
pub struct Kind {
    /// What people call it.
    pub(super) title: &'static str,
    /// What variables call it.
    pub(super) key: &'static str,
    /// The official image.
    pub(super) image: &'static str,
    /// The port in the container.
    pub(super) port: u16,
    /// Where its image keeps data.
    pub(super) data: &'static str,
    /// The program, and where it may be beside the `PATH`.
    pub(super) program: &'static str,
    pub(super) folders: &'static [&'static str],
    /// What `--version` of the right version prints, among more.
    pub(super) version: &'static str,
    pub(super) protocol: Protocol,
}

/// How the server is talked to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Protocol {
    Redis,
    /// A Redis that others talk to: with replicas, one of them, or a node of a cluster.
    RedisPeer,
    /// It watches a Redis.
    RedisSentinel,
    Postgres,
    Etcd,
    /// Of a cluster: it talks to the other members too.
    EtcdMember,
    /// In front of a cluster.
    EtcdProxy,
}

/// Where a server runs, as it sees it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place<'a> {
    /// In a container of the official image, whose entrypoint prepares the rest.
    pub(super) contained: bool,
    pub(super) port: u16,
    pub(super) data: &'a str,
}

impl Kind {
    /// Redis 8.
    pub const REDIS: Self = Self {
        title: "Redis 8",
        key: "REDIS",
        image: "redis:8",
        version: "Redis server v=8.",
        ..Self::LIKE_REDIS
    };
    /// Valkey 8.1.
    pub const VALKEY: Self = Self {
        title: "Valkey 8.1",
        key: "VALKEY",
        image: "valkey/valkey:8.1",
        program: "valkey-server",
        version: "Valkey server v=8.1.",
        ..Self::LIKE_REDIS
    };
    /// Redis 7.0.
    pub const REDIS_7_0: Self = Self {
        title: "Redis 7.0",
        key: "REDIS70",
        image: "redis:7.0",
        version: "Redis server v=7.0.",
        ..Self::LIKE_REDIS
    };
    const REDIS_PEER: Self = Self::REDIS.with(Protocol::RedisPeer);
    const REDIS_SENTINEL: Self = Self::REDIS.with(Protocol::RedisSentinel);
    const VALKEY_PEER: Self = Self::VALKEY.with(Protocol::RedisPeer);
    const VALKEY_SENTINEL: Self = Self::VALKEY.with(Protocol::RedisSentinel);
    const REDIS_7_0_PEER: Self = Self::REDIS_7_0.with(Protocol::RedisPeer);
    const REDIS_7_0_SENTINEL: Self = Self::REDIS_7_0.with(Protocol::RedisSentinel);
    /// PostgreSQL 17: the user `postgres` needs no password.
    pub const POSTGRES: Self = Self {
        title: "PostgreSQL 17",
        key: "POSTGRES",
        image: "postgres:17",
        port: 5432,
        data: "/var/lib/postgresql/data",
        program: "postgres",
        folders: &["/usr/lib/postgresql/17/bin"],
        version: "postgres (PostgreSQL) 17.",
        protocol: Protocol::Postgres,
    };
    /// PostgreSQL 15: the user `postgres` needs no password.
    pub const POSTGRES_15: Self = Self {
        title: "PostgreSQL 15",
        key: "POSTGRES15",
        image: "postgres:15",
        folders: &["/usr/lib/postgresql/15/bin"],
        version: "postgres (PostgreSQL) 15.",
        ..Self::POSTGRES
    };
    /// etcd 3.5.
    pub const ETCD: Self = Self {
        title: "etcd 3.5",
        key: "ETCD",
        image: "quay.io/coreos/etcd:v3.5.16",
        port: 2379,
        data: "/var/lib/etcd",
        program: "etcd",
        folders: &[],
        version: "etcd Version: 3.5.",
        protocol: Protocol::Etcd,
    };
    /// etcd 3.5, one member of several.
    pub(super) const ETCD_MEMBER: Self = Self {
        protocol: Protocol::EtcdMember,
        ..Self::ETCD
    };
    /// The proxy of etcd 3.5 for gRPC. Its arguments name the endpoints behind it.
    pub const ETCD_PROXY: Self = Self {
        protocol: Protocol::EtcdProxy,
        ..Self::ETCD
    };
    const LIKE_REDIS: Self = Self {
        title: "",
        key: "",
        image: "",
        port: 6379,
        data: "/data",
        program: "redis-server",
        folders: &[],
        version: "",
        protocol: Protocol::Redis,
    };

    const fn with(self, protocol: Protocol) -> Self {
        Self { protocol, ..self }
    }

    /// The same server with replicas, as one of them, or as a node of a cluster.
    pub(super) fn peer(&self) -> &'static Self {
        match self.key {
            "VALKEY" => &Self::VALKEY_PEER,
            "REDIS70" => &Self::REDIS_7_0_PEER,
            _ => &Self::REDIS_PEER,
        }
    }

    /// Its sentinel.
    pub(super) fn sentinel(&self) -> &'static Self {
        match self.key {
            "VALKEY" => &Self::VALKEY_SENTINEL,
            "REDIS70" => &Self::REDIS_7_0_SENTINEL,
            _ => &Self::REDIS_SENTINEL,
        }
    }

    /// What people call it, with the version that is wanted.
    #[must_use]
    pub fn title(&self) -> &'static str {
        self.title
    }

    /// The variable that may name a server of this kind.
    #[must_use]
    pub fn url_variable(&self) -> String {
        format!("FENCELOCK_TEST_{}_URL", self.key)
    }

    /// Whether a test run starts a server of this kind: the environment names none. One that it has not started can neither be stopped nor
    /// restarted.
    #[must_use]
    pub fn is_started_here(&self) -> bool {
        std::env::var_os(self.url_variable()).is_none_or(|url| url.is_empty())
    }

    /// The image, as the environment wants it.
    pub(super) fn wanted_image(&self) -> String {
        let image = std::env::var(format!("FENCELOCK_TEST_{}_IMAGE", self.key));
        image
            .ok()
            .filter(|image| !image.is_empty())
            .unwrap_or(self.image.to_owned())
    }

    /// An address of such a server without TLS.
    pub(super) fn url(&self, address: SocketAddr) -> String {
        match self.protocol {
            Protocol::Redis | Protocol::RedisPeer | Protocol::RedisSentinel => format!("redis://{address}"),
            Protocol::Postgres => format!("postgres://postgres@{address}/postgres"),
            Protocol::Etcd | Protocol::EtcdMember | Protocol::EtcdProxy => format!("http://{address}"),
        }
    }

    /// The environment that its image needs.
    pub(super) fn environment(&self) -> &'static [(&'static str, &'static str)] {
        match self.protocol {
            Protocol::Postgres => &[("POSTGRES_HOST_AUTH_METHOD", "trust")],
            _ => &[],
        }
    }

    /// Whether its container is to see this machine's loopback as its own, since others there are to be reached.
    pub(super) fn shares_the_loopback(&self) -> bool {
        matches!(
            self.protocol,
            Protocol::EtcdMember | Protocol::EtcdProxy | Protocol::RedisPeer | Protocol::RedisSentinel
        )
    }

    /// The program and its arguments.
    pub(super) fn command(&self, place: Place<'_>) -> Vec<String> {
        let arguments = match self.protocol {
            Protocol::RedisSentinel => return redis::sentinel(self.program, place),
            Protocol::Redis => redis::arguments(place),
            Protocol::RedisPeer => redis::peer_arguments(place),
            Protocol::Postgres => postgres::arguments(place),
            Protocol::Etcd => etcd::arguments(place),
            Protocol::EtcdMember => etcd::member_arguments(place),
            Protocol::EtcdProxy => etcd::proxy_arguments(place),
        };
        [self.program.to_owned()].into_iter().chain(arguments).collect()
    }

    /// What must run once before the first start on empty data, outside of a container.
    pub(super) fn preparation(&self, data: &str) -> Option<Vec<String>> {
        match self.protocol {
            Protocol::Postgres => Some(postgres::preparation(data)),
            _ => None,
        }
    }

    /// The version of the server that answers there, once it takes requests.
    ///
    /// `user_info` is what stands before the `@` of its address.
    pub(super) async fn probe(&self, authority: &str, user_info: Option<&str>) -> io::Result<String> {
        match self.protocol {
            Protocol::Redis | Protocol::RedisPeer => redis::probe(authority, user_info).await,
            Protocol::RedisSentinel => redis::probe_sentinel(authority).await,
            Protocol::Postgres => postgres::probe(authority).await,
            Protocol::Etcd | Protocol::EtcdMember => etcd::probe(authority).await,
            Protocol::EtcdProxy => etcd::probe_proxy(authority).await,
        }
    }

    /// The program on the `PATH`, or in its own folder, if it is there in the version that is wanted.
    pub(super) fn program_on_path(&self) -> Result<std::path::PathBuf, String> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let folders = std::env::split_paths(&path).chain(self.folders.iter().map(Into::into));
        let mut found = Vec::new();
        for program in folders.map(|folder| folder.join(self.program)) {
            if !program.is_file() {
                continue;
            }
            let version = version_of(&program);
            if version.contains(self.version) {
                return Ok(program);
            }
            found.push(format!(
                "{} is {:?}",
                program.display(),
                version.lines().next().unwrap_or_default()
            ));
        }
        if found.is_empty() {
            return Err(format!("{} is not on the PATH", self.program));
        }
        Err(format!("{}, which is not {}", found.join(", "), self.title))
    }
}

fn version_of(program: &Path) -> String {
    let output = std::process::Command::new(program).arg("--version").output();
    output.map_or_else(
        |error| error.to_string(),
        |output| String::from_utf8_lossy(&output.stdout).into_owned(),
    )
}
