//! How a client is set up.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use lock_core::LockError;
use lock_transport::{Endpoint, Secret};
#[cfg(feature = "tls")]
use lock_transport::{Pin, TlsFiles};
use redis::ConnectionAddr;
use tokio::runtime::Handle;

use crate::transport::{Login, Place};

/// The server, or the servers, and how to work with them.
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
///
/// let nodes = ["a.example", "b.example", "c.example"].map(|host| RedisConfig::new(host, 6379).password("secret"));
/// RedisConfig::redlock(nodes).namespace("shop").max_ttl(Duration::from_secs(30));
/// RedisConfig::from_url("redlock://:secret@a.example,b.example,c.example?namespace=shop&max_ttl=30s")?;
/// # Ok::<(), lock_core::LockError>(())
/// ```
#[derive(Clone, Debug)]
pub struct RedisConfig {
    pub(crate) target: Target,
    /// If there are several independent servers: each of them. `target` means nothing then.
    pub(crate) nodes: Option<Vec<RedisConfig>>,
    pub(crate) login: Login,
    pub(crate) database: u32,
    pub(crate) namespace: String,
    pub(crate) op_timeout: Duration,
    pub(crate) counter_retention: Duration,
    pub(crate) max_ttl: Duration,
    pub(crate) allow_unsafe: bool,
    pub(crate) runtime: Option<Handle>,
}

impl RedisConfig {
    /// The server at that host and port, without TLS, as its default user.
    pub fn new(host: impl Into<String>, port: u16) -> Self {
        Self::at(Target::Server(Place::tcp(host, port)))
    }

    /// The server at that host and port, by TLS. It must have a certificate for that host, by an authority that the system
    /// trusts or that [`trust`](Self::trust) names.
    #[cfg(feature = "tls")]
    pub fn tls(host: impl Into<String>, port: u16) -> Self {
        Self::at(Target::Server(Place::Tls(
            Endpoint::new(host, port),
            TlsFiles::default(),
        )))
    }

    /// The server that listens on that socket of this machine.
    #[cfg(unix)]
    pub fn unix(path: impl Into<PathBuf>) -> Self {
        Self::at(Target::Server(Place::Unix(path.into())))
    }

    /// The primary of the service with that name, which the sentinels at these hosts and ports know, without TLS: that takes an
    /// [address](Self::from_url). See `docs/redis.md` of the project.
    ///
    /// The credentials of this configuration are those of the servers; [`sentinel_credentials`](Self::sentinel_credentials) are those
    /// of the sentinels.
    pub fn sentinel<H: Into<String>>(
        sentinels: impl IntoIterator<Item = (H, u16)>,
        service: impl Into<String>,
    ) -> Self {
        Self::at(Target::Sentinels(Service {
            name: service.into(),
            sentinels: places(sentinels),
            login: Login::default(),
        }))
    }

    /// The Redis Cluster that the nodes at these hosts and ports belong to, without TLS: that takes an [address](Self::from_url). One that
    /// answers is enough, also under a name that stands for all; the others are found through it.
    pub fn cluster<H: Into<String>>(nodes: impl IntoIterator<Item = (H, u16)>) -> Self {
        Self::at(Target::Cluster(places(nodes)))
    }

    /// A majority of those servers, the nodes: 3, 5 or 7 that share nothing and do not replicate each other. Namespace,
    /// [`counter_retention`](Self::counter_retention) and [`op_timeout`](Self::op_timeout) of the first one count for all. What is set
    /// after this is set for all.
    pub fn redlock(nodes: impl IntoIterator<Item = Self>) -> Self {
        let nodes: Vec<_> = nodes.into_iter().collect();
        let mut config = nodes.first().cloned().unwrap_or_else(|| Self::cluster([("", 0); 0]));
        config.nodes = Some(nodes);
        config
    }

    pub(crate) fn at(target: Target) -> Self {
        Self {
            target,
            nodes: None,
            login: Login::default(),
            database: 0,
            namespace: "fencelock".to_owned(),
            op_timeout: Duration::from_secs(5),
            counter_retention: Duration::from_secs(10 * 60),
            max_ttl: Duration::from_secs(60),
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
        let mut config = match info.addr() {
            ConnectionAddr::Tcp(host, port) => Self::new(host, *port),
            #[cfg(unix)]
            ConnectionAddr::Unix(path) => Self::unix(path),
            _ => {
                return Err(LockError::configuration(
                    "how a client checks certificates cannot be read from it; use RedisConfig::tls, or a rediss: address",
                ));
            }
        };
        let login = info.redis_settings();
        config.login.user = login.username().map(str::to_owned);
        config.login.password = login.password().map(Secret::from);
        config.database = u32::try_from(login.db())
            .map_err(|_| LockError::configuration("the client has a database number below zero"))?;
        Ok(config)
    }

    /// The user to work as, and the password. [`password`](Self::password) alone means the default user.
    #[must_use]
    pub fn credentials(self, user: impl Into<String>, password: impl Into<Secret>) -> Self {
        let user = user.into();
        self.each(|config| config.login.user = Some(user.clone()))
            .password(password)
    }

    /// The password: a text, or a [`Secret`] that is asked for at each connect.
    #[must_use]
    pub fn password(self, password: impl Into<Secret>) -> Self {
        let password = password.into();
        self.each(|config| config.login.password = Some(password.clone()))
    }

    /// The user to ask the sentinels as, and the password; their default user is `default`. Without sentinels it has no effect.
    #[must_use]
    pub fn sentinel_credentials(mut self, user: impl Into<String>, password: impl Into<Secret>) -> Self {
        if let Target::Sentinels(service) = &mut self.target {
            service.login = Login::new(Some(user.into()), Some(password.into()));
        }
        self
    }

    /// The database number. 0 if not set. Locks in different ones have nothing to do with each other.
    #[must_use]
    pub fn database(self, number: u32) -> Self {
        self.each(|config| config.database = number)
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

    /// Sets the longest ttl of a lock on [`redlock`](Self::redlock) nodes, between 1 s and one day; 1 minute if not set. All clients of a
    /// namespace must set the same. Elsewhere it has no effect.
    ///
    /// A node that was restarted, or has lost its data, grants nothing for this time, because it may have forgotten leases of this length.
    /// So two holders are excluded also if nodes are emptied, or restart without their last data, as long as a majority grants. A
    /// client that sets another time than those before it is refused with [`LockError::Configuration`].
    #[must_use]
    pub fn max_ttl(mut self, ttl: Duration) -> Self {
        self.max_ttl = ttl;
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
    fn with_files(self, set: impl Fn(&mut TlsFiles)) -> Self {
        self.each(|config| {
            for place in config.target.places_mut() {
                if let Place::Tls(_, files) = place {
                    set(files);
                }
            }
        })
    }

    /// Turns what would be refused, because locks might not exclude, into a warning: an eviction policy with a memory limit, a
    /// replica, a server older than 6.2.
    #[must_use]
    pub fn allow_unsafe_configuration(self, allow: bool) -> Self {
        self.each(|config| config.allow_unsafe = allow)
    }

    /// Works connections on that runtime instead of fencelock's own background thread. If it ends, the client ends with it.
    /// Give the same one to [`Options::runtime`](lock_core::Options::runtime).
    #[must_use]
    pub fn runtime(mut self, runtime: Handle) -> Self {
        self.runtime = Some(runtime);
        self
    }

    /// Sets what every node of several has of its own.
    fn each(mut self, set: impl Fn(&mut Self)) -> Self {
        self.nodes.iter_mut().flatten().for_each(&set);
        set(&mut self);
        self
    }
}

fn places<H: Into<String>>(hosts: impl IntoIterator<Item = (H, u16)>) -> Vec<Place> {
    let place = |(host, port): (H, u16)| Place::Tcp(Endpoint::new(host, port));
    hosts.into_iter().map(place).collect()
}

/// Where the servers are.
#[derive(Clone, Debug)]
pub(crate) enum Target {
    /// At this place.
    Server(Place),
    /// Where sentinels say that it is.
    Sentinels(Service),
    /// Each name is at one of several servers; these are some of them.
    Cluster(Vec<Place>),
}

/// A service, and the sentinels that know its primary.
#[derive(Clone, Debug)]
pub(crate) struct Service {
    pub(crate) name: String,
    /// All of them with TLS or none; so are the servers.
    pub(crate) sentinels: Vec<Place>,
    /// For the sentinels.
    pub(crate) login: Login,
}

impl Target {
    /// The places that the configuration names: of the server, of the sentinels, or of nodes.
    #[cfg(feature = "tls")]
    fn places_mut(&mut self) -> &mut [Place] {
        match self {
            Self::Server(place) => std::slice::from_mut(place),
            Self::Sentinels(service) => &mut service.sentinels,
            Self::Cluster(nodes) => nodes,
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Server(place) => place.fmt(f),
            Self::Sentinels(service) => write!(f, "{:?} of the sentinels {}", service.name, joined(&service.sentinels)),
            Self::Cluster(nodes) => f.write_str(&joined(nodes)),
        }
    }
}

/// The servers, with commas between them.
pub(crate) fn joined<T: fmt::Display>(servers: impl IntoIterator<Item = T>) -> String {
    let shown: Vec<_> = servers.into_iter().map(|server| server.to_string()).collect();
    shown.join(", ")
}
