//! The socket under a connection.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use lock_core::LockError;
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

use crate::failure::Failure;

/// Where the server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Tcp(String, u16),
    #[cfg(feature = "tls")]
    Tls(String, u16, Option<PathBuf>),
    #[cfg(unix)]
    Unix(PathBuf),
}

/// Whatever carries the bytes.
pub(crate) trait Transport: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Transport for T {}

impl Place {
    /// Connects. `patience` is how long the network may leave data unacknowledged.
    pub(crate) async fn connect(&self, patience: Duration) -> Result<Box<dyn Transport>, Failure> {
        match self {
            Self::Tcp(host, port) => Ok(Box::new(
                tcp(host, *port, patience).await.map_err(|e| self.unreachable(e))?,
            )),
            #[cfg(feature = "tls")]
            Self::Tls(host, port, ca) => {
                let stream = tcp(host, *port, patience).await.map_err(|e| self.unreachable(e))?;
                let wrapping = crate::tls::wrap(stream, host, ca.as_deref());
                // A server without TLS waits for more. Sooner than the caller gives up, so that it hears why.
                match tokio::time::timeout(patience * 3 / 4, wrapping).await {
                    Ok(wrapped) => Ok(Box::new(wrapped?)),
                    Err(_) => Err(self.unreachable(io::Error::new(
                        io::ErrorKind::TimedOut,
                        "it does not answer to TLS; use redis: instead of rediss: if it has none",
                    ))),
                }
            }
            #[cfg(unix)]
            Self::Unix(path) => {
                let stream = tokio::net::UnixStream::connect(path).await;
                Ok(Box::new(stream.map_err(|e| self.unreachable(e))?))
            }
        }
    }

    /// Another place that is talked to in the same way. A socket of this machine has no other.
    pub(crate) fn at(&self, host: &str, port: u16) -> Self {
        match self {
            #[cfg(feature = "tls")]
            Self::Tls(_, _, ca) => Self::Tls(host.to_owned(), port, ca.clone()),
            _ => Self::Tcp(host.to_owned(), port),
        }
    }

    /// The address that leads there: `redis` or `rediss`, `suffix`, host and port.
    pub(crate) fn url(&self, suffix: &str) -> String {
        match self {
            Self::Tcp(host, port) => format!("redis{suffix}://{}", Authority(host, *port)),
            #[cfg(feature = "tls")]
            Self::Tls(host, port, _) => format!("rediss{suffix}://{}", Authority(host, *port)),
            #[cfg(unix)]
            Self::Unix(_) => format!("redis{suffix}://HOST:PORT"),
        }
    }

    fn unreachable(&self, error: io::Error) -> Failure {
        Failure::Known(
            LockError::unavailable("connecting", format!("Redis cannot be reached at {self}")).with_source(error),
        )
    }
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Tcp(host, port) => Authority(host, *port).fmt(f),
            #[cfg(feature = "tls")]
            Self::Tls(host, port, _) => write!(f, "{} (TLS)", Authority(host, *port)),
            #[cfg(unix)]
            Self::Unix(path) => write!(f, "{}", path.display()),
        }
    }
}

/// A host and a port as addresses have them.
struct Authority<'a>(&'a str, u16);

impl std::fmt::Display for Authority<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self(host, port) = self;
        match host.contains(':') {
            true => write!(f, "[{host}]:{port}"),
            false => write!(f, "{host}:{port}"),
        }
    }
}

async fn tcp(host: &str, port: u16, patience: Duration) -> io::Result<TcpStream> {
    const PROBES: u32 = 3;
    let stream = TcpStream::connect((host, port)).await?;
    stream.set_nodelay(true)?;
    let socket = SockRef::from(&stream);
    // Whatever has not been sent when the socket is closed shall not be sent after that: the claims in it were given up.
    socket.set_linger(Some(Duration::ZERO))?;
    let pause = (patience / PROBES).max(Duration::from_secs(1));
    let keepalive = TcpKeepalive::new().with_time(pause).with_interval(pause);
    #[cfg(any(
        target_os = "linux",
        target_os = "android",
        target_os = "macos",
        target_os = "freebsd"
    ))]
    let keepalive = keepalive.with_retries(PROBES);
    socket.set_tcp_keepalive(&keepalive)?;
    #[cfg(any(target_os = "linux", target_os = "android"))]
    socket.set_tcp_user_timeout(Some(patience))?;
    Ok(stream)
}
