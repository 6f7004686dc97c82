//! Which backend an address means.

use std::sync::Arc;

use crate::backend::DistributedLock;
use crate::{LockError, Options};

/// The configuration of an address, with those settings of the options that the backend has and that were given.
#[cfg(any(feature = "etcd", feature = "postgres", feature = "redis", feature = "sqlite"))]
macro_rules! config {
    ($config:ty, $url:ident $(, $setting:ident)*) => {{
        let mut config = <$config>::from_url(&$url)?;
        $(if let Some(value) = $setting {
            config = config.$setting(value);
        })*
        config
    }};
}

/// The backend of an address, opened with `$open`, such as `.connect().await`.
macro_rules! backend {
    ($url:expr, $options:expr, $($open:tt)*) => {{
        let (scheme, url) = read($url)?;
        let (op_timeout, runtime) = ($options.get_op_timeout(), $options.get_runtime().cloned());
        let read_only = $options.is_read_only().then_some(true);
        // A build without backends uses none of them.
        let _ = (&url, op_timeout, &runtime, read_only);
        match feature(&scheme) {
            #[cfg(feature = "etcd")]
            "etcd" => Ok(Arc::new(config!(lock_etcd::EtcdConfig, url, op_timeout, runtime) $($open)* ?)),
            #[cfg(feature = "memory")]
            "memory" => Ok(Arc::new(memory(&url[scheme.len() + 1..])?)),
            #[cfg(feature = "postgres")]
            "postgres" => Ok(Arc::new(config!(lock_postgres::PostgresConfig, url, op_timeout, runtime, read_only) $($open)* ?)),
            #[cfg(feature = "redis")]
            "redis" => Ok(Arc::new(config!(lock_redis::RedisConfig, url, op_timeout, runtime) $($open)* ?)),
            #[cfg(feature = "sqlite")]
            "sqlite" => Ok(Arc::new(config!(lock_sqlite::SqliteConfig, url, op_timeout, read_only) $($open)* ?)),
            _ => Err(refused(&scheme)),
        }
    }};
}

pub(crate) async fn connect(url: &str, options: &Options) -> Result<Arc<dyn DistributedLock>, LockError> {
    backend!(url, options, .connect().await)
}

pub(crate) fn connect_lazy(url: &str, options: &Options) -> Result<Arc<dyn DistributedLock>, LockError> {
    backend!(url, options, .connect_lazy())
}

/// A client of the store of that name, or of a store of its own if the name is empty.
///
/// A named store lives as long as the process, so that its tokens go on rising when its last client has ended. A forked child has
/// stores of its own.
#[cfg(feature = "memory")]
fn memory(name: &str) -> Result<crate::MemoryLock, LockError> {
    use std::collections::BTreeMap;
    use std::sync::{Mutex, PoisonError};

    static STORES: Mutex<BTreeMap<(u32, String), crate::MemoryLock>> = Mutex::new(BTreeMap::new());
    let name = name.strip_prefix("//").unwrap_or(name);
    if name.contains(['?', '#']) {
        return Err(LockError::configuration(
            "what follows \"memory:\" is the name of a store, without ? and #; there are no settings",
        ));
    }
    if name.is_empty() {
        return Ok(crate::MemoryLock::new());
    }
    let mut stores = STORES.lock().unwrap_or_else(PoisonError::into_inner);
    let store = stores.entry((std::process::id(), name.to_owned())).or_default();
    Ok(store.client())
}

/// The scheme in lower case, and the address with that scheme.
fn read(url: &str) -> Result<(String, String), LockError> {
    if url.trim() != url || url.chars().any(char::is_control) {
        return Err(LockError::configuration(
            "the address begins or ends with white space, or holds a control character such as a line break; remove it",
        ));
    }
    let is_scheme = |scheme: &str| {
        scheme.starts_with(|c: char| c.is_ascii_alphabetic())
            && scheme.chars().all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c))
    };
    let parts = url.split_once(':').filter(|(scheme, _)| is_scheme(scheme));
    let (scheme, rest) = parts.ok_or_else(|| {
        let why = "the address does not start with a scheme such as \"sqlite:\"";
        LockError::configuration(format!("{why}. {}", possible()))
    })?;
    let scheme = scheme.to_ascii_lowercase();
    let url = format!("{scheme}:{rest}");
    Ok((scheme, url))
}

/// The backends, by the feature that turns each on, and whether this build has it. The usual scheme has the same name.
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
        "rediss" | "valkey" | "valkeys" | "redis+unix" | "valkey+unix" | "redlock" | "redlocks" => "redis",
        "redis+sentinel" | "rediss+sentinel" | "valkey+sentinel" | "valkeys+sentinel" => "redis",
        "redis+cluster" | "rediss+cluster" | "valkey+cluster" | "valkeys+cluster" => "redis",
        other => other,
    }
}

/// The error for a scheme that no backend of this build serves. It shows no more of the address than a known scheme: the rest may be
/// secret, and so may be the first word of a text that is no address.
fn refused(scheme: &str) -> LockError {
    let known = BACKENDS.iter().find(|(name, _)| *name == feature(scheme));
    let why = match known {
        None => "the address has a scheme that no backend of fencelock answers to",
        Some((feature, _)) => &format!(
            "\"{scheme}:\" addresses need the feature \"{feature}\" of the crate fencelock, which is off in this program; \
             turn it on in Cargo.toml"
        ),
    };
    LockError::configuration(format!("{why}. {}", possible()))
}

/// The backends that this build has, and those that features add.
fn possible() -> String {
    let list = |compiled: bool| {
        let names = BACKENDS.iter().filter(|(_, on)| *on == compiled).map(|(name, _)| *name);
        let names: Vec<_> = names.collect();
        if names.is_empty() {
            "none".to_owned()
        } else {
            names.join(", ")
        }
    };
    let (there, more) = (list(true), list(false));
    format!("Backends of this program: {there}; features to turn on for more: {more}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_refused(url: &str, says: &str) {
        let refusal = connect_lazy(url, &Options::new());
        let Err(error @ LockError::Configuration { .. }) = refusal else {
            panic!("{url:?}: {refusal:?}");
        };
        assert!(error.to_string().contains(says), "{url:?}: {error}");
        assert!(!format!("{error} {error:?}").contains("hunter2"), "{error:?}");
    }

    #[test]
    fn an_address_without_a_backend_is_refused_with_what_there_is() {
        for url in [
            "",
            "locks.db",
            "/var/lib/locks.db",
            "mysql://localhost/shop",
            "1:2",
            ":",
            "sqlite3:a.db",
        ] {
            for (feature, _) in BACKENDS {
                is_refused(url, feature);
            }
        }
        for (feature, _) in BACKENDS.iter().filter(|(_, on)| !on) {
            is_refused(&format!("{feature}:x"), &format!("the feature \"{feature}\""));
        }
        for url in [
            "sqlite:a.db\n",
            " sqlite:a.db",
            "redis://h ",
            "memory:a\tb",
            "etcd://h\r\n",
            "\u{a0}memory:",
        ] {
            is_refused(url, "white space");
        }
    }

    #[test]
    fn a_refusal_shows_nothing_secret() {
        for url in [
            "etcd://joe:hunter2@localhost/path",
            "redis://joe:hunter2@localhost/nonumber",
            "redis+sentinel://joe:hunter2@a,b/s/hunter2?sentinel_password=hunter2",
            "rediss+sentinel://joe:hunter2@a,b/s?sentinel_password=hunter2&hunter2",
            "redis+cluster://joe:hunter2@a,b?password=hunter2",
            "redlock://joe:hunter2@a,b,c?node2.hunter2=hunter2",
            "postgres://joe:hunter2@localhost/shop?password=hunter2&sslmode=hunter2",
            "mysql://joe:hunter2@localhost/shop",
            "hunter2",
            "hunter2:hunter2",
            "memory:joe:hunter2@store?password=hunter2",
            "sqlite://joe:hunter2@host/locks.db?password=hunter2",
        ] {
            is_refused(url, "");
        }
    }
}
