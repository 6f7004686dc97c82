//! Free ports.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};

/// A port of the loopback that nobody listens on at this moment.
///
/// It is below those that systems give to outgoing connections: while a server is down, nobody can take its port, and
/// no client that tries again and again can meet itself.
///
/// # Errors
///
/// If none was found.
pub(crate) fn free_port() -> io::Result<u16> {
    const TRIES: usize = 200;
    for _ in 0..TRIES {
        let port = fastrand::u16(15_000..32_000);
        if std::net::TcpListener::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, port))).is_ok() {
            return Ok(port);
        }
    }
    Err(io::Error::new(
        io::ErrorKind::AddrInUse,
        format!("none of {TRIES} ports of 127.0.0.1 is free"),
    ))
}
