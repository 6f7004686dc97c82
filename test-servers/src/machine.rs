//! What runs a server, and the runtime on which that is worked.

use std::collections::HashSet;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::{LazyLock, Mutex, PoisonError};

use anyhow::{Result, bail};
use async_trait::async_trait;
use tokio::runtime::{Builder, Runtime};

/// What a server still knows after a restart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Data {
    /// All that it acknowledged.
    Kept,
    /// Nothing.
    Lost,
    /// What it knew when it was [copied](crate::Server::copy) last.
    Copied,
}

/// A container or a process that runs a server.
#[async_trait]
pub(crate) trait Machine: Send {
    /// Stops it where it is: it keeps its connections and does not answer.
    async fn pause(&mut self) -> Result<()>;

    /// Lets it go on, if it was paused.
    async fn resume(&mut self) -> Result<()>;

    /// Ends it as `kill -9` does, if it runs.
    async fn kill(&mut self) -> Result<()>;

    /// Starts it again after it was killed.
    async fn start_again(&mut self, data: Data) -> Result<()>;

    /// Copies its data, in the place of an earlier copy. It should be paused.
    async fn copy(&mut self) -> Result<()>;

    /// Sets its wall clock ahead of this machine's by that many seconds, if it has one of its own.
    fn set_clock(&self, _ahead: i32) -> Result<()> {
        bail!("the server has no clock of its own")
    }

    /// Whether it has not ended.
    async fn runs(&mut self) -> bool;

    /// What it wrote.
    async fn log(&self) -> String;

    /// Ends it for good, with its data.
    async fn remove(&mut self);
}

/// The runtime of this crate. It outlives those of tests, which share servers, and goes on while one of them is blocked.
pub(crate) fn background() -> &'static Runtime {
    #[expect(clippy::expect_used, reason = "tests cannot go on without a thread")]
    static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build();
        runtime.expect("the system has a thread left")
    });
    &RUNTIME
}

/// Does the work on that runtime, also if the caller's future is dropped.
pub(crate) async fn in_background<T: Send + 'static>(
    work: impl Future<Output = Result<T>> + Send + 'static,
) -> Result<T> {
    background().spawn(work).await?
}

/// A port of the loopback on which no process listens at this moment, and that this process has not been given before.
///
/// It is below those that systems give to outgoing connections: while a server is down, no other process is given its port.
///
/// # Errors
///
/// If none is found.
pub fn free_port() -> Result<u16> {
    const TRIES: usize = 200;
    static GIVEN: LazyLock<Mutex<HashSet<u16>>> = LazyLock::new(Mutex::default);
    for _ in 0..TRIES {
        let port = fastrand::u16(15_000..32_000);
        let is_free = TcpListener::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, port))).is_ok();
        if is_free && GIVEN.lock().unwrap_or_else(PoisonError::into_inner).insert(port) {
            return Ok(port);
        }
    }
    bail!("none of {TRIES} ports of 127.0.0.1 is free")
}
