//! The servers that keep the locks, and what can happen to them.

use std::collections::BTreeSet;
use std::io;
use std::time::{Duration, Instant};

use conformance_tests::faults::Proxy;
use tempfile::TempDir;
use test_servers::{Data, Kind, RedisCluster, RedisSentinels, Server, ServerError};

use crate::plan::ServerFault;

const PAUSE: &str = "pause";
const RESTART: &str = "kill, restart";
const EMPTY: &str = "kill, restart without data";
const FAILOVER: &str = "planned failover";
const REPLICA: &str = "pause of a replica";
const SENTINEL: &str = "kill, restart of a sentinel";
const SLOTS: &str = "move of slots";

/// The longest ttl of Redlock: for so long a node that was restarted grants nothing.
const MAX_TTL: Duration = Duration::from_secs(3);

/// After what time without an answer a primary is replaced.
const DOWN_AFTER: Duration = Duration::from_millis(800);

/// What can be soaked: a product, perhaps its version, perhaps its topology.
pub(crate) const KINDS: [&str; 14] = [
    "sqlite",
    "redis",
    "redis-7.0",
    "valkey",
    "redis-sentinel",
    "redis-7.0-sentinel",
    "valkey-sentinel",
    "redis-cluster",
    "redis-7.0-cluster",
    "valkey-cluster",
    "redlock",
    "postgres",
    "postgres-15",
    "etcd",
];

/// The servers that have been started.
enum Running {
    /// None: the locks are in a file.
    File(TempDir),
    /// An address of the user, whose server has no faults.
    Elsewhere(String),
    /// None knows the others.
    Servers(Vec<Server>),
    /// A primary and replicas that sentinels watch.
    Sentinels(RedisSentinels),
    /// Three primaries, each with a replica.
    Cluster(RedisCluster),
}

pub(crate) struct Group {
    name: String,
    running: Running,
    /// The numbers of the servers that have a fault or had the last one.
    struck: Vec<usize>,
    /// Since when the last ones that were restarted are back.
    restarted: Option<Instant>,
    /// How often a primary was replaced.
    pub(crate) failovers: usize,
}

impl Group {
    pub(crate) async fn start(name: &str) -> io::Result<Self> {
        let failed = io::Error::other;
        let kind = match name.split_once('-').unwrap_or((name, "")) {
            ("postgres", "") => &Kind::POSTGRES,
            ("postgres", _) => &Kind::POSTGRES_15,
            ("etcd", _) => &Kind::ETCD,
            ("valkey", _) => &Kind::VALKEY,
            (_, version) if version.starts_with("7.0") => &Kind::REDIS_7_0,
            _ => &Kind::REDIS,
        };
        let running = if name == "sqlite" {
            Running::File(tempfile::tempdir()?)
        } else if name.ends_with("-sentinel") {
            let arguments = ["--repl-diskless-sync-delay", "0"];
            let group = RedisSentinels::start(kind, 2, 3, DOWN_AFTER, &arguments).await;
            Running::Sentinels(group.map_err(failed)?)
        } else if name.ends_with("-cluster") {
            let group = RedisCluster::start_replicated(kind, 3, DOWN_AFTER, &[]).await;
            Running::Cluster(group.map_err(failed)?)
        } else {
            let mut servers = Vec::new();
            for _ in 0..if name == "redlock" { 5 } else { 1 } {
                servers.push(Server::start_own(kind, &[]).await.map_err(failed)?);
            }
            Running::Servers(servers)
        };
        Ok(Self::of(name, running))
    }

    /// Locks at an address of the user.
    pub(crate) fn elsewhere(url: &str) -> Self {
        Self::of("elsewhere", Running::Elsewhere(url.to_owned()))
    }

    fn of(name: &str, running: Running) -> Self {
        Self {
            name: name.to_owned(),
            running,
            struck: Vec::new(),
            restarted: None,
            failovers: 0,
        }
    }

    fn servers(&self) -> &[Server] {
        match &self.running {
            Running::File(_) | Running::Elsewhere(_) => &[],
            Running::Servers(servers) => servers,
            Running::Sentinels(group) => group.servers(),
            Running::Cluster(group) => group.nodes(),
        }
    }

    /// The address for clients.
    pub(crate) fn url(&self) -> String {
        let hosts: Vec<_> = self.servers().iter().map(Server::authority).collect();
        let hosts = hosts.join(",");
        match &self.running {
            Running::File(folder) => format!("sqlite://{}", folder.path().join("locks.db").display()),
            Running::Elsewhere(url) => url.clone(),
            Running::Servers(_) if self.name == "etcd" => format!("etcd://{hosts}"),
            Running::Servers(servers) if servers.len() == 1 => servers[0].url().to_owned(),
            Running::Servers(_) => format!("redlock://{hosts}?max_ttl={}s", MAX_TTL.as_secs()),
            Running::Sentinels(group) => group.url(),
            Running::Cluster(_) => format!("redis+cluster://{hosts}"),
        }
    }

    /// For people, without what may be secret in an address.
    pub(crate) fn title(&self) -> String {
        match self.servers() {
            [] => self.name.clone(),
            [first, others @ ..] => format!("{}, {} x {}", self.name, others.len() + 1, first.version()),
        }
    }

    /// Whether there are several, so that most faults are theirs.
    pub(crate) fn is_several(&self) -> bool {
        self.servers().len() > 1
    }

    /// Whether a proxy can stand between a client and what keeps the locks: not where servers tell clients of each other, nor where
    /// certificates name them.
    pub(crate) fn has_route(&self) -> bool {
        route(&self.url()).is_some()
    }

    /// The address for a client with a proxy of its own on its way, and the proxy.
    pub(crate) async fn through_proxy(&self) -> io::Result<(String, Option<Proxy>)> {
        let url = self.url();
        let Some((before, host, after)) = route(&url) else {
            return Ok((url, None));
        };
        let proxy = Proxy::start(host).await?;
        Ok((format!("{before}{}{after}", proxy.address()), Some(proxy)))
    }

    /// Whether the server frees the locks of a connection that ends.
    pub(crate) fn frees_with_the_connection(&self) -> bool {
        self.name.starts_with("postgres")
    }

    /// What can happen to the servers, and whether two clients may believe because of it.
    pub(crate) fn faults(&self) -> &'static [ServerFault] {
        match &self.running {
            Running::File(_) | Running::Elsewhere(_) => &[],
            Running::Servers(servers) if servers.len() > 1 => &[(PAUSE, false), (RESTART, false), (EMPTY, false)],
            // The locks of Postgres are its sessions', which no restart survives.
            Running::Servers(_) if self.frees_with_the_connection() => &[(PAUSE, false), (RESTART, true)],
            Running::Servers(_) if self.name == "etcd" => &[(PAUSE, false), (RESTART, false)],
            Running::Servers(_) => &[(PAUSE, false), (RESTART, false), (EMPTY, true)],
            // What a replica lacks is lost, except if the primary waits for it first.
            Running::Sentinels(_) => &[
                (PAUSE, true),
                (RESTART, true),
                (FAILOVER, true),
                (REPLICA, false),
                (SENTINEL, false),
            ],
            Running::Cluster(_) => &[(PAUSE, true), (RESTART, true), (FAILOVER, false), (SLOTS, false)],
        }
    }

    /// Does the first part of a fault, and returns when it has been done.
    pub(crate) async fn begin(&mut self, fault: &str) -> io::Result<()> {
        self.until_whole().await?;
        let struck = self.next(fault).await?;
        for number in &struck {
            let server = self.server(fault, *number);
            let begun = match fault {
                PAUSE | REPLICA => server.pause().await,
                RESTART | EMPTY | SENTINEL => server.kill().await,
                // One is under way if it is refused.
                FAILOVER => self.order_failover(*number).await.or(Ok(())),
                _ => self.move_slots(*number).await,
            };
            begun.map_err(io::Error::other)?;
        }
        self.struck = struck;
        Ok(())
    }

    /// Undoes it, and returns when clients can connect and all servers know each other again.
    pub(crate) async fn end(&mut self, fault: &str) -> io::Result<()> {
        for server in &self.struck {
            let server = self.server(fault, *server);
            match fault {
                PAUSE | REPLICA => server.resume().await.map_err(io::Error::other)?,
                RESTART | SENTINEL => server.restart(Data::Kept).await.map_err(io::Error::other)?,
                EMPTY => server.restart(Data::Lost).await.map_err(io::Error::other)?,
                _ => {}
            }
        }
        self.restarted = [RESTART, EMPTY].contains(&fault).then(Instant::now);
        self.until_whole().await?;
        if let (Running::Sentinels(_) | Running::Cluster(_), PAUSE | RESTART | FAILOVER) = (&self.running, fault) {
            let primaries = self.primaries().await?;
            self.failovers += self.struck.iter().filter(|struck| !primaries.contains(struck)).count();
        }
        Ok(())
    }

    fn server(&self, fault: &str, number: usize) -> &Server {
        match &self.running {
            Running::Sentinels(group) if fault == SENTINEL => &group.sentinels()[number],
            _ => &self.servers()[number],
        }
    }

    /// The servers that the next fault strikes.
    async fn next(&self, fault: &str) -> io::Result<Vec<usize>> {
        let count = self.servers().len();
        Ok(match &self.running {
            Running::Sentinels(group) if fault == SENTINEL => vec![fastrand::usize(..group.sentinels().len())],
            Running::Sentinels(_) if fault == REPLICA => vec![(self.primaries().await?[0] + 1) % count],
            Running::Sentinels(_) | Running::Cluster(_) => {
                fastrand::choice(self.primaries().await?).into_iter().collect()
            }
            // A minority: others than the last time, unless those were restarted a short time ago and take no part yet.
            _ => {
                let last = self.struck.first().copied().unwrap_or(0);
                let stay = self.restarted.is_some_and(|since| since.elapsed() <= MAX_TTL);
                let first = if stay { last } else { last + 1 };
                (0..count.div_ceil(2).max(2) - 1).map(|i| (first + i) % count).collect()
            }
        })
    }

    /// The numbers of the primaries: by the word of the first sentinel that answers, or by that of the nodes of a cluster.
    async fn primaries(&self) -> io::Result<Vec<usize>> {
        match &self.running {
            Running::Sentinels(group) => Ok(group.primary().await.into_iter().collect()),
            Running::Cluster(group) => group.primaries().await.map_err(io::Error::other),
            _ => Ok(Vec::new()),
        }
    }

    async fn order_failover(&self, primary: usize) -> Result<(), ServerError> {
        match &self.running {
            Running::Cluster(group) => group.fail_over(primary).await,
            Running::Sentinels(group) => {
                let ordered = group.fail_over().await;
                // It begins some time after the order.
                let changed = async || Ok(group.primary().await.is_ok_and(|named| named != primary));
                let _ = until(Duration::from_secs(10), changed).await;
                ordered
            }
            _ => Ok(()),
        }
    }

    /// Moves the slots of a primary that have keys of counters to another primary, key by key, with pauses in which clients meet a slot of which
    /// a part has been moved.
    async fn move_slots(&self, from: usize) -> Result<(), ServerError> {
        let Running::Cluster(group) = &self.running else {
            return Ok(());
        };
        let primaries = group.primaries().await?;
        let Some(to) = primaries.into_iter().find(|other| *other != from) else {
            return Ok(());
        };
        let mut slots = BTreeSet::new();
        for key in group.nodes()[from].redis("KEYS *:fence").await?.lines() {
            let slot = group.nodes()[from].redis(&format!("CLUSTER KEYSLOT {key}")).await?;
            slots.insert(slot.parse::<u16>()?);
        }
        for slot in slots {
            group.move_slot(slot, from, to, Duration::from_millis(50)).await?;
        }
        Ok(())
    }

    /// Waits until every primary has a replica and, in a cluster, all nodes say that all slots are served.
    async fn until_whole(&self) -> io::Result<()> {
        let expected = match &self.running {
            Running::Sentinels(_) => 1,
            Running::Cluster(_) => self.servers().len() / 2,
            _ => return Ok(()),
        };
        let is_whole = async || -> io::Result<bool> {
            let primaries = self.primaries().await?;
            for (number, server) in self.servers().iter().enumerate() {
                let replication = server.redis("INFO replication").await.map_err(io::Error::other)?;
                let is_primary = primaries.contains(&number);
                let wanted = if is_primary {
                    ["role:master", "state=online"]
                } else {
                    ["role:slave", "link_status:up"]
                };
                let is_linked = wanted.iter().all(|wanted| replication.contains(wanted));
                let is_served = expected == 1 || {
                    let info = server.redis("CLUSTER INFO").await.map_err(io::Error::other)?;
                    info.contains("cluster_state:ok") && info.contains("cluster_slots_ok:16384")
                };
                // With several replicas one may be late.
                if !is_served || (!is_linked && (is_primary || expected > 1)) {
                    return Ok(false);
                }
            }
            Ok(primaries.len() == expected)
        };
        until(Duration::from_secs(60), is_whole).await
    }
}

/// What is before the host of an address, the host with its port, and what is after it: if a proxy can stand there.
fn route(url: &str) -> Option<(&str, String, &str)> {
    let port = match url.split("://").next()? {
        "redis" | "valkey" => 6379,
        "postgres" | "postgresql" => 5432,
        "etcd" => 2379,
        _ => return None,
    };
    let start = url.find("://")? + 3;
    let end = url[start..].find(['/', '?']).map_or(url.len(), |end| start + end);
    let start = url[..end].rfind('@').map_or(start, |at| at + 1);
    let (before, host, after) = (&url[..start], &url[start..end], &url[end..]);
    let elsewhere = ["sslmode", "host=", "hostaddr=", "port="];
    if host.is_empty() || host.contains(',') || elsewhere.iter().any(|it| after.contains(it)) {
        return None;
    }
    // An IPv6 address has colons of its own, within brackets.
    let has_port = host[host.rfind(']').unwrap_or(0)..].contains(':');
    let port = if has_port { String::new() } else { format!(":{port}") };
    Some((before, format!("{host}{port}"), after))
}

/// Waits until it is so. A server that does not answer is asked again.
async fn until(longest: Duration, is_so: impl AsyncFn() -> io::Result<bool>) -> io::Result<()> {
    let start = Instant::now();
    loop {
        let answer = is_so().await;
        if matches!(answer, Ok(true)) {
            return Ok(());
        }
        if start.elapsed() > longest {
            return Err(io::Error::other(format!("the servers are not whole again: {answer:?}")));
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proxy_stands_before_one_server_that_is_reached_without_tls_and_names_no_others() {
        for (url, wanted) in [
            ("redis://redis", Some(("redis://", "redis:6379", ""))),
            (
                "redis://joe:p@ss@h:1/0?x=1",
                Some(("redis://joe:p@ss@", "h:1", "/0?x=1")),
            ),
            ("etcd://[::1]?x", Some(("etcd://", "[::1]:2379", "?x"))),
            ("etcd://a,b", None),
            ("sqlite:/a.db", None),
            ("rediss://h", None),
            ("redis+sentinel://a,b/s", None),
            ("redlock://:p@a,:q@b,:r@c", None),
            ("postgres://h/shop?sslmode=verify-full", None),
            ("postgres:///shop?host=/run/postgresql", None),
        ] {
            let wanted = wanted.map(|(before, host, after)| (before, host.to_owned(), after));
            assert_eq!(route(url), wanted, "{url}");
        }
    }
}
