//! TCP connections whose silent end is noticed.

use std::io;
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::net::TcpStream;

use crate::Endpoint;

/// How many lost probes end a connection.
const PROBES: u32 = 3;

/// Connects, for a client whose operations may take `op_timeout`.
///
/// The kernel ends the connection if sent data stay unacknowledged for `op_timeout` (on Linux and Android), or if an idle server answers
/// no keepalive probe for about that time. When the socket is closed, unsent data are discarded: the client has given up those requests.
///
/// # Errors
///
/// Those of the operating system.
pub async fn connect(endpoint: &Endpoint, op_timeout: Duration) -> io::Result<TcpStream> {
    let stream = TcpStream::connect((endpoint.host.as_str(), endpoint.port)).await?;
    stream.set_nodelay(true)?;
    let socket = SockRef::from(&stream);
    socket.set_linger(Some(Duration::ZERO))?;
    let pause = (op_timeout / PROBES).max(Duration::from_secs(1));
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
    socket.set_tcp_user_timeout(Some(op_timeout))?;
    Ok(stream)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_connection_has_the_limits_of_its_client() {
        let server = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = Endpoint::new("127.0.0.1", server.local_addr().unwrap().port());
        let stream = connect(&endpoint, Duration::from_secs(6)).await.unwrap();
        let socket = SockRef::from(&stream);
        assert!(stream.nodelay().unwrap() && socket.keepalive().unwrap());
        assert_eq!(socket.linger().unwrap(), Some(Duration::ZERO));
        assert_eq!(socket.tcp_keepalive_time().unwrap(), Duration::from_secs(2));
        #[cfg(target_os = "linux")]
        assert_eq!(socket.tcp_user_timeout().unwrap(), Some(Duration::from_secs(6)));
    }
}
