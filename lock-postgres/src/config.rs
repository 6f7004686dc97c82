//! How a client is set up.

use std::fmt;
#[cfg(feature = "tls")]
use std::path::PathBuf;
use std::time::Duration;

use lock_core::LockError;
use tokio::runtime::Handle;

use crate::keys::Keys;
use crate::schema::Schema;
use crate::sessions::Settings;
use crate::{PostgresLock, address};

/// The server, and how to work with it.
///
/// ```
/// use std::time::Duration;
/// use lock_postgres::PostgresConfig;
///
/// let config = PostgresConfig::from_url("postgres://locks:secret@localhost/shop?sslmode=disable")?
///     .namespace("orders")
///     .op_timeout(Duration::from_secs(2));
/// assert!(!format!("{config:?}").contains("secret"));
/// # Ok::<(), lock_core::LockError>(())
/// ```
#[derive(Clone, Debug)]
pub struct PostgresConfig {
    pub(crate) server: tokio_postgres::Config,
    pub(crate) tls: Tls,
    #[cfg(feature = "tls")]
    pub(crate) root_certificate: Option<PathBuf>,
    pub(crate) namespace: String,
    pub(crate) schema: String,
    pub(crate) op_timeout: Duration,
    pub(crate) allow_unsafe: bool,
    runtime: Option<Handle>,
}

/// Whether the connection is encrypted, and of what the server must convince: what libpq calls `sslmode`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Tls {
    /// Never encrypted.
    Disable,
    /// Encrypted if the server can; whoever it is.
    #[default]
    Prefer,
    /// Encrypted; whoever the server is.
    Require,
    /// Encrypted, with a certificate of a trusted authority.
    VerifyCa,
    /// Encrypted, with a certificate of a trusted authority for that host.
    VerifyFull,
}

/// A text that is never shown.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Secret(pub(crate) String);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

impl PostgresConfig {
    /// The servers, credentials and database of a configuration of `tokio-postgres`, whose own way to encrypt is kept
    /// unless [`tls`](Self::tls) is called. Of several servers the first one is used, or with `TargetSessionAttrs::ReadWrite`
    /// the first one that can be written to. What sessions need is set by this crate.
    #[must_use]
    pub fn new(server: tokio_postgres::Config) -> Self {
        let tls = match server.get_ssl_mode() {
            tokio_postgres::config::SslMode::Disable => Tls::Disable,
            tokio_postgres::config::SslMode::Require => Tls::Require,
            _ => Tls::Prefer,
        };
        Self {
            server,
            tls,
            #[cfg(feature = "tls")]
            root_certificate: None,
            namespace: "fencelock".to_owned(),
            schema: "fencelock".to_owned(),
            op_timeout: Duration::from_secs(5),
            allow_unsafe: false,
            runtime: None,
        }
    }

    /// Reads an address, as libpq and `tokio-postgres` understand it:
    ///
    /// | address | server |
    /// |---|---|
    /// | `postgres://host`, `postgresql://user:password@host:5432/database` | by TCP; what is special in addresses is written as `%` and two digits |
    /// | `postgres://%2Frun%2Fpostgresql/database` | by the socket in that directory of this machine |
    /// | `postgres://first,second:5433/database` | the first of them that can be written to |
    ///
    /// | parameter | meaning | default |
    /// |---|---|---|
    /// | `namespace` | see [`namespace`](Self::namespace) | `fencelock` |
    /// | `schema` | see [`schema`](Self::schema) | `fencelock` |
    /// | `op_timeout` | see [`op_timeout`](Self::op_timeout); `500ms`, `5s`, `1m` | `5s` |
    /// | `allow_unsafe_configuration` | see [there](Self::allow_unsafe_configuration); `true` or `false` | `false` |
    /// | `sslmode` | `disable`, `prefer`, `require`, `verify-ca`, `verify-full`; see [`Tls`] | `prefer` |
    /// | `sslrootcert` | see [`trust`](Self::trust) | what the system trusts |
    /// | `target_session_attrs` | `read-write`, or `any`: the first server that answers, even if it is refused then | `read-write` |
    /// | `host`, `port`, `user`, `password`, `dbname`, `options`, `channel_binding`, `load_balance_hosts` | as in libpq | |
    ///
    /// Without a password the one in `PGPASSWORD` is used, or else that in the file `PGPASSFILE`, `~/.pgpass` if not set.
    ///
    /// # Errors
    ///
    /// [`LockError::Configuration`] if the address is not one of these, or a parameter is unknown, repeated or wrong. It
    /// never shows the address.
    pub fn from_url(url: &str) -> Result<Self, LockError> {
        address::read(url)
    }

    /// What keys of locks are made of, beside the name: 1 to 128 letters, digits, and any of `-`, `_`, `.`, `/`. `fencelock`
    /// if not set. Locks in different ones have nothing to do with each other.
    #[must_use]
    pub fn namespace(mut self, namespace: impl Into<String>) -> Self {
        self.namespace = namespace.into();
        self
    }

    /// The schema that the counter of tokens lives in, `fencelock` if not set. Made at the first connect if the role may.
    #[must_use]
    pub fn schema(mut self, schema: impl Into<String>) -> Self {
        self.schema = schema.into();
        self
    }

    /// How long one request may take before it counts as failed, including a new connection if it needs one. 5 s if not set.
    /// Of several servers each has an even share of it to answer to a new connection.
    #[must_use]
    pub fn op_timeout(mut self, limit: Duration) -> Self {
        self.op_timeout = limit;
        self
    }

    /// Whether connections are encrypted, and of what the server must convince.
    #[must_use]
    pub fn tls(mut self, tls: Tls) -> Self {
        self.tls = tls;
        self
    }

    /// Trusts the authorities in that PEM file, read at each connect, and no others.
    #[cfg(feature = "tls")]
    #[must_use]
    pub fn trust(mut self, file: impl Into<PathBuf>) -> Self {
        self.root_certificate = Some(file.into());
        self
    }

    /// Turns what would be refused, because locks might not exclude or tokens might repeat, into a warning: a pooler that
    /// shares sessions, `fsync = off`, a sequence that hands out numbers ahead. A standby, and a server older than 14, cannot
    /// keep locks at all and are refused in any case.
    #[must_use]
    pub fn allow_unsafe_configuration(mut self, allow: bool) -> Self {
        self.allow_unsafe = allow;
        self
    }

    /// Works connections on that runtime instead of fencelock's own background thread. If it ends, locks are lost.
    #[must_use]
    pub fn runtime(mut self, runtime: Handle) -> Self {
        self.runtime = Some(runtime);
        self
    }

    /// Connects, and makes the schema if it is missing. Dropping the future leaves nothing behind.
    ///
    /// # Errors
    ///
    /// - [`LockError::Configuration`] if a setting cannot be used, the server refuses the credentials or the database, its
    ///   certificate is not trusted, the role lacks rights, or the schema is missing and the role may not make it.
    /// - [`LockError::UnsafeConfiguration`] if locks on it might not exclude.
    /// - [`LockError::Unavailable`] if it cannot be reached, or did not answer in time.
    pub async fn connect(self) -> Result<PostgresLock, LockError> {
        let lock = self.connect_lazy()?;
        lock.sessions().warm_up().await?;
        Ok(lock)
    }

    /// Connects at the first request, which fails as [`connect`](Self::connect) does. The next one tries again.
    ///
    /// # Errors
    ///
    /// [`LockError::Configuration`] if a setting cannot be used.
    pub fn connect_lazy(self) -> Result<PostgresLock, LockError> {
        Ok(PostgresLock::new(Settings {
            server: self.server,
            tls: self.tls,
            #[cfg(feature = "tls")]
            root_certificate: self.root_certificate,
            keys: Keys::new(&self.namespace)?,
            schema: Schema::new(&self.schema)?,
            op_timeout: self.op_timeout,
            allow_unsafe: self.allow_unsafe,
            runtime: self.runtime,
        }))
    }
}
