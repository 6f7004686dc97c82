//! The socket under a connection.

use std::fmt;
use std::io;
#[cfg(unix)]
use std::path::PathBuf;
use std::time::Duration;

use lock_core::LockError;
use lock_transport::{Endpoint, tcp};
#[cfg(feature = "tls")]
use lock_transport::{TlsFiles, tls};
use tokio::io::{AsyncRead, AsyncWrite};

use crate::error::Failure;

/// Where the server listens.
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

/// Whatever carries the bytes.
pub(crate) trait Transport: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Transport for T {}

impl Place {
    /// At that host and port, without TLS.
    pub(crate) fn tcp(host: impl Into<String>, port: u16) -> Self {
        Self::Tcp(Endpoint::new(host, port))
    }

    /// At that host and port, by TLS.
    #[cfg(feature = "tls")]
    pub(crate) fn tls(host: impl Into<String>, port: u16) -> Self {
        Self::Tls(Endpoint::new(host, port), TlsFiles::default())
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

    /// Another place that is talked to in the same way. A socket of this machine has no other.
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
        match self {
            Self::Tcp(endpoint) => format!("redis{suffix}://{endpoint}"),
            #[cfg(feature = "tls")]
            Self::Tls(endpoint, _) => format!("rediss{suffix}://{endpoint}"),
            #[cfg(unix)]
            Self::Unix(_) => format!("redis{suffix}://HOST:PORT"),
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
