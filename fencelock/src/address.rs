//! Which backend an address means.

use std::sync::Arc;

use crate::backend::DistributedLock;
use crate::{LockError, Options};

/// An address that a backend of this build answers to.
pub(crate) enum Address {
    #[cfg(feature = "etcd")]
    Etcd(lock_etcd::EtcdConfig),
    #[cfg(feature = "memory")]
    Memory(lock_core::MemoryLock),
    #[cfg(feature = "postgres")]
    Postgres(Box<lock_postgres::PostgresConfig>),
    #[cfg(feature = "redis")]
    Redis(lock_redis::RedisConfig),
    #[cfg(feature = "redis")]
    RedisCluster(lock_redis::ClusterConfig),
    #[cfg(feature = "redis")]
    Redlock(lock_redis::RedlockConfig),
    #[cfg(feature = "sqlite")]
    Sqlite(lock_sqlite::SqliteConfig),
}

impl Address {
    pub(crate) fn parse(url: &str, options: &Options) -> Result<Self, LockError> {
        if url.trim() != url || url.chars().any(char::is_control) {
            return Err(LockError::configuration(
                "the address begins or ends with white space, or holds a control character such as a line break; remove it",
            ));
        }
        let Some((scheme, rest)) = split(url) else {
            return Err(LockError::configuration(format!(
                "the address does not start with a scheme such as \"sqlite:\". {}",
                possible()
            )));
        };
        #[cfg(not(any(feature = "etcd", feature = "postgres", feature = "redis", feature = "sqlite")))]
        let _ = options;
        #[cfg(not(any(
            feature = "etcd",
            feature = "memory",
            feature = "postgres",
            feature = "redis",
            feature = "sqlite"
        )))]
        let _ = rest;
        match feature(&scheme) {
            #[cfg(feature = "etcd")]
            "etcd" => {
                let mut config = lock_etcd::EtcdConfig::from_url(&format!("{scheme}:{rest}"))?;
                if let Some(limit) = options.get_op_timeout() {
                    config = config.op_timeout(limit);
                }
                if let Some(runtime) = options.get_runtime() {
                    config = config.runtime(runtime.clone());
                }
                Ok(Self::Etcd(config))
            }
            #[cfg(feature = "memory")]
            "memory" => crate::memory::store(rest).map(Self::Memory),
            #[cfg(feature = "postgres")]
            "postgres" => {
                let mut config = lock_postgres::PostgresConfig::from_url(&format!("{scheme}:{rest}"))?;
                if let Some(limit) = options.get_op_timeout() {
                    config = config.op_timeout(limit);
                }
                if let Some(runtime) = options.get_runtime() {
                    config = config.runtime(runtime.clone());
                }
                if options.is_read_only() {
                    config = config.read_only(true);
                }
                Ok(Self::Postgres(Box::new(config)))
            }
            #[cfg(feature = "redis")]
            "redis" if scheme.ends_with("+cluster") => {
                let mut config = lock_redis::ClusterConfig::from_url(&format!("{scheme}:{rest}"))?;
                if let Some(limit) = options.get_op_timeout() {
                    config = config.op_timeout(limit);
                }
                if let Some(runtime) = options.get_runtime() {
                    config = config.runtime(runtime.clone());
                }
                Ok(Self::RedisCluster(config))
            }
            #[cfg(feature = "redis")]
            "redis" if scheme.starts_with("redlock") => {
                let mut config = lock_redis::RedlockConfig::from_url(&format!("{scheme}:{rest}"))?;
                if let Some(limit) = options.get_op_timeout() {
                    config = config.op_timeout(limit);
                }
                if let Some(runtime) = options.get_runtime() {
                    config = config.runtime(runtime.clone());
                }
                Ok(Self::Redlock(config))
            }
            #[cfg(feature = "redis")]
            "redis" => {
                let mut config = lock_redis::RedisConfig::from_url(&format!("{scheme}:{rest}"))?;
                if let Some(limit) = options.get_op_timeout() {
                    config = config.op_timeout(limit);
                }
                if let Some(runtime) = options.get_runtime() {
                    config = config.runtime(runtime.clone());
                }
                Ok(Self::Redis(config))
            }
            #[cfg(feature = "sqlite")]
            "sqlite" => {
                let mut config = lock_sqlite::SqliteConfig::from_url(&format!("sqlite:{rest}"))?;
                if let Some(limit) = options.get_op_timeout() {
                    config = config.op_timeout(limit);
                }
                if options.is_read_only() {
                    config = config.read_only(true);
                }
                Ok(Self::Sqlite(config))
            }
            _ => Err(refused(&scheme)),
        }
    }

    pub(crate) async fn connect(self) -> Result<Arc<dyn DistributedLock>, LockError> {
        match self {
            #[cfg(feature = "etcd")]
            Self::Etcd(config) => Ok(Arc::new(config.connect().await?)),
            #[cfg(feature = "memory")]
            Self::Memory(memory) => Ok(Arc::new(memory)),
            #[cfg(feature = "postgres")]
            Self::Postgres(config) => Ok(Arc::new(config.connect().await?)),
            #[cfg(feature = "redis")]
            Self::Redis(config) => Ok(Arc::new(config.connect().await?)),
            #[cfg(feature = "redis")]
            Self::RedisCluster(config) => Ok(Arc::new(config.connect().await?)),
            #[cfg(feature = "redis")]
            Self::Redlock(config) => Ok(Arc::new(config.connect().await?)),
            #[cfg(feature = "sqlite")]
            Self::Sqlite(config) => Ok(Arc::new(config.connect().await?)),
        }
    }

    pub(crate) fn connect_lazy(self) -> Result<Arc<dyn DistributedLock>, LockError> {
        match self {
            #[cfg(feature = "etcd")]
            Self::Etcd(config) => Ok(Arc::new(config.connect_lazy()?)),
            #[cfg(feature = "memory")]
            Self::Memory(memory) => Ok(Arc::new(memory)),
            #[cfg(feature = "postgres")]
            Self::Postgres(config) => Ok(Arc::new(config.connect_lazy()?)),
            #[cfg(feature = "redis")]
            Self::Redis(config) => Ok(Arc::new(config.connect_lazy()?)),
            #[cfg(feature = "redis")]
            Self::RedisCluster(config) => Ok(Arc::new(config.connect_lazy()?)),
            #[cfg(feature = "redis")]
            Self::Redlock(config) => Ok(Arc::new(config.connect_lazy()?)),
            #[cfg(feature = "sqlite")]
            Self::Sqlite(config) => Ok(Arc::new(config.connect_lazy()?)),
        }
    }
}

/// The scheme in lower case, and what follows its colon.
fn split(url: &str) -> Option<(String, &str)> {
    let (scheme, rest) = url.split_once(':')?;
    let starts = scheme.starts_with(|c: char| c.is_ascii_alphabetic());
    let goes_on = scheme.chars().all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c));
    (starts && goes_on).then(|| (scheme.to_ascii_lowercase(), rest))
}

/// The backends that there are, by the feature that turns each on. The usual scheme has the same name.
const BACKENDS: [(&str, bool); 5] = [
    ("etcd", cfg!(feature = "etcd")),
    ("memory", cfg!(feature = "memory")),
    ("postgres", cfg!(feature = "postgres")),
    ("redis", cfg!(feature = "redis")),
    ("sqlite", cfg!(feature = "sqlite")),
];

/// The feature that a scheme belongs to.
fn feature(scheme: &str) -> &str {
    match scheme {
        "etcds" => "etcd",
        "postgresql" => "postgres",
        "rediss" | "redis+unix" | "redis+sentinel" | "rediss+sentinel" | "redlock" | "redlocks" => "redis",
        "valkey" | "valkeys" | "valkey+unix" | "valkey+sentinel" | "valkeys+sentinel" => "redis",
        "redis+cluster" | "rediss+cluster" | "valkey+cluster" | "valkeys+cluster" => "redis",
        other => other,
    }
}

/// Why nobody answers to the scheme. Never shows more of the address than a scheme that is known: the rest may be
/// secret, and so may be the first word of something that is no address at all.
fn refused(scheme: &str) -> LockError {
    let known = |(name, _): &&(&str, bool)| *name == feature(scheme);
    LockError::configuration(match BACKENDS.iter().find(known) {
        Some((feature, _)) => format!(
            "\"{scheme}:\" addresses need the feature \"{feature}\" of the crate fencelock, which is off in this program; \
             turn it on in Cargo.toml. {}",
            possible()
        ),
        None => format!(
            "the address has a scheme that no backend of fencelock answers to. {}",
            possible()
        ),
    })
}

/// What can be connected to, and what could be.
fn possible() -> String {
    let list = |compiled: bool, sign: &str| {
        let names: Vec<_> = BACKENDS
            .iter()
            .filter(|(_, on)| *on == compiled)
            .map(|(name, _)| format!("{name}{sign}"))
            .collect();
        names.join(", ")
    };
    match (list(true, ":"), list(false, "")) {
        (on, off) if off.is_empty() => format!("It can be one of {on}"),
        (on, off) if on.is_empty() => format!("No backend is compiled in; features to turn on: {off}"),
        (on, off) => format!("Compiled in: {on}. Features to turn on for more: {off}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(url: &str) -> String {
        match Address::parse(url, &Options::new()) {
            Err(error @ LockError::Configuration { .. }) => error.to_string(),
            Err(other) => panic!("{other:?}"),
            Ok(_) => panic!("{url} was accepted"),
        }
    }

    #[test]
    fn an_address_that_nobody_answers_to_tells_what_would_be_answered() {
        for url in [
            "",
            "locks.db",
            "/var/lib/locks.db",
            "mysql://localhost/shop",
            "1:2",
            ":",
            "sqlite3:a.db",
        ] {
            let message = refusal(url);
            for (feature, _) in BACKENDS {
                assert!(message.contains(feature), "{url}: {message}");
            }
        }
    }

    #[test]
    fn white_space_around_an_address_and_control_characters_are_refused() {
        for url in [
            "sqlite:a.db\n",
            " sqlite:a.db",
            "redis://h ",
            "memory:a\tb",
            "etcd://h\r\n",
            "\u{a0}memory:",
        ] {
            assert!(refusal(url).contains("white space"), "{url:?}");
        }
    }

    // With all features there is nothing to see.
    #[cfg(not(all(
        feature = "etcd",
        feature = "memory",
        feature = "postgres",
        feature = "redis",
        feature = "sqlite"
    )))]
    #[test]
    fn a_backend_whose_feature_is_off_names_the_feature() {
        for (feature, on) in BACKENDS {
            if !on {
                let message = refusal(&format!("{feature}:x"));
                assert!(message.contains(&format!("the feature \"{feature}\"")), "{message}");
            }
        }
    }

    #[test]
    fn nothing_secret_is_repeated() {
        for url in [
            "etcd://joe:hunter2@localhost/path",
            "redis://joe:hunter2@localhost/nonumber",
            "redis://joe:hunter2@localhost?password=hunter2",
            "redis+sentinel://joe:hunter2@a,b?sentinel_password=hunter2",
            "redis+sentinel://joe:hunter2@a,b/s/hunter2?sentinel_password=hunter2",
            "rediss+sentinel://joe:hunter2@a,b/s?sentinel_password=hunter2&hunter2",
            "redis+cluster://joe:hunter2@a,b?password=hunter2",
            "redis+cluster://joe:hunter2@a,b/nonumber",
            "redlock://joe:hunter2@a,b,c?password=hunter2",
            "redlock://joe:hunter2@a,b,c?node2.hunter2=hunter2",
            "redlock://joe:hunter2@a,b,c/nonumber",
            "postgres://joe:hunter2@localhost/shop?password=hunter2&sslmode=hunter2",
            "mysql://joe:hunter2@localhost/shop",
            "hunter2",
            "hunter2:hunter2",
            "memory:joe:hunter2@store?password=hunter2",
            "sqlite://joe:hunter2@host/locks.db?password=hunter2",
        ] {
            let error = Address::parse(url, &Options::new()).err();
            let error = error.unwrap_or_else(|| panic!("{url} was accepted"));
            assert!(!format!("{error} {error:?}").contains("hunter2"), "{error:?}");
        }
    }

    #[cfg(feature = "memory")]
    #[test]
    fn schemes_are_read_in_any_case() {
        assert!(Address::parse("Memory:", &Options::new()).is_ok());
    }
}
