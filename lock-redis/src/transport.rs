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
    Tcp(String, u16),
    #[cfg(feature = "tls")]
    Tls(String, u16, TlsFiles),
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
    /// Connects. `op_timeout` is how long the network may leave data unacknowledged.
    pub(crate) async fn connect(&self, op_timeout: Duration) -> Result<Box<dyn Transport>, Failure> {
        let unreachable = |error: io::Error| {
            LockError::unavailable("connecting", format!("Redis cannot be reached at {self}")).with_source(error)
        };
        Ok(match self {
            Self::Tcp(host, port) => {
                let stream = tcp::connect(&Endpoint::new(host, *port), op_timeout).await;
                Box::new(stream.map_err(unreachable)?)
            }
            #[cfg(feature = "tls")]
            Self::Tls(host, port, files) => {
                let endpoint = Endpoint::new(host, *port);
                let stream = tcp::connect(&endpoint, op_timeout).await.map_err(unreachable)?;
                Box::new(tls::connect(stream, &endpoint, files, &[], &PEER, op_timeout).await?)
            }
            #[cfg(unix)]
            Self::Unix(path) => Box::new(tokio::net::UnixStream::connect(path).await.map_err(unreachable)?),
        })
    }

    /// Another place that is talked to in the same way. A socket of this machine has no other.
    pub(crate) fn at(&self, host: &str, port: u16) -> Self {
        match self {
            #[cfg(feature = "tls")]
            Self::Tls(_, _, files) => Self::Tls(host.to_owned(), port, files.clone()),
            _ => Self::Tcp(host.to_owned(), port),
        }
    }

    /// The address that leads there: `redis` or `rediss`, `suffix`, host and port.
    pub(crate) fn url(&self, suffix: &str) -> String {
        match self {
            Self::Tcp(host, port) => format!("redis{suffix}://{}", Endpoint::new(host, *port)),
            #[cfg(feature = "tls")]
            Self::Tls(host, port, _) => format!("rediss{suffix}://{}", Endpoint::new(host, *port)),
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
            Self::Tcp(host, port) => Endpoint::new(host, *port).fmt(f),
            #[cfg(feature = "tls")]
            Self::Tls(host, port, _) => write!(f, "{} (TLS)", Endpoint::new(host, *port)),
            #[cfg(unix)]
            Self::Unix(path) => write!(f, "{}", path.display()),
        }
    }
}
