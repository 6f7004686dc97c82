//! A client's configuration, once it was found usable.

use std::sync::Arc;
use std::time::Duration;

use lock_core::{Claim, Executor, Holder, LockError, LockName, Options};

use crate::PostgresLock;
use crate::config::PostgresConfig;
use crate::keys::Keys;
use crate::schema::Schema;

/// What the client was configured with.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) config: PostgresConfig,
    pub(crate) keys: Keys,
    pub(crate) schema: Schema,
    pub(crate) executor: Executor,
}

impl Settings {
    fn new(mut config: PostgresConfig) -> Result<Self, LockError> {
        config.op_timeout = Options::usable_op_timeout(config.op_timeout)?;
        Ok(Self {
            keys: Keys::new(&config.namespace)?,
            schema: Schema::new(&config.schema)?,
            executor: Executor::new(config.runtime.take()),
            config,
        })
    }

    /// What sessions are called on the server. It cuts after 63 bytes, and shows other letters than those of ASCII as `?`.
    pub(crate) fn application_name(&self) -> String {
        let host = host();
        let host: String = host.chars().filter(|c| c.is_ascii_graphic()).take(24).collect();
        let host = if host.is_empty() { "?" } else { &host };
        format!("fencelock {} {} {host}", self.keys.mark(), std::process::id())
    }
}

/// The name of this machine.
fn host() -> String {
    #[expect(clippy::expect_used, reason = "the name is a usable one")]
    let name = LockName::new("anything").expect("a usable name");
    Holder::of(&Claim::new(name, Duration::from_secs(30)))
        .host
        .unwrap_or_default()
}

impl PostgresConfig {
    /// Connects, and makes the schema if it is missing, unless the client is [`read_only`](Self::read_only). Dropping the future leaves nothing behind.
    ///
    /// # Errors
    ///
    /// - [`LockError::Configuration`] if a setting cannot be used, the server refuses the credentials or the database, its
    ///   certificate is not trusted, the role lacks rights, or the schema is missing and the role may not make it.
    /// - [`LockError::UnsafeConfiguration`] if locks on it might not exclude.
    /// - [`LockError::Unavailable`] if it cannot be reached, or did not answer in time.
    pub async fn connect(self) -> Result<PostgresLock, LockError> {
        let lock = self.connect_lazy()?;
        let sessions = Arc::clone(lock.sessions());
        let executor = sessions.settings.executor.clone();
        // The caller may be outside of a runtime.
        let connecting = async move { sessions.warm_up().await };
        executor.run("connecting", connecting).await??;
        Ok(lock)
    }

    /// Connects at the first request, which fails as [`connect`](Self::connect) does. The next one tries again.
    ///
    /// # Errors
    ///
    /// [`LockError::Configuration`] if a setting cannot be used.
    pub fn connect_lazy(self) -> Result<PostgresLock, LockError> {
        Ok(PostgresLock::new(Settings::new(self)?))
    }
}
