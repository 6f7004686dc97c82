//! Which servers locks are safe on.

use lock_core::{BackendVersion, LockError};

use crate::failure;

/// What `INFO` told of the server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Server {
    version: (u32, u32),
    /// What it calls itself, and the version of that.
    product: String,
    full_version: String,
    run_id: String,
    mode: String,
    role: String,
    /// How many are connected.
    replicas: u32,
    /// Whether it refuses writes without replicas. The field that tells is there only then.
    needs_replicas: bool,
    maxmemory: u64,
    policy: String,
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
                "role" => server.role = value.to_owned(),
                "connected_slaves" => server.replicas = value.parse().unwrap_or_default(),
                "min_slaves_good_slaves" => server.needs_replicas = true,
                "maxmemory" => server.maxmemory = value.parse().unwrap_or_default(),
                "maxmemory_policy" => server.policy = value.to_owned(),
                _ => {}
            }
        }
        server
    }

    /// For people.
    pub(crate) fn named(&self) -> BackendVersion {
        BackendVersion::new(self.product.as_str(), self.full_version.as_str())
    }

    /// What tells it from all others, until it is restarted.
    pub(crate) fn run_id(&self) -> &str {
        &self.run_id
    }

    /// Whether scripts can carry flags.
    pub(crate) fn knows_flags(&self) -> bool {
        self.version >= (7, 0)
    }

    pub(crate) fn is_primary(&self) -> bool {
        self.role == "master"
    }

    /// Refuses what locks are not safe on, or warns if that is wanted.
    ///
    /// `was_primary`: the client has found a primary at this address before. A replica there is a failover under way then, and
    /// no mistake in the address.
    pub(crate) fn check(&self, allow_unsafe: bool, was_primary: bool) -> Result<(), LockError> {
        match self.mode.as_str() {
            "sentinel" => {
                return Err(LockError::configuration(
                    "this is a Redis Sentinel, which stores nothing; give the address of the primary, which it tells: \
                     redis-cli -p PORT SENTINEL GET-MASTER-ADDR-BY-NAME NAME",
                ));
            }
            "cluster" => {
                return Err(LockError::configuration(
                    "this is a node of a Redis Cluster, which is not supported; give the address of a server that is in none",
                ));
            }
            _ => {}
        }
        let Some(message) = self.danger() else { return Ok(()) };
        if !allow_unsafe && was_primary && self.is_replica() && !self.is_too_old() {
            return Err(LockError::unavailable("connecting", failure::DEMOTED.to_owned()));
        }
        if !allow_unsafe {
            return Err(LockError::unsafe_configuration(format!(
                "{message}; allow_unsafe_configuration turns this refusal into a warning"
            )));
        }
        tracing::warn!(target: "fencelock", "unsafe configuration of Redis: {message}");
        Ok(())
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
    /// replicas that the primary does not depend on. `min_replicas` is what the client waits for.
    pub(crate) fn warnings(&self, min_replicas: u32) -> Vec<String> {
        let splits = self.is_primary() && self.replicas > 0 && !self.needs_replicas && min_replicas == 0;
        let splits = splits.then(|| {
            "this Redis goes on alone when its replicas are gone (min-replicas-to-write 0): if one of them is promoted while \
             this server stays up, both grant the same locks, and no holder is told; set min_replicas in the address, or \
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

fn version(text: &str) -> (u32, u32) {
    let mut parts = text.split('.').map(|part| part.parse().unwrap_or_default());
    (parts.next().unwrap_or_default(), parts.next().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

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
                server(usual).check(false, false).map_err(|e| e.to_string()),
                Ok(()),
                "{usual}"
            );
        }
        assert!(server("").knows_flags() && !server("redis_version:6.2.99").knows_flags());
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
            let refused = server(change).check(false, false).unwrap_err();
            assert!(matches!(refused, LockError::UnsafeConfiguration { .. }), "{refused:?}");
            assert!(refused.to_string().contains(word), "{refused}");
            assert!(server(change).check(true, false).is_ok(), "{change}");
        }
    }

    #[test]
    fn a_replica_where_a_primary_was_is_a_failover_under_way() {
        let told = server("role:slave").check(false, true).unwrap_err();
        assert!(matches!(told, LockError::Unavailable { .. }), "{told:?}");
        assert!(told.to_string().contains("failover"), "{told}");
        let refused = server("role:slave\r\nredis_version:6.0.16")
            .check(false, true)
            .unwrap_err();
        assert!(matches!(refused, LockError::UnsafeConfiguration { .. }), "{refused:?}");
    }

    #[test]
    fn a_primary_that_does_not_need_its_replicas_is_a_warning() {
        assert_eq!(server("").warnings(0), [""; 0]);
        let warnings = server("connected_slaves:1").warnings(0);
        assert!(warnings[0].contains("min-replicas-to-write"), "{warnings:?}");
        assert_eq!(server("connected_slaves:1").warnings(1), [""; 0]);
        assert_eq!(
            server("connected_slaves:1\r\nmin_slaves_good_slaves:1").warnings(0),
            [""; 0]
        );
        let evicts = server("connected_slaves:1\r\nmaxmemory:1000\r\nmaxmemory_policy:allkeys-lru");
        assert_eq!(evicts.warnings(0).len(), 2);
    }

    #[test]
    fn what_is_no_server_for_locks_is_refused_in_any_case() {
        for mode in ["cluster", "sentinel"] {
            let refused = server(&format!("redis_mode:{mode}")).check(true, false).unwrap_err();
            assert!(matches!(refused, LockError::Configuration { .. }), "{refused:?}");
        }
    }
}
