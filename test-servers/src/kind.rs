//! The servers that there are backends for.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Result, anyhow, ensure};

use crate::{etcd, postgres, redis};

/// A kind of server, of one version.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    title: &'static str,
    /// What variables call it.
    key: &'static str,
    /// The official image. Empty if it is only started as a process.
    image: &'static str,
    /// The port in the container.
    pub(crate) port: u16,
    /// Where its image keeps data.
    pub(crate) data: &'static str,
    /// The program, and a folder of it that need not be on the `PATH`.
    program: &'static str,
    folder: &'static str,
    /// What `--version` of the right version prints, among more.
    version: &'static str,
    role: Role,
    /// Whether its wall clock can be set.
    pub(crate) has_clock: bool,
}

/// What the server does, and so how it is started and talked to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Redis,
    /// A Redis that others talk to: with replicas, one of them, or a node of a cluster.
    RedisPeer,
    RedisSentinel,
    Postgres,
    PgBouncer,
    Etcd,
    /// A member of a cluster, which talks to the other members.
    EtcdMember,
    /// The proxy of etcd for gRPC.
    EtcdProxy,
}

/// Where a server runs, as it sees it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place<'a> {
    /// In a container of the official image, whose entrypoint prepares the rest.
    pub(crate) contained: bool,
    pub(crate) port: u16,
    pub(crate) data: &'a str,
}

impl Kind {
    /// Redis 8.
    pub const REDIS: Self = Self {
        title: "Redis 8",
        key: "REDIS",
        image: "redis:8",
        port: 6379,
        data: "/data",
        program: "redis-server",
        folder: "",
        version: "Redis server v=8.",
        role: Role::Redis,
        has_clock: false,
    };
    /// Valkey 8.1.
    pub const VALKEY: Self = Self {
        title: "Valkey 8.1",
        key: "VALKEY",
        image: "valkey/valkey:8.1",
        program: "valkey-server",
        version: "Valkey server v=8.1.",
        ..Self::REDIS
    };
    /// Redis 7.0.
    pub const REDIS_7_0: Self = Self {
        title: "Redis 7.0",
        key: "REDIS70",
        image: "redis:7.0",
        version: "Redis server v=7.0.",
        ..Self::REDIS
    };
    /// The Redis on the `PATH`, whatever its version, as a process of this machine: it reaches other servers and files here, and starts fast.
    pub const LOCAL_REDIS: Self = Self {
        title: "redis-server",
        image: "",
        version: "Redis server v=",
        role: Role::RedisPeer,
        ..Self::REDIS
    };
    /// The same with a wall clock that can be [set](crate::Server::set_clock).
    pub const CLOCKED_REDIS: Self = Self {
        has_clock: true,
        ..Self::LOCAL_REDIS
    };
    /// A sentinel of the same program. Its arguments are the lines of its configuration.
    pub const LOCAL_SENTINEL: Self = Self::LOCAL_REDIS.with(Role::RedisSentinel);
    /// PostgreSQL 17: the user `postgres` needs no password.
    pub const POSTGRES: Self = Self {
        title: "PostgreSQL 17",
        key: "POSTGRES",
        image: "postgres:17",
        port: 5432,
        data: "/var/lib/postgresql/data",
        program: "postgres",
        folder: "/usr/lib/postgresql/17/bin",
        version: "postgres (PostgreSQL) 17.",
        role: Role::Postgres,
        has_clock: false,
    };
    /// PostgreSQL 15: the user `postgres` needs no password.
    pub const POSTGRES_15: Self = Self {
        title: "PostgreSQL 15",
        key: "POSTGRES15",
        image: "postgres:15",
        folder: "/usr/lib/postgresql/15/bin",
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
        folder: "",
        version: "etcd Version: 3.5.",
        role: Role::Etcd,
        has_clock: false,
    };
    /// What is before a Postgres. Only on the `PATH`.
    pub(crate) const PGBOUNCER: Self = Self {
        title: "PgBouncer",
        program: "pgbouncer",
        folder: "/usr/sbin",
        version: "PgBouncer 1.",
        role: Role::PgBouncer,
        ..Self::POSTGRES
    };
    /// The proxy of etcd 3.5 for gRPC. Its arguments name the endpoints behind it.
    pub const ETCD_PROXY: Self = Self::ETCD.with(Role::EtcdProxy);

    pub(crate) const fn with(self, role: Role) -> Self {
        Self { role, ..self }
    }

    /// Its name, with the version that is wanted.
    #[must_use]
    pub fn title(&self) -> &'static str {
        self.title
    }

    /// The variable that may name a server of this kind.
    #[must_use]
    pub fn url_variable(&self) -> String {
        format!("FENCELOCK_TEST_{}_URL", self.key)
    }

    /// The address of the server that the environment names.
    pub(crate) fn named_url(&self) -> Option<String> {
        let url = std::env::var(self.url_variable()).ok();
        url.filter(|url| !url.is_empty())
    }

    /// Whether a test run starts a server of this kind: the environment names none.
    #[must_use]
    pub fn is_started_here(&self) -> bool {
        self.named_url().is_none()
    }

    /// Whether it is only started as a process, whatever the environment says.
    pub(crate) fn is_local(&self) -> bool {
        self.image.is_empty()
    }

    /// The image, as the environment wants it.
    pub(crate) fn wanted_image(&self) -> String {
        let image = std::env::var(format!("FENCELOCK_TEST_{}_IMAGE", self.key)).ok();
        image.filter(|image| !image.is_empty()).unwrap_or(self.image.to_owned())
    }

    /// What an address of such a server without TLS has before and after the host.
    pub(crate) fn url_parts(&self) -> (&'static str, &'static str) {
        match self.role {
            Role::Redis | Role::RedisPeer | Role::RedisSentinel => ("redis://", ""),
            Role::Postgres | Role::PgBouncer => ("postgres://postgres@", "/postgres"),
            Role::Etcd | Role::EtcdMember | Role::EtcdProxy => ("http://", ""),
        }
    }

    pub(crate) fn url(&self, address: SocketAddr) -> String {
        let (before, after) = self.url_parts();
        format!("{before}{address}{after}")
    }

    /// The environment that its image needs.
    pub(crate) fn environment(&self) -> Option<(&'static str, &'static str)> {
        (self.role == Role::Postgres).then_some(("POSTGRES_HOST_AUTH_METHOD", "trust"))
    }

    /// Whether its container is to have this machine's loopback, since other servers there are to be reached.
    pub(crate) fn shares_the_loopback(&self) -> bool {
        !matches!(self.role, Role::Redis | Role::Postgres | Role::Etcd)
    }

    /// The program and its arguments.
    pub(crate) fn command(&self, place: Place<'_>) -> Vec<String> {
        let all_addresses = place.contained && !self.shares_the_loopback();
        let bind = if all_addresses { "0.0.0.0" } else { "127.0.0.1" };
        let arguments = match self.role {
            Role::RedisSentinel => return redis::sentinel(self.program, place),
            Role::Redis | Role::RedisPeer => redis::arguments(place, bind),
            Role::Postgres => postgres::arguments(place),
            // Its settings say all.
            Role::PgBouncer => vec![format!("{}.ini", place.data)],
            Role::Etcd => etcd::arguments(place, bind, true),
            Role::EtcdMember => etcd::arguments(place, bind, false),
            Role::EtcdProxy => etcd::proxy_arguments(place),
        };
        [self.program.to_owned()].into_iter().chain(arguments).collect()
    }

    /// What must run once before the first start on empty data, outside of a container.
    pub(crate) fn preparation(&self, data: &str) -> Option<Vec<String>> {
        // Small segments: each server begins with a copy of one.
        let initdb =
            "initdb --auth=trust --username=postgres --no-sync --encoding=UTF8 --locale=C --wal-segsize=1 --pgdata";
        let words = initdb.split(' ').chain([data]).map(str::to_owned);
        (self.role == Role::Postgres).then(|| words.collect())
    }

    /// The version of the server that answers there, once it takes requests.
    ///
    /// `user_info` is what stands before the `@` of its address.
    pub(crate) async fn probe(&self, authority: &str, user_info: Option<&str>) -> Result<String> {
        match self.role {
            Role::Redis | Role::RedisPeer => redis::probe(authority, user_info, true).await,
            Role::RedisSentinel => redis::probe(authority, user_info, false).await,
            Role::Postgres | Role::PgBouncer => postgres::probe(authority).await,
            Role::Etcd | Role::EtcdMember => etcd::probe(authority).await,
            Role::EtcdProxy => etcd::healthy(authority).await.map(|()| "etcd grpc-proxy".to_owned()),
        }
    }

    /// The program on the `PATH`, or in its own folder, if one of the version that is wanted is there.
    pub(crate) fn program_on_path(&self) -> Result<PathBuf> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let mut found = Vec::new();
        let folders = std::env::split_paths(&path).chain([self.folder.into()]);
        for folder in folders.filter(|folder| folder.is_absolute()) {
            let program = folder.join(self.program);
            let Ok(output) = Command::new(&program).arg("--version").output() else {
                continue;
            };
            let version = String::from_utf8_lossy(&output.stdout).into_owned();
            if version.contains(self.version) {
                return Ok(program);
            }
            let version = version.lines().next().unwrap_or_default();
            found.push(format!("{} is {version:?}", program.display()));
        }
        ensure!(!found.is_empty(), "{} is not on the PATH", self.program);
        Err(anyhow!("{}, which is not {}", found.join(", "), self.title))
    }
}
