//! The backends: their servers, and who takes part on each.

use std::fmt;
use std::time::Duration;

use clap::ValueEnum;
use futures_util::future::try_join_all;
use serde::{Deserialize, Serialize};
use tempfile::TempDir;
use test_servers::{Kind, Server};

use crate::contestant::{Contestant, Result, fencelock};
use crate::{etcd, memory, postgres, redis, sqlite};

/// Where locks are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Backend {
    Memory,
    Sqlite,
    Redis,
    Redlock,
    Postgres,
    Etcd,
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.parts().0)
    }
}

impl Backend {
    /// The name, the raw round trips and the other libraries.
    fn parts(self) -> (&'static str, &'static str, &'static [&'static str]) {
        match self {
            Self::Memory => ("Memory", memory::FLOOR, memory::PEERS),
            Self::Sqlite => ("SQLite", sqlite::FLOOR, sqlite::PEERS),
            Self::Redis => ("Redis", redis::FLOOR, redis::PEERS),
            Self::Redlock => ("Redlock", redis::FLOOR_OF_NODES, redis::PEERS_OF_NODES),
            Self::Postgres => ("Postgres", postgres::FLOOR, postgres::PEERS),
            Self::Etcd => ("etcd", etcd::FLOOR, etcd::PEERS),
        }
    }

    pub(crate) fn floor(self) -> &'static str {
        self.parts().1
    }

    pub(crate) fn peers(self) -> &'static [&'static str] {
        self.parts().2
    }
}

/// How any process reaches the backend.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Place {
    pub(crate) backend: Backend,
    pub(crate) url: String,
}

impl Place {
    /// A client of that contestant.
    pub(crate) async fn connect(&self, who: &str, ttl: Duration) -> Result<Contestant> {
        if let Some(ours) = fencelock(who, &self.url, ttl).await? {
            return Ok(ours);
        }
        match self.backend {
            Backend::Memory => Ok(memory::connect(who)),
            Backend::Sqlite => sqlite::connect(who, &self.url),
            Backend::Redis | Backend::Redlock => redis::connect(who, &self.url, ttl).await,
            Backend::Postgres => postgres::connect(who, &self.url).await,
            Backend::Etcd => etcd::connect(who, &self.url, ttl).await,
        }
    }
}

/// The servers of one run, or its folder. They end with it.
#[derive(Debug)]
pub(crate) struct Site {
    pub(crate) place: Place,
    pub(crate) version: String,
    pub(crate) servers: Vec<Server>,
    _folder: TempDir,
}

impl Site {
    pub(crate) async fn start(backend: Backend) -> Result<Self> {
        let folder = TempDir::new()?;
        let (kind, arguments, count) = match backend {
            Backend::Redis => (&Kind::REDIS, &[][..], 1),
            Backend::Redlock => (&Kind::REDIS, &[][..], 5),
            Backend::Postgres => (&Kind::POSTGRES, postgres::ARGUMENTS, 1),
            Backend::Etcd => (&Kind::ETCD, &[][..], 1),
            Backend::Memory | Backend::Sqlite => (&Kind::REDIS, &[][..], 0),
        };
        let servers = try_join_all((0..count).map(|_| Server::start_own(kind, arguments))).await?;
        let (url, version) = match (backend, &servers[..]) {
            (Backend::Sqlite, _) => {
                let url = format!("sqlite:{}", folder.path().join("locks.db").display());
                (url, format!("SQLite {}", rusqlite::version()))
            }
            (_, []) => ("memory:".to_owned(), "one process".to_owned()),
            (Backend::Etcd, [server]) => (format!("etcd://{}", server.authority()), server.version().to_owned()),
            (_, [server]) => (server.url().to_owned(), server.version().to_owned()),
            (_, [server, ..]) => {
                let hosts: Vec<_> = servers.iter().map(Server::authority).collect();
                let version = format!("{count} servers, each {}", server.version());
                (format!("redlock://{}", hosts.join(",")), version)
            }
        };
        Ok(Self {
            place: Place { backend, url },
            version,
            servers,
            _folder: folder,
        })
    }
}
