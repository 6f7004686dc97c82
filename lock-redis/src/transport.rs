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

    fn unreachable(&self, error: io::Error) -> Failure {
        Failure::Known(
            LockError::unavailable("connecting", format!("Redis cannot be reached at {self}")).with_source(error),
        )
    }
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Tcp(host, port) => write!(f, "{host}:{port}"),
            #[cfg(feature = "tls")]
            Self::Tls(host, port, _) => write!(f, "{host}:{port} (TLS)"),
            #[cfg(unix)]
            Self::Unix(path) => write!(f, "{}", path.display()),
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
