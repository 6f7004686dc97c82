//! How a client is set up.

#[cfg(feature = "tls")]
use std::path::PathBuf;
use std::time::Duration;

use lock_core::LockError;
#[cfg(feature = "tls")]
use lock_transport::Pin;
use lock_transport::{Secret, TlsFiles};
use tokio::runtime::Handle;

use crate::address;

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
    pub(crate) password: Option<Secret>,
    pub(crate) tls: Tls,
    pub(crate) tls_files: TlsFiles,
    pub(crate) namespace: String,
    pub(crate) schema: String,
    pub(crate) op_timeout: Duration,
    pub(crate) allow_unsafe: bool,
    pub(crate) session_pooler: bool,
    pub(crate) read_only: bool,
    pub(crate) runtime: Option<Handle>,
}

/// Whether the connection is encrypted, and what the server must prove: what libpq calls `sslmode`.
///
/// Connections by a Unix-domain socket are never encrypted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Tls {
    /// Not encrypted.
    Disable,
    /// Encrypted as with [`Require`](Self::Require) if the server offers it, and not encrypted otherwise: a party between client and server
    /// can prevent the encryption.
    #[default]
    Prefer,
    /// Encrypted. With [`trust`](PostgresConfig::trust) this is [`VerifyCa`](Self::VerifyCa); without, any certificate is accepted.
    Require,
    /// Encrypted, with a certificate of a trusted authority.
    VerifyCa,
    /// Encrypted, with a certificate of a trusted authority for that host.
    VerifyFull,
}

impl PostgresConfig {
    /// The servers, credentials and database of a configuration of `tokio-postgres`, whose own way to encrypt is kept
    /// unless [`tls`](Self::tls) is called. Of several servers the first primary is used. What
    /// sessions need is set by this crate, as are keepalives of connections; a `connect_timeout` and a `tcp_user_timeout` of it count.
    #[must_use]
    pub fn new(server: tokio_postgres::Config) -> Self {
        let tls = match server.get_ssl_mode() {
            tokio_postgres::config::SslMode::Disable => Tls::Disable,
            tokio_postgres::config::SslMode::Require => Tls::Require,
            _ => Tls::Prefer,
        };
        Self {
            server,
            password: None,
            tls,
            tls_files: TlsFiles::default(),
            namespace: "fencelock".to_owned(),
            schema: "fencelock".to_owned(),
            op_timeout: Duration::from_secs(5),
            allow_unsafe: false,
            session_pooler: false,
            read_only: false,
            runtime: None,
        }
    }

    /// Reads an address, as `tokio-postgres` and libpq understand it:
    ///
    /// | address | server |
    /// |---|---|
    /// | `postgres://host`, `postgresql://user:password@host:5432/database` | by TCP; what is special in addresses is written as `%` and two digits |
    /// | `postgres://%2Frun%2Fpostgresql/database` | by the socket in that directory of this machine |
    /// | `postgres://first,second:5433/database` | the first of them that is a primary |
    ///
    /// | parameter | meaning | default |
    /// |---|---|---|
    /// | `namespace` | see [`namespace`](Self::namespace) | `fencelock` |
    /// | `schema` | see [`schema`](Self::schema) | `fencelock` |
    /// | `op_timeout` | see [`op_timeout`](Self::op_timeout); `500ms`, `5s`, `1m` | `5s` |
    /// | `pool_mode` | `session`: see [`session_pooler`](Self::session_pooler) | no pooler |
    /// | `allow_unsafe_configuration` | see [there](Self::allow_unsafe_configuration); `true` or `false` | `false` |
    /// | `sslmode` | `disable`, `prefer`, `require`, `verify-ca`, `verify-full`; see [`Tls`] | `verify-full` with `ca` or `pin`, otherwise `prefer` |
    /// | `ca` or `sslrootcert` | see [`trust`](Self::trust); `system` for what the system trusts | |
    /// | `cert`, `key` or `sslcert`, `sslkey` | see [`client_certificate`](Self::client_certificate) | |
    /// | `pin` | see [`pin`](Self::pin); `sha256:` and what `openssl x509 -fingerprint -sha256` prints | none |
    /// | `password_file` | a file with the password alone, read at each connect | |
    /// | `connect_timeout` | seconds that one address has for the TCP connection; of one host never more than half of `op_timeout` | its share |
    /// | `load_balance_hosts` | `random`: hosts, and the addresses of a host, are tried in random order | `disable` |
    /// | `target_session_attrs` | `any` and `read-write` both mean the first primary | |
    /// | `application_name` | accepted and not used: sessions are called `fencelock ...`, by which `list` finds them | |
    /// | `host`, `hostaddr`, `port`, `user`, `password`, `dbname`, `options`, `channel_binding`, `sslnegotiation` | as in libpq | |
    ///
    /// Of a name that has several addresses, the first one that can be connected to is used.
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
    /// The same for all clients of a lock: with another schema they exclude each other, but their tokens come from another counter
    /// and may fall. What keeps locks apart is the [`namespace`](Self::namespace).
    #[must_use]
    pub fn schema(mut self, schema: impl Into<String>) -> Self {
        self.schema = schema.into();
        self
    }

    /// How long one request may take before it counts as failed, including a new connection if it needs one. 5 s if not set, a day
    /// at most; zero is refused. Of several servers each has an even share of it to answer to a new connection.
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

    /// Trusts the certificates in that PEM file, read at each connect, and no others: those of authorities, and the server's own
    /// if it signed that itself. They count in each mode that encrypts: see [`Tls::Require`].
    ///
    /// If not set, `VerifyCa` and `VerifyFull` trust what the system trusts.
    #[cfg(feature = "tls")]
    #[must_use]
    pub fn trust(mut self, file: impl Into<PathBuf>) -> Self {
        self.tls_files.ca = Some(file.into());
        self
    }

    /// Shows the server that certificate, when it asks for one: two PEM files, read at each connect. The first may hold
    /// intermediate certificates after the client's own. The key must not be encrypted.
    #[cfg(feature = "tls")]
    #[must_use]
    pub fn client_certificate(mut self, certificate: impl Into<PathBuf>, key: impl Into<PathBuf>) -> Self {
        self.tls_files.cert = Some(certificate.into());
        self.tls_files.key = Some(key.into());
        self
    }

    /// Takes no other certificate of the server than the one with that fingerprint, in each mode that encrypts. Unless
    /// [`trust`](Self::trust) is used too, its authority, name and dates do not count then.
    #[cfg(feature = "tls")]
    #[must_use]
    pub fn pin(mut self, fingerprint: Pin) -> Self {
        self.tls_files.pin = Some(fingerprint);
        self
    }

    /// The password: a text, or a [`Secret`] that is asked for at each connect. It replaces that of the configuration of
    /// `tokio-postgres`.
    #[must_use]
    pub fn password(mut self, password: impl Into<Secret>) -> Self {
        self.password = Some(password.into());
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

    /// Says that the pooler between, if there is one, gives each client a session of its own until the client disconnects,
    /// and cleans it up before it gives it to another: PgBouncer with `pool_mode = session` and `server_reset_query =
    /// DISCARD ALL`. Any other mode may let two hold the same lock; that cannot be found out from outside for certain, so
    /// a pooler that is noticed is refused unless this is set. Statements still make sure that they reach their session.
    #[must_use]
    pub fn session_pooler(mut self, is_one: bool) -> Self {
        self.session_pooler = is_one;
        self
    }

    /// Only looks at locks: makes no schema, does not touch the counter of tokens, and needs no right to write. Everything that would
    /// take, renew or release a lock fails with [`LockError::Configuration`].
    #[must_use]
    pub fn read_only(mut self, read_only: bool) -> Self {
        self.read_only = read_only;
        self
    }

    /// Works sessions on that runtime instead of fencelock's own background thread. If it ends, the client ends with it. Give
    /// the same one to [`Options::runtime`](lock_core::Options::runtime).
    #[must_use]
    pub fn runtime(mut self, runtime: Handle) -> Self {
        self.runtime = Some(runtime);
        self
    }
}
