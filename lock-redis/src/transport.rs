//! Where a server listens, and how a connection to it begins.

use std::fmt;
use std::io;
#[cfg(unix)]
use std::path::PathBuf;
use std::time::Duration;

use lock_core::LockError;
use lock_transport::{Endpoint, Secret, tcp};
#[cfg(feature = "tls")]
use lock_transport::{TlsFiles, tls};
use redis::aio::{AsyncPushSender, MultiplexedConnection};
use redis::{AsyncConnectionConfig, ProtocolVersion, RedisConnectionInfo};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

use crate::error::Failure;

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Tcp(Endpoint),
    #[cfg(feature = "tls")]
    Tls(Endpoint, TlsFiles),
    #[cfg(unix)]
    Unix(PathBuf),
}

#[cfg(feature = "tls")]
const PEER: tls::Peer = tls::Peer {
    product: "Redis",
    plain: "use redis: instead of rediss: (so for the other schemes), or its TLS port",
    client_auth: ". Redis wants one unless its tls-auth-clients is off",
};

/// What carries the bytes.
pub(crate) trait Transport: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Transport for T {}

impl Place {
    /// The server at that host and port, without TLS.
    pub(crate) fn tcp(host: impl Into<String>, port: u16) -> Self {
        Self::Tcp(Endpoint::new(host, port))
    }

    /// Connects. `op_timeout` is how long the network may leave data unacknowledged.
    pub(crate) async fn connect(&self, op_timeout: Duration) -> Result<Box<dyn Transport>, Failure> {
        let unreachable = |error: io::Error| {
            LockError::unavailable("connecting", format!("Redis cannot be reached at {self}")).with_source(error)
        };
        Ok(match self {
            Self::Tcp(endpoint) => Box::new(tcp::connect(endpoint, op_timeout).await.map_err(unreachable)?),
            #[cfg(feature = "tls")]
            Self::Tls(endpoint, files) => {
                let stream = tcp::connect(endpoint, op_timeout).await.map_err(unreachable)?;
                Box::new(tls::connect(stream, endpoint, files, &[], &PEER, op_timeout).await?)
            }
            #[cfg(unix)]
            Self::Unix(path) => Box::new(tokio::net::UnixStream::connect(path).await.map_err(unreachable)?),
        })
    }

    /// Another server that is reached in the same way. A socket of this machine leads to no other.
    pub(crate) fn at(&self, endpoint: Endpoint) -> Self {
        match self {
            #[cfg(feature = "tls")]
            Self::Tls(_, files) => Self::Tls(endpoint, files.clone()),
            _ => Self::Tcp(endpoint),
        }
    }

    /// Host and port, unless it is a socket of this machine.
    pub(crate) fn endpoint(&self) -> Option<&Endpoint> {
        match self {
            Self::Tcp(endpoint) => Some(endpoint),
            #[cfg(feature = "tls")]
            Self::Tls(endpoint, _) => Some(endpoint),
            #[cfg(unix)]
            Self::Unix(_) => None,
        }
    }

    /// The address that leads there: `redis` or `rediss`, `suffix`, host and port.
    pub(crate) fn url(&self, suffix: &str) -> String {
        let host = self
            .endpoint()
            .map_or_else(|| "HOST:PORT".to_owned(), Endpoint::to_string);
        match self {
            #[cfg(feature = "tls")]
            Self::Tls(..) => format!("rediss{suffix}://{host}"),
            _ => format!("redis{suffix}://{host}"),
        }
    }

    /// What to do if the server hangs up before it has said anything.
    pub(crate) fn hung_up(&self) -> &'static str {
        match self {
            Self::Tcp(..) => {
                "see that host and port are those of a Redis server; one with TLS is reached by a rediss address (redlocks, \
                 rediss+sentinel, rediss+cluster)"
            }
            _ => "see that this is the address of a Redis server, and that it runs",
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(endpoint) => endpoint.fmt(f),
            #[cfg(feature = "tls")]
            Self::Tls(endpoint, _) => write!(f, "{endpoint} (TLS)"),
            #[cfg(unix)]
            Self::Unix(path) => write!(f, "{}", path.display()),
        }
    }
}

/// The user and the password of a server or a sentinel, if it wants any.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Login {
    pub(crate) user: Option<String>,
    pub(crate) password: Option<Secret>,
}

impl Login {
    /// A user without a password logs in, too: with an empty one.
    pub(crate) fn new(user: Option<String>, password: Option<Secret>) -> Self {
        let password = password.or_else(|| user.as_ref().map(|_| Secret::new("")));
        Self { user, password }
    }

    /// Logs in over `stream`, and works the connection until `closing` is cancelled, which also happens when the connection ends. Chooses
    /// no database: a sentinel has none.
    pub(crate) async fn greet(
        &self,
        stream: impl Transport + 'static,
        pushes: impl AsyncPushSender,
        closing: &CancellationToken,
    ) -> Result<MultiplexedConnection, Failure> {
        let mut greeting = RedisConnectionInfo::default()
            .set_protocol(ProtocolVersion::RESP3)
            .set_skip_set_lib_name();
        if let Some(user) = &self.user {
            greeting = greeting.set_username(user);
        }
        if let Some(password) = &self.password {
            greeting = greeting.set_password(password.get().await?);
        }
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(None)
            .set_response_timeout(None)
            .set_push_sender(pushes);
        let (connection, driver) = MultiplexedConnection::new_with_config(&greeting, stream, config).await?;
        let (closing, ended) = (closing.clone(), closing.clone().drop_guard());
        Handle::current().spawn(async move {
            // Also when the runtime ends, and drops this task.
            let _ended = ended;
            tokio::select! {
                () = driver => {}
                () = closing.cancelled() => {}
            }
        });
        Ok(connection)
    }
}
