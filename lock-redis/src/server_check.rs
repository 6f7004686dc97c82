//! Which servers locks are safe on.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use lock_core::{LockError, ServerInfo};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

use crate::config::Target;
use crate::error;
use crate::settings::Settings;
use crate::transport::Place;

/// What `INFO` told of the server, as far as it matters here.
#[derive(Clone, Debug)]
pub(crate) struct Server(BTreeMap<String, String>);

const FIELDS: [&str; 11] = [
    "redis_version",
    // Beside the version of the Redis that it descends from.
    "valkey_version",
    "redis_mode",
    "server_mode",
    "run_id",
    "uptime_in_seconds",
    "role",
    "connected_slaves",
    // It is there only if the server refuses writes without replicas.
    "min_slaves_good_slaves",
    "maxmemory",
    "maxmemory_policy",
];

impl Server {
    pub(crate) fn read(info: &str) -> Self {
        let fields = info.lines().filter_map(|line| line.trim_end().split_once(':'));
        // Of a sentinel, the services that it watches: `master0:name=mymaster,status=ok,...`.
        let matters = |(field, value): &(&str, &str)| FIELDS.contains(field) || value.starts_with("name=");
        let fields = fields
            .filter(matters)
            .map(|(field, value)| (field.to_owned(), value.to_owned()));
        Self(fields.collect())
    }

    fn text(&self, field: &str) -> &str {
        self.0.get(field).map_or("", String::as_str)
    }

    fn number(&self, field: &str) -> u64 {
        self.text(field).parse().unwrap_or_default()
    }

    fn mode(&self) -> &str {
        let mode = self.text("redis_mode");
        if mode.is_empty() {
            self.text("server_mode")
        } else {
            mode
        }
    }

    /// Product and version, for display.
    pub(crate) fn named(&self) -> ServerInfo {
        match self.text("valkey_version") {
            "" => ServerInfo::new("Redis", self.text("redis_version")),
            version => ServerInfo::new("Valkey", version),
        }
    }

    /// What tells it from all others, until it is restarted.
    pub(crate) fn run_id(&self) -> &str {
        self.text("run_id")
    }

    /// For how long its process has run.
    pub(crate) fn uptime(&self) -> Duration {
        Duration::from_secs(self.number("uptime_in_seconds"))
    }

    pub(crate) fn is_primary(&self) -> bool {
        self.text("role") == "master"
    }

    /// Refuses what the client cannot use, or what locks are not safe on; warns of that if it is allowed.
    ///
    /// `was_primary`: the client has found a primary at this address before. A replica there is a failover under way then, and
    /// no mistake in the address. `place` is the server's.
    pub(crate) fn check(&self, place: &Place, settings: &Settings, was_primary: bool) -> Result<(), LockError> {
        let (target, allow_unsafe) = (&settings.config.target, settings.config.allow_unsafe);
        if let Some(node) = &settings.node {
            self.check_is_alone()?;
            node.found(self.run_id())?;
        }
        if self.mode() == "sentinel" {
            return Err(self.needs_sentinel_address(place));
        }
        match (settings.is_cluster(), self.mode() == "cluster") {
            (true, false) => return Err(not_a_cluster(place)),
            (false, true) => return Err(needs_cluster_address(place)),
            _ => {}
        }
        let danger = match settings.is_cluster() && self.is_replica() {
            // It knows where the primaries are, and serves nothing itself.
            true => self.evicts(),
            false => self.danger(),
        };
        let Some(message) = danger else { return Ok(()) };
        // Sentinels name what should be a primary.
        let is_named = matches!(target, Target::Sentinels(_));
        let is_failover = is_named || was_primary && !allow_unsafe;
        if self.is_replica() && !settings.is_cluster() && is_failover && (allow_unsafe || !self.is_too_old()) {
            return Err(LockError::unavailable("connecting", error::DEMOTED.to_owned()));
        }
        if !allow_unsafe {
            return Err(LockError::unsafe_configuration(format!(
                "{message}; allow_unsafe_configuration turns this refusal into a warning"
            )));
        }
        tracing::warn!(target: "fencelock", "unsafe configuration of Redis: {message}");
        Ok(())
    }

    /// Refuses what cannot be one of several independent servers.
    fn check_is_alone(&self) -> Result<(), LockError> {
        let this = match self.mode() {
            "sentinel" => "a Redis Sentinel, which stores nothing",
            "cluster" => "a node of a Redis Cluster",
            _ => return Ok(()),
        };
        Err(LockError::configuration(format!(
            "this is {this}, and redlock needs servers that share nothing; give the address of a server of its own"
        )))
    }

    /// The address to use instead of that of this sentinel.
    fn needs_sentinel_address(&self, place: &Place) -> LockError {
        let address = |service| {
            let service = utf8_percent_encode(service, IN_PATH);
            format!("{}/{service}", place.url("+sentinel"))
        };
        let services = self
            .0
            .values()
            .filter_map(|value| value.strip_prefix("name=")?.split_once(",status="));
        let known: Vec<_> = services.map(|(service, _)| address(service)).collect();
        let use_this = match &*known {
            [] => format!("{}, once it watches a service", address("SERVICE")),
            known => known.join(" or "),
        };
        LockError::configuration(format!(
            "this is a Redis Sentinel, which keeps no locks but knows the servers that do; use {use_this}, with \
             sentinel_password=... if it wants one"
        ))
    }

    /// Why keys may be evicted, if they may.
    pub(crate) fn evicts(&self) -> Option<String> {
        let policy = self.text("maxmemory_policy");
        (self.number("maxmemory") > 0 && policy != "noeviction").then(|| {
            format!(
                "this Redis evicts keys when its memory is full (maxmemory-policy {policy}), locks and token counters too; set \
                 maxmemory-policy to noeviction, or maxmemory to 0, or give locks a server of their own"
            )
        })
    }

    /// What puts locks at risk although they are kept: what [`check`](Self::check) refuses unless that was allowed, and
    /// replicas that the primary does not depend on.
    pub(crate) fn warnings(&self) -> Vec<String> {
        let needs_replicas = self.0.contains_key("min_slaves_good_slaves");
        let splits = self.is_primary() && self.number("connected_slaves") > 0 && !needs_replicas;
        let splits = splits.then(|| {
            "this Redis goes on alone when its replicas are gone (min-replicas-to-write 0): if one of them is promoted while \
             this server stays up, both grant the same locks, and no holder is told; set \
             min-replicas-to-write and min-replicas-max-lag on all servers"
                .to_owned()
        });
        self.danger().into_iter().chain(splits).collect()
    }

    fn is_too_old(&self) -> bool {
        let mut parts = self
            .text("redis_version")
            .split('.')
            .map(|part| part.parse().unwrap_or(0));
        (parts.next(), parts.next()) < (Some(6), Some(2))
    }

    fn is_replica(&self) -> bool {
        self.text("role") == "slave"
    }

    fn danger(&self) -> Option<String> {
        if self.is_too_old() {
            let version = self.text("redis_version");
            return Some(format!(
                "this Redis has version {version}, and locks need 6.2 or later; update the server"
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

/// What the name of a service keeps as it is in an address.
const IN_PATH: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.');

/// Several servers as one product, with what is to be said of all of them and of each, by its place.
pub(crate) fn several(
    product: String,
    servers: impl IntoIterator<Item = (String, ServerInfo)>,
    mut warnings: Vec<String>,
) -> ServerInfo {
    let mut versions = BTreeSet::new();
    for (place, server) in servers {
        versions.insert(server.to_string());
        let of_server = server.warnings.into_iter();
        warnings.extend(of_server.map(|warning| format!("node {place}: {warning}")));
    }
    let versions = Vec::from_iter(versions).join(", ");
    ServerInfo::new(product, versions).with_warnings(warnings)
}

/// A client of a single server has found a node of a cluster there.
fn needs_cluster_address(place: &Place) -> LockError {
    let address = place.url("+cluster");
    LockError::configuration(format!(
        "this is a node of a Redis Cluster, which serves only a part of the names; use the address {address} instead, with the same \
         credentials and parameters"
    ))
}

/// A client of a cluster has found a single server there.
fn not_a_cluster(place: &Place) -> LockError {
    let url = place.url("");
    let scheme = url.split("//").next().unwrap_or_default();
    LockError::configuration(format!(
        "the Redis at {place} is no node of a cluster; start the address with {scheme} if it is a server of its own, or give the nodes of \
         the cluster"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::RedisConfig;

    fn server(change: &str) -> Server {
        let usual = "# Server\r\nredis_version:7.0.15\r\nredis_mode:standalone\r\nrole:master\r\nmaxmemory:0\r\n\
                     maxmemory_policy:noeviction\r\n";
        Server::read(&format!("{usual}{change}\r\n"))
    }

    /// What a client says of a server that `INFO` tells this of, and whether it is refused as unsafe.
    fn checked(change: &str, config: RedisConfig, was_primary: bool) -> Result<(), LockError> {
        let settings = Settings::new(config).unwrap();
        server(change).check(&Place::tcp("::1", 7000), &settings, was_primary)
    }

    const EVICTS: &str = "maxmemory:1000\r\nmaxmemory_policy:volatile-ttl";

    #[test]
    fn what_is_unsafe_is_refused_with_what_to_change_unless_it_is_allowed() {
        let one = || RedisConfig::new("h", 1);
        for usual in [
            "",
            "redis_version:6.2.0",
            "maxmemory:1000",
            "maxmemory_policy:allkeys-lru",
        ] {
            assert!(checked(usual, one(), false).is_ok(), "{usual}");
        }
        for (change, word) in [
            ("redis_version:6.0.16", "6.2"),
            ("role:slave", "primary"),
            (EVICTS, "noeviction"),
        ] {
            let refused = checked(change, one(), false).unwrap_err();
            assert!(matches!(refused, LockError::UnsafeConfiguration { .. }), "{refused:?}");
            assert!(refused.to_string().contains(word), "{refused}");
            let allowing = one().allow_unsafe_configuration(true);
            assert!(checked(change, allowing, false).is_ok(), "{change}");
        }
        let cluster = || RedisConfig::cluster([("h", 1)]);
        assert!(checked("redis_mode:cluster\r\nrole:slave", cluster(), false).is_ok());
        let refused = checked(
            &format!("redis_mode:cluster\r\nrole:slave\r\n{EVICTS}"),
            cluster(),
            false,
        );
        assert!(matches!(refused, Err(LockError::UnsafeConfiguration { .. })));
    }

    #[test]
    fn a_replica_where_a_primary_was_is_a_failover_under_way() {
        let told = checked("role:slave", RedisConfig::new("h", 1), true).unwrap_err();
        assert!(matches!(told, LockError::Unavailable { .. }), "{told:?}");
        assert!(told.to_string().contains("failover"), "{told}");
        let old = "role:slave\r\nredis_version:6.0.16";
        let refused = checked(old, RedisConfig::new("h", 1), true).unwrap_err();
        assert!(matches!(refused, LockError::UnsafeConfiguration { .. }), "{refused:?}");
    }

    #[test]
    fn a_server_is_named_and_a_primary_that_does_not_need_its_replicas_is_a_warning() {
        assert_eq!(server("").named().to_string(), "Redis 7.0.15");
        let valkey = "server_name:valkey\r\nvalkey_version:8.1.1";
        for first in [
            server(valkey),
            Server::read(&format!("{valkey}\r\nredis_version:7.2.4\r\n")),
        ] {
            assert_eq!(first.named().to_string(), "Valkey 8.1.1");
        }
        for (change, words) in [
            ("", &[][..]),
            ("connected_slaves:1\r\nmin_slaves_good_slaves:1", &[]),
            ("connected_slaves:1", &["min-replicas-to-write"]),
            (
                &format!("connected_slaves:1\r\n{EVICTS}"),
                &["noeviction", "min-replicas-to-write"],
            ),
        ] {
            let warnings = server(change).warnings();
            assert_eq!(warnings.len(), words.len(), "{warnings:?}");
            assert!(
                warnings.iter().zip(words).all(|(warning, word)| warning.contains(word)),
                "{warnings:?}"
            );
        }
    }

    #[test]
    fn what_is_no_server_for_locks_is_refused_in_any_case_with_the_address_to_use() {
        let services = "redis_mode:sentinel\r\nmaster0:name=my,master,status=ok,address=127.0.0.1:1,slaves=2\r\n\
                        master1:name=b,status=sdown,address=127.0.0.1:2,slaves=0";
        let one = || RedisConfig::new("h", 1);
        for (change, config, word) in [
            ("redis_mode:sentinel", one(), "redis+sentinel://[::1]:7000/SERVICE"),
            (
                services,
                one(),
                "use redis+sentinel://[::1]:7000/my%2Cmaster or redis+sentinel://[::1]:7000/b",
            ),
            ("redis_mode:cluster", one(), "redis+cluster://[::1]:7000"),
            ("", RedisConfig::cluster([("h", 1)]), "start the address with redis:"),
        ] {
            let refused = checked(change, config.allow_unsafe_configuration(true), false).unwrap_err();
            assert!(matches!(refused, LockError::Configuration { .. }), "{refused:?}");
            assert!(refused.to_string().contains(word), "{refused}");
        }
    }
}
