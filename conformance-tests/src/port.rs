//! Free ports.

use std::collections::HashSet;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{LazyLock, Mutex, PoisonError};

/// The ports that this process has been given. Some are used only a while later.
static GIVEN: LazyLock<Mutex<HashSet<u16>>> = LazyLock::new(Mutex::default);

/// A port of the loopback on which no process listens at this moment, and that this process has not been given before.
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
        let is_free = std::net::TcpListener::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, port))).is_ok();
        if is_free && GIVEN.lock().unwrap_or_else(PoisonError::into_inner).insert(port) {
            return Ok(port);
        }
    }
    Err(io::Error::new(
        io::ErrorKind::AddrInUse,
        format!("none of {TRIES} ports of 127.0.0.1 is free"),
    ))
}
