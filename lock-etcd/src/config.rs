//! How a client is set up.

#[cfg(feature = "tls")]
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use lock_core::{Executor, LockError, Options};
#[cfg(feature = "tls")]
use lock_transport::Pin;
use lock_transport::{Endpoint, Namespace, Secret, TlsFiles};
use tokio::runtime::Handle;

use crate::address;
use crate::client::Client;
use crate::keys::Keys;
use crate::lock::EtcdLock;
use crate::settings::Settings;

/// The cluster, and how to work with it.
///
/// ```
/// use std::time::Duration;
/// use lock_etcd::EtcdConfig;
///
/// let config = EtcdConfig::new("etcd-1", 2379)
///     .endpoint("etcd-2", 2379)
///     .credentials("locks", "secret")
///     .namespace("shop")
///     .op_timeout(Duration::from_secs(2));
/// assert!(!format!("{config:?}").contains("secret"));
/// EtcdConfig::from_url("etcd://locks:secret@etcd-1:2379,etcd-2:2379?namespace=shop&op_timeout=2s")?;
/// # Ok::<(), lock_core::LockError>(())
/// ```
#[derive(Clone, Debug)]
pub struct EtcdConfig {
    pub(crate) hosts: Vec<Endpoint>,
    pub(crate) tls: Option<TlsFiles>,
    pub(crate) login: Option<(String, Secret)>,
    pub(crate) namespace: String,
    pub(crate) op_timeout: Duration,
    pub(crate) allow_unsafe: bool,
    runtime: Option<Handle>,
}

impl EtcdConfig {
    /// The cluster with a member that listens for clients at that host and port.
    pub fn new(host: impl Into<String>, port: u16) -> Self {
        Self::at(vec![Endpoint::new(host, port)])
    }

    pub(crate) fn at(hosts: Vec<Endpoint>) -> Self {
        Self {
            hosts,
            tls: None,
            login: None,
            namespace: "fencelock".to_owned(),
            op_timeout: Duration::from_secs(5),
            allow_unsafe: false,
            runtime: None,
        }
    }

    /// Reads an address:
    ///
    /// | address | cluster |
    /// |---|---|
    /// | `etcd://host`, `etcd://host:2379` | with that member |
    /// | `etcd://host1:2379,host2:2379,host3:2379` | with these members, of which one at a time is used |
    /// | `etcds://host` | by TLS |
    /// | `etcd://user:password@host` | with credentials; what is special in addresses is written as `%` and two digits |
    ///
    /// | parameter | meaning | default |
    /// |---|---|---|
    /// | `namespace` | see [`namespace`](Self::namespace) | `fencelock` |
    /// | `op_timeout` | see [`op_timeout`](Self::op_timeout); `500ms`, `5s`, `1m` | `5s` |
    /// | `allow_unsafe_configuration` | see [there](Self::allow_unsafe_configuration); `true` or `false` | `false` |
    /// | `ca` | with `etcds:`, see [`trust`](Self::trust) | what the system trusts |
    /// | `cert`, `key` | with `etcds:`, see [`identity`](Self::identity) | none |
    /// | `pin` | with `etcds:`, see [`pin`](Self::pin); `sha256:` and what `openssl x509 -fingerprint -sha256` prints | none |
    /// | `password_file` | a file with the password, read at each connect | |
    ///
    /// # Errors
    ///
    /// [`LockError::Configuration`] if the address is not one of these, or a parameter is unknown, repeated or wrong. It
    /// never shows the address.
    pub fn from_url(url: &str) -> Result<Self, LockError> {
        address::read(url)
    }

    /// Adds a member of the same cluster. Members are used one at a time, beginning with the first; the next one if it
    /// cannot be used any more.
    #[must_use]
    pub fn endpoint(mut self, host: impl Into<String>, port: u16) -> Self {
        self.hosts.push(Endpoint::new(host, port));
        self
    }

    /// Uses TLS. Members must have certificates for the hosts that are given here, by an authority that the system trusts or
    /// that [`trust`](Self::trust) names.
    #[cfg(feature = "tls")]
    #[must_use]
    pub fn tls(mut self) -> Self {
        self.tls.get_or_insert_default();
        self
    }

    /// Uses TLS, and trusts the certificates in that PEM file, read at each connect, and no others: those of authorities, and those
    /// of members that signed their own.
    #[cfg(feature = "tls")]
    #[must_use]
    pub fn trust(mut self, file: impl Into<PathBuf>) -> Self {
        self.tls.get_or_insert_default().ca = Some(file.into());
        self
    }

    /// Uses TLS, and shows the certificate in one PEM file, whose private key is in the other; both are read at each connect.
    #[cfg(feature = "tls")]
    #[must_use]
    pub fn identity(mut self, certificate: impl Into<PathBuf>, key: impl Into<PathBuf>) -> Self {
        let tls = self.tls.get_or_insert_default();
        (tls.cert, tls.key) = (Some(certificate.into()), Some(key.into()));
        self
    }

    /// Uses TLS, and takes no other certificate of a member than the one with that fingerprint. Unless [`trust`](Self::trust) is used
    /// too, its authority, name and dates do not count then.
    #[cfg(feature = "tls")]
    #[must_use]
    pub fn pin(mut self, fingerprint: Pin) -> Self {
        self.tls.get_or_insert_default().pin = Some(fingerprint);
        self
    }

    /// The user to work as, and the password: a text, or a [`Secret`] that is asked for at each connect.
    #[must_use]
    pub fn credentials(mut self, user: impl Into<String>, password: impl Into<Secret>) -> Self {
        self.login = Some((user.into(), password.into()));
        self
    }

    /// What the keys of locks begin with: 1 to 128 letters, digits, and any of `-`, `_`, `.`, `/`. `fencelock` if not set.
    /// Locks in different ones have nothing to do with each other.
    #[must_use]
    pub fn namespace(mut self, namespace: impl Into<String>) -> Self {
        self.namespace = namespace.into();
        self
    }

    /// How long one request may take before it counts as failed, including a new connection if it needs one. 5 s if not set, a day
    /// at most; zero is refused.
    #[must_use]
    pub fn op_timeout(mut self, limit: Duration) -> Self {
        self.op_timeout = limit;
        self
    }

    /// Turns what would be refused, because tokens might fall, into a warning: an etcd before 3.4.32 or 3.5.14.
    #[must_use]
    pub fn allow_unsafe_configuration(mut self, allow: bool) -> Self {
        self.allow_unsafe = allow;
        self
    }

    /// Works connections on that runtime instead of fencelock's own background thread. If it ends, the client ends with it.
    /// Give the same one to [`Options::runtime`].
    #[must_use]
    pub fn runtime(mut self, runtime: Handle) -> Self {
        self.runtime = Some(runtime);
        self
    }

    /// Connects. Dropping the future leaves nothing behind.
    ///
    /// # Errors
    ///
    /// - [`LockError::Configuration`] if the namespace cannot be used, etcd refuses the credentials, a certificate is not
    ///   trusted, or the user lacks rights.
    /// - [`LockError::UnsafeConfiguration`] if tokens might fall there.
    /// - [`LockError::Unavailable`] if no endpoint can be reached, or none answered in time.
    pub async fn connect(self) -> Result<EtcdLock, LockError> {
        let lock = self.connect_lazy()?;
        let client = Arc::clone(lock.client());
        let executor = client.settings().executor.clone();
        // The caller may be outside of a runtime.
        let connecting = async move { client.connect().await };
        executor.run("connecting", connecting).await??;
        Ok(lock)
    }

    /// Connects at the first request, which fails as [`connect`](Self::connect) does. The next one tries again.
    ///
    /// # Errors
    ///
    /// [`LockError::Configuration`] if the namespace or [`op_timeout`](Self::op_timeout) cannot be used.
    pub fn connect_lazy(self) -> Result<EtcdLock, LockError> {
        Ok(EtcdLock::new(Client::new(Settings {
            hosts: self.hosts,
            tls: self.tls,
            login: self.login,
            keys: Keys::new(Namespace::new(self.namespace)?),
            op_timeout: Options::usable_op_timeout(self.op_timeout)?,
            allow_unsafe: self.allow_unsafe,
            executor: Executor::new(self.runtime),
        })))
    }
}
