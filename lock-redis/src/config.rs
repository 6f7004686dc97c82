//! How a client is set up.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use lock_core::{Executor, LockError, Options};
use lock_transport::Secret;
#[cfg(feature = "tls")]
use lock_transport::{Pin, TlsFiles};
use redis::ConnectionAddr;
use tokio::runtime::Handle;

use crate::client::{Client, Identity};
use crate::cluster::Cluster;
use crate::keys::Keys;
use crate::lock::RedisLock;
use crate::login::Login;
use crate::reconnect::{Discovery, Reconnecting};
use crate::redlock::Membership;
use crate::router::SingleServer;
use crate::sentinel::{Sentinels, Service};
use crate::settings::{Settings, Topology};
use crate::transport::Place;

/// The server, or the servers that are used as one, and how to work with them.
///
/// ```
/// use std::time::Duration;
/// use lock_redis::RedisConfig;
///
/// let config = RedisConfig::new("localhost", 6379)
///     .credentials("locks", "secret")
///     .namespace("shop")
///     .op_timeout(Duration::from_secs(2));
/// assert!(!format!("{config:?}").contains("secret"));
/// RedisConfig::from_url("redis://locks:secret@localhost:6379?namespace=shop&op_timeout=2s")?;
/// # Ok::<(), lock_core::LockError>(())
/// ```
#[derive(Clone, Debug)]
pub struct RedisConfig {
    pub(crate) target: Target,
    pub(crate) login: Login,
    pub(crate) database: u32,
    pub(crate) namespace: String,
    pub(crate) op_timeout: Duration,
    pub(crate) counter_retention: Duration,
    pub(crate) allow_unsafe: bool,
    pub(crate) runtime: Option<Handle>,
}

/// For how long counters can be kept.
const RETENTION: std::ops::RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(365 * 24 * 60 * 60);

impl RedisConfig {
    /// The server at that host and port, without TLS, as its default user.
    pub fn new(host: impl Into<String>, port: u16) -> Self {
        Self::at(Target::Server(Place::tcp(host, port)))
    }

    /// The server at that host and port, by TLS. It must have a certificate for that host, by an authority that the system
    /// trusts or that [`trust`](Self::trust) names.
    #[cfg(feature = "tls")]
    pub fn tls(host: impl Into<String>, port: u16) -> Self {
        Self::at(Target::Server(Place::tls(host, port)))
    }

    /// The server that listens on that socket of this machine.
    #[cfg(unix)]
    pub fn unix(path: impl Into<PathBuf>) -> Self {
        Self::at(Target::Server(Place::Unix(path.into())))
    }

    /// The primary of the service with that name, which the sentinels at these hosts and ports know. See `docs/redis.md` of the
    /// project.
    ///
    /// The credentials of this configuration are those of the servers; [`sentinel_credentials`](Self::sentinel_credentials) are those
    /// of the sentinels.
    pub fn sentinel<H: Into<String>>(
        sentinels: impl IntoIterator<Item = (H, u16)>,
        service: impl Into<String>,
    ) -> Self {
        let sentinels = sentinels.into_iter().map(|(host, port)| Place::tcp(host, port));
        Self::at(Target::Service(Service::new(service, sentinels.collect())))
    }

    /// The same by TLS, to the sentinels and to the servers. Each must have a certificate for the host under which it is known:
    /// sentinels for the one given here, servers for the one that the sentinels tell, which is an IP address unless they are set up
    /// with `announce-hostnames`.
    #[cfg(feature = "tls")]
    pub fn sentinel_tls<H: Into<String>>(
        sentinels: impl IntoIterator<Item = (H, u16)>,
        service: impl Into<String>,
    ) -> Self {
        let sentinels = sentinels.into_iter().map(|(host, port)| Place::tls(host, port));
        Self::at(Target::Service(Service::new(service, sentinels.collect())))
    }

    /// The Redis Cluster that the nodes at these hosts and ports belong to. One that answers is enough, also under a name that stands for
    /// all; the others are found through it.
    pub fn cluster<H: Into<String>>(nodes: impl IntoIterator<Item = (H, u16)>) -> Self {
        let nodes = nodes.into_iter().map(|(host, port)| Place::tcp(host, port));
        Self::at(Target::Cluster(nodes.collect()))
    }

    /// The same by TLS. Each node must have a certificate for the host that it announces.
    #[cfg(feature = "tls")]
    pub fn cluster_tls<H: Into<String>>(nodes: impl IntoIterator<Item = (H, u16)>) -> Self {
        let nodes = nodes.into_iter().map(|(host, port)| Place::tls(host, port));
        Self::at(Target::Cluster(nodes.collect()))
    }

    pub(crate) fn at(target: Target) -> Self {
        Self {
            target,
            login: Login::default(),
            database: 0,
            namespace: "fencelock".to_owned(),
            op_timeout: Duration::from_secs(5),
            counter_retention: Duration::from_secs(10 * 60),
            allow_unsafe: false,
            runtime: None,
        }
    }

    /// The server, credentials and database number of a client of the `redis` crate. Connections of its own are made to it:
    /// those of the client lack what locks depend on.
    ///
    /// # Errors
    ///
    /// [`LockError::Configuration`] if the client uses TLS, whose certificates cannot be read from it: use
    /// [`tls`](Self::tls) then.
    pub fn from_client(client: &redis::Client) -> Result<Self, LockError> {
        let info = client.get_connection_info();
        let place = match info.addr() {
            ConnectionAddr::Tcp(host, port) => Place::tcp(host, *port),
            #[cfg(unix)]
            ConnectionAddr::Unix(path) => Place::Unix(path.clone()),
            _ => {
                return Err(LockError::configuration(
                    "how a client checks certificates cannot be read from it; use RedisConfig::tls, or a rediss: address",
                ));
            }
        };
        let login = info.redis_settings();
        let mut config = Self::at(Target::Server(place));
        config.login.user = login.username().map(str::to_owned);
        config.login.password = login.password().map(Secret::from);
        config.database = u32::try_from(login.db())
            .map_err(|_| LockError::configuration("the client has a database number below zero"))?;
        Ok(config)
    }

    /// The user to work as, and the password. [`password`](Self::password) alone means the default user.
    #[must_use]
    pub fn credentials(mut self, user: impl Into<String>, password: impl Into<Secret>) -> Self {
        self.login.user = Some(user.into());
        self.password(password)
    }

    /// The password: a text, or a [`Secret`] that is asked for at each connect.
    #[must_use]
    pub fn password(mut self, password: impl Into<Secret>) -> Self {
        self.login.password = Some(password.into());
        self
    }

    /// The user to ask the sentinels as, and the password. [`sentinel_password`](Self::sentinel_password) alone means their default
    /// user. Without sentinels it has no effect.
    #[must_use]
    pub fn sentinel_credentials(mut self, user: impl Into<String>, password: impl Into<Secret>) -> Self {
        if let Target::Service(service) = &mut self.target {
            service.login.user = Some(user.into());
        }
        self.sentinel_password(password)
    }

    /// The password of the sentinels. Without sentinels it has no effect.
    #[must_use]
    pub fn sentinel_password(mut self, password: impl Into<Secret>) -> Self {
        if let Target::Service(service) = &mut self.target {
            service.login.password = Some(password.into());
        }
        self
    }

    /// The database number. 0 if not set. Locks in different ones have nothing to do with each other.
    #[must_use]
    pub fn database(mut self, number: u32) -> Self {
        self.database = number;
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

    /// Sets for how long the server keeps the token counter of a name after the last grant: 1 s to 365 days. 10 minutes if not
    /// set.
    ///
    /// A counter takes about 150 bytes of the server's memory, so 1 000 new names a second take 90 MB with 10 minutes, and
    /// 13 GB with a day. A name whose counter is gone continues from the server's clock. Its tokens fall only if that clock is
    /// set back by more than this time, or if a replica whose clock is behind by more is promoted. The clients of one
    /// namespace should agree: the last one that was granted the name decides.
    #[must_use]
    pub fn counter_retention(mut self, time: Duration) -> Self {
        self.counter_retention = time;
        self
    }

    /// Trusts the certificates in that PEM file, read at each connect, and no others: those of authorities, and the server's own
    /// if it signed that itself. Without TLS it has no effect.
    #[cfg(feature = "tls")]
    #[must_use]
    pub fn trust(self, file: impl Into<PathBuf>) -> Self {
        let file = file.into();
        self.with_files(|files| files.ca = Some(file.clone()))
    }

    /// Shows the certificate in one PEM file, whose private key is in the other, if the server asks for one; both are read at each
    /// connect. Redis wants one unless its `tls-auth-clients` is off. Without TLS it has no effect.
    #[cfg(feature = "tls")]
    #[must_use]
    pub fn client_certificate(self, certificate: impl Into<PathBuf>, key: impl Into<PathBuf>) -> Self {
        let (certificate, key) = (certificate.into(), key.into());
        self.with_files(|files| (files.cert, files.key) = (Some(certificate.clone()), Some(key.clone())))
    }

    /// Takes no other certificate of the server than the one with that fingerprint. Unless [`trust`](Self::trust) is used too, its
    /// authority, name and dates do not count then. Without TLS it has no effect.
    #[cfg(feature = "tls")]
    #[must_use]
    pub fn pin(self, fingerprint: Pin) -> Self {
        self.with_files(|files| files.pin = Some(fingerprint))
    }

    #[cfg(feature = "tls")]
    pub(crate) fn with_files(mut self, set: impl Fn(&mut TlsFiles)) -> Self {
        for place in self.target.places_mut() {
            if let Place::Tls(_, files) = place {
                set(files);
            }
        }
        self
    }

    /// Turns what would be refused, because locks might not exclude, into a warning: an eviction policy with a memory limit, a
    /// replica, a server older than 6.2.
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
    /// - [`LockError::Configuration`] if the namespace cannot be used, the server refuses the credentials or the database
    ///   number, its certificate is not trusted, the user lacks rights, or it is no Redis.
    /// - [`LockError::UnsafeConfiguration`] if locks on it might not exclude.
    /// - [`LockError::Unavailable`] if it cannot be reached, or did not answer in time.
    pub async fn connect(self) -> Result<RedisLock, LockError> {
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
    /// [`LockError::Configuration`] if the namespace, [`op_timeout`](Self::op_timeout), the time to keep counters, or the database number of
    /// a cluster cannot be used, or no node or sentinel is given.
    pub fn connect_lazy(self) -> Result<RedisLock, LockError> {
        let (executor, target) = (Executor::new(self.runtime.clone()), self.target.clone());
        let settings = Arc::new(self.settings(executor, None)?);
        let identity = Identity::new();
        let feed = identity.feed(&settings);
        let discovery = match target {
            Target::Server(place) => Discovery::Fixed(place),
            Target::Service(service) => Discovery::Sentinels(Arc::new(Sentinels::new(service, settings.op_timeout)?)),
            Target::Cluster(nodes) => {
                let cluster = Cluster::new(nodes, Arc::clone(&settings), feed);
                return Ok(RedisLock::new(Client::new(settings, identity, cluster)));
            }
        };
        let server = SingleServer(Reconnecting::new(discovery, Arc::clone(&settings), feed));
        Ok(RedisLock::new(Client::new(settings, identity, server)))
    }

    /// What a client is made of; `node` if the server is one of several.
    pub(crate) fn settings(self, executor: Executor, node: Option<Membership>) -> Result<Settings, LockError> {
        if !RETENTION.contains(&self.counter_retention) {
            return Err(LockError::configuration(
                "counters cannot be kept for that time; give a counter_retention of 1s to 365days",
            ));
        }
        Ok(Settings {
            target: self.target.to_string(),
            topology: self.topology()?,
            login: self.login,
            database: self.database,
            keys: Keys::new(&self.namespace)?,
            op_timeout: Options::usable_op_timeout(self.op_timeout)?,
            counter_retention: self.counter_retention,
            allow_unsafe: self.allow_unsafe,
            executor,
            node,
        })
    }

    fn topology(&self) -> Result<Topology, LockError> {
        let nodes = match &self.target {
            Target::Server(_) => return Ok(Topology::Server),
            Target::Service(_) => return Ok(Topology::Sentinels),
            Target::Cluster(nodes) => nodes,
        };
        if nodes.is_empty() {
            return Err(LockError::configuration(
                "no node of the cluster is given; give one at least",
            ));
        }
        if self.database != 0 {
            return Err(LockError::configuration(format!(
                "a Redis Cluster has no database {}; leave the number out, and use namespaces to keep locks apart",
                self.database
            )));
        }
        Ok(Topology::Cluster)
    }
}

impl RedisLock {
    /// Connects to the servers at an address such as `redis://user:password@host:6379/0`, `redis+sentinel://host1,host2/service` or
    /// `redis+cluster://host1,host2`; see [`RedisConfig::from_url`].
    ///
    /// # Errors
    ///
    /// As [`RedisConfig::from_url`] and [`RedisConfig::connect`].
    pub async fn connect(url: impl AsRef<str>) -> Result<Self, LockError> {
        RedisConfig::from_url(url.as_ref())?.connect().await
    }
}

/// What the configuration says of where the server is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// At this place.
    Server(Place),
    /// Where sentinels say that it is.
    Service(Service),
    /// Each name is at one of several servers; these are some of them.
    Cluster(Vec<Place>),
}

impl Target {
    /// The places that the configuration names: of the server, of the sentinels, or of nodes.
    #[cfg(feature = "tls")]
    pub(crate) fn places_mut(&mut self) -> &mut [Place] {
        match self {
            Self::Server(place) => std::slice::from_mut(place),
            Self::Service(service) => &mut service.sentinels,
            Self::Cluster(nodes) => nodes,
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Server(place) => place.fmt(f),
            Self::Service(service) => service.fmt(f),
            Self::Cluster(nodes) => {
                let nodes: Vec<_> = nodes.iter().map(Place::to_string).collect();
                write!(f, "{}", nodes.join(", "))
            }
        }
    }
}
