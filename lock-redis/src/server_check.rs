//! Which servers locks are safe on.

use std::time::Duration;

use lock_core::{LockError, ServerInfo};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

use crate::error;
use crate::transport::Place;

/// What `INFO` told of the server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Server {
    version: (u32, u32),
    /// What it calls itself, and the version of that.
    product: String,
    full_version: String,
    run_id: String,
    uptime: Duration,
    mode: String,
    role: String,
    /// How many are connected.
    replicas: u32,
    /// Whether it refuses writes without replicas. The field that tells is there only then.
    needs_replicas: bool,
    maxmemory: u64,
    policy: String,
    /// The services that it watches if it is a sentinel.
    services: Vec<String>,
}

impl Server {
    pub(crate) fn read(info: &str) -> Self {
        let mut server = Self::default();
        for (field, value) in info.lines().filter_map(|line| line.trim_end().split_once(':')) {
            match field {
                "redis_version" => {
                    server.version = version(value);
                    if server.product.is_empty() {
                        (server.product, server.full_version) = ("Redis".to_owned(), value.to_owned());
                    }
                }
                // Beside the version of the Redis that it descends from.
                "valkey_version" => {
                    (server.product, server.full_version) = ("Valkey".to_owned(), value.to_owned());
                }
                "redis_mode" | "server_mode" => server.mode = value.to_owned(),
                "run_id" => server.run_id = value.to_owned(),
                "uptime_in_seconds" => server.uptime = Duration::from_secs(value.parse().unwrap_or_default()),
                "role" => server.role = value.to_owned(),
                "connected_slaves" => server.replicas = value.parse().unwrap_or_default(),
                "min_slaves_good_slaves" => server.needs_replicas = true,
                "maxmemory" => server.maxmemory = value.parse().unwrap_or_default(),
                "maxmemory_policy" => server.policy = value.to_owned(),
                field if field.starts_with("master") => server.services.extend(service(value)),
                _ => {}
            }
        }
        server
    }

    /// For people.
    pub(crate) fn named(&self) -> ServerInfo {
        ServerInfo::new(self.product.as_str(), self.full_version.as_str())
    }

    /// What tells it from all others, until it is restarted.
    pub(crate) fn run_id(&self) -> &str {
        &self.run_id
    }

    /// For how long its process has run.
    pub(crate) fn uptime(&self) -> Duration {
        self.uptime
    }

    pub(crate) fn is_primary(&self) -> bool {
        self.role == "master"
    }

    /// Refuses what locks are not safe on, or warns if that is wanted.
    ///
    /// `was_primary`: the client has found a primary at this address before. A replica there is a failover under way then, and
    /// no mistake in the address. `place` is the server's.
    pub(crate) fn check(&self, place: &Place, allow_unsafe: bool, was_primary: bool) -> Result<(), LockError> {
        if self.is_sentinel() {
            return Err(self.needs_sentinel_address(place));
        }
        let Some(message) = self.danger() else { return Ok(()) };
        if !allow_unsafe && was_primary && self.is_replica() && !self.is_too_old() {
            return Err(LockError::unavailable("connecting", error::DEMOTED.to_owned()));
        }
        refuse(&message, allow_unsafe)
    }

    /// The same for a node of a cluster. It may be a replica, which knows where the primaries are and serves nothing itself.
    pub(crate) fn check_in_cluster(&self, allow_unsafe: bool) -> Result<(), LockError> {
        let danger = match self.is_replica() {
            true => self.evicts(),
            false => self.danger(),
        };
        danger.map_or(Ok(()), |message| refuse(&message, allow_unsafe))
    }

    /// Refuses what cannot be one of several independent servers.
    pub(crate) fn check_is_alone(&self) -> Result<(), LockError> {
        let this = match (self.is_sentinel(), self.is_in_cluster()) {
            (true, _) => "a Redis Sentinel, which stores nothing",
            (_, true) => "a node of a Redis Cluster",
            _ => return Ok(()),
        };
        Err(LockError::configuration(format!(
            "this is {this}, and redlock needs servers that share nothing; give the address of a server of its own"
        )))
    }

    pub(crate) fn is_in_cluster(&self) -> bool {
        self.mode == "cluster"
    }

    pub(crate) fn is_sentinel(&self) -> bool {
        self.mode == "sentinel"
    }

    /// The address to use instead of that of this sentinel.
    fn needs_sentinel_address(&self, place: &Place) -> LockError {
        let address = |service: &String| {
            let service = utf8_percent_encode(service, IN_PATH);
            format!("{}/{service}", place.url("+sentinel"))
        };
        let known: Vec<_> = self.services.iter().map(address).collect();
        let use_this = match &*known {
            [] => format!("{}, once it watches a service", address(&"SERVICE".to_owned())),
            known => known.join(" or "),
        };
        LockError::configuration(format!(
            "this is a Redis Sentinel, which keeps no locks but knows the servers that do; use {use_this}, with \
             sentinel_password=... if it wants one"
        ))
    }

    /// Why keys may be evicted, if they may.
    pub(crate) fn evicts(&self) -> Option<String> {
        (self.maxmemory > 0 && self.policy != "noeviction").then(|| {
            format!(
                "this Redis evicts keys when its memory is full (maxmemory-policy {}), locks and token counters too; set \
                 maxmemory-policy to noeviction, or maxmemory to 0, or give locks a server of their own",
                self.policy
            )
        })
    }

    /// What puts locks at risk although they are kept: what [`check`](Self::check) refuses unless that was allowed, and
    /// replicas that the primary does not depend on.
    pub(crate) fn warnings(&self) -> Vec<String> {
        let splits = self.is_primary() && self.replicas > 0 && !self.needs_replicas;
        let splits = splits.then(|| {
            "this Redis goes on alone when its replicas are gone (min-replicas-to-write 0): if one of them is promoted while \
             this server stays up, both grant the same locks, and no holder is told; set \
             min-replicas-to-write and min-replicas-max-lag on all servers"
                .to_owned()
        });
        self.danger().into_iter().chain(splits).collect()
    }

    fn is_too_old(&self) -> bool {
        self.version < (6, 2)
    }

    fn is_replica(&self) -> bool {
        self.role == "slave"
    }

    fn danger(&self) -> Option<String> {
        if self.is_too_old() {
            let (major, minor) = self.version;
            return Some(format!(
                "this Redis has version {major}.{minor}, and locks need 6.2 or later; update the server"
            ));
        }
        if self.is_replica() {
            return Some(
                "this Redis is a replica, which would forget what is written to it; connect to its primary".into(),
            );
        }
        self.evicts()
    }
}

/// What a service in the answer of a sentinel is called, as in `name=mymaster,status=ok,...`.
fn service(value: &str) -> Option<String> {
    let (name, _) = value.strip_prefix("name=")?.split_once(",status=")?;
    Some(name.to_owned())
}

/// What the name of a service keeps as it is in an address.
const IN_PATH: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.');

/// A client of a single server has found a node of a cluster there.
pub(crate) fn needs_cluster_address(place: &Place) -> LockError {
    let address = place.url("+cluster");
    LockError::configuration(format!(
        "this is a node of a Redis Cluster, which serves only a part of the names; use the address {address} instead, with the same \
         credentials and parameters"
    ))
}

/// A client of a cluster has found a single server there.
pub(crate) fn not_a_cluster(place: &Place) -> LockError {
    let scheme = match place {
        #[cfg(feature = "tls")]
        Place::Tls(..) => "rediss:",
        _ => "redis:",
    };
    LockError::configuration(format!(
        "the Redis at {place} is no node of a cluster; start the address with {scheme} if it is a server of its own, or give the nodes of \
         the cluster"
    ))
}

/// Refuses what is unsafe, or logs a warning if that is allowed.
fn refuse(message: &str, allow_unsafe: bool) -> Result<(), LockError> {
    if !allow_unsafe {
        return Err(LockError::unsafe_configuration(format!(
            "{message}; allow_unsafe_configuration turns this refusal into a warning"
        )));
    }
    tracing::warn!(target: "fencelock", "unsafe configuration of Redis: {message}");
    Ok(())
}

fn version(text: &str) -> (u32, u32) {
    let mut parts = text.split('.').map(|part| part.parse().unwrap_or_default());
    (parts.next().unwrap_or_default(), parts.next().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: fn() -> Place = || Place::tcp("::1", 7000);

    fn server(change: &str) -> Server {
        let usual = "# Server\r\nredis_version:7.0.15\r\nredis_mode:standalone\r\nrole:master\r\nmaxmemory:0\r\n\
                     maxmemory_policy:noeviction\r\n";
        Server::read(&format!("{usual}{change}\r\n"))
    }

    #[test]
    fn a_usual_server_is_accepted() {
        for usual in [
            "",
            "redis_version:6.2.0",
            "maxmemory:1000",
            "maxmemory_policy:allkeys-lru",
        ] {
            assert_eq!(
                server(usual).check(&HERE(), false, false).map_err(|e| e.to_string()),
                Ok(()),
                "{usual}"
            );
        }
    }

    #[test]
    fn a_server_is_named_as_what_it_is() {
        assert_eq!(server("").named().to_string(), "Redis 7.0.15");
        let valkey = "server_name:valkey\r\nvalkey_version:8.1.1";
        assert_eq!(server(valkey).named().to_string(), "Valkey 8.1.1");
        let first = Server::read(&format!("{valkey}\r\nredis_version:7.2.4\r\n"));
        assert_eq!(first.named().to_string(), "Valkey 8.1.1");
    }

    #[test]
    fn what_is_unsafe_is_refused_with_what_to_change_unless_it_is_allowed() {
        for (change, word) in [
            ("redis_version:6.0.16", "6.2"),
            ("role:slave", "primary"),
            ("maxmemory:1000\r\nmaxmemory_policy:volatile-ttl", "noeviction"),
        ] {
            let refused = server(change).check(&HERE(), false, false).unwrap_err();
            assert!(matches!(refused, LockError::UnsafeConfiguration { .. }), "{refused:?}");
            assert!(refused.to_string().contains(word), "{refused}");
            assert!(server(change).check(&HERE(), true, false).is_ok(), "{change}");
        }
    }

    #[test]
    fn a_replica_where_a_primary_was_is_a_failover_under_way() {
        let told = server("role:slave").check(&HERE(), false, true).unwrap_err();
        assert!(matches!(told, LockError::Unavailable { .. }), "{told:?}");
        assert!(told.to_string().contains("failover"), "{told}");
        let refused = server("role:slave\r\nredis_version:6.0.16")
            .check(&HERE(), false, true)
            .unwrap_err();
        assert!(matches!(refused, LockError::UnsafeConfiguration { .. }), "{refused:?}");
    }

    #[test]
    fn a_primary_that_does_not_need_its_replicas_is_a_warning() {
        assert_eq!(server("").warnings(), [""; 0]);
        let warnings = server("connected_slaves:1").warnings();
        assert!(warnings[0].contains("min-replicas-to-write"), "{warnings:?}");
        assert_eq!(
            server("connected_slaves:1\r\nmin_slaves_good_slaves:1").warnings(),
            [""; 0]
        );
        let evicts = server("connected_slaves:1\r\nmaxmemory:1000\r\nmaxmemory_policy:allkeys-lru");
        assert_eq!(evicts.warnings().len(), 2);
    }

    #[test]
    fn a_sentinel_is_answered_with_the_address_to_use() {
        let told = |change: &str| {
            let sentinel = server(&format!("redis_mode:sentinel\r\n{change}"));
            sentinel.check(&HERE(), true, false).unwrap_err().to_string()
        };
        assert!(told("").contains("redis+sentinel://[::1]:7000/SERVICE"));
        let services = "sentinel_masters:2\r\nmaster0:name=my,master,status=ok,address=127.0.0.1:1,slaves=2,sentinels=3\r\n\
                        master1:name=b,status=sdown,address=127.0.0.1:2,slaves=0,sentinels=1";
        let told = told(services);
        assert!(
            told.contains("use redis+sentinel://[::1]:7000/my%2Cmaster or redis+sentinel://[::1]:7000/b"),
            "{told}"
        );
    }

    #[test]
    fn what_is_no_server_for_locks_is_refused_in_any_case() {
        let refused = server("redis_mode:sentinel").check(&HERE(), true, false).unwrap_err();
        assert!(matches!(refused, LockError::Configuration { .. }), "{refused:?}");
    }

    #[test]
    fn one_of_several_servers_is_neither_a_sentinel_nor_a_node_of_a_cluster() {
        assert!(server("").check_is_alone().is_ok());
        for (mode, word) in [("sentinel", "Sentinel"), ("cluster", "Redis Cluster")] {
            let refused = server(&format!("redis_mode:{mode}")).check_is_alone().unwrap_err();
            assert!(matches!(refused, LockError::Configuration { .. }), "{refused:?}");
            assert!(refused.to_string().contains(word), "{refused}");
        }
    }

    #[test]
    fn a_node_of_a_cluster_may_be_a_replica_and_must_not_evict() {
        assert!(server("role:slave").check_in_cluster(false).is_ok());
        let evicts = server("maxmemory:1000\r\nmaxmemory_policy:allkeys-lru");
        let refused = evicts.check_in_cluster(false).unwrap_err();
        assert!(matches!(refused, LockError::UnsafeConfiguration { .. }), "{refused:?}");
        assert!(evicts.check_in_cluster(true).is_ok());
    }
}
