//! A PgBouncer before a Postgres.

use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use crate::kind::Kind;
use crate::machine::free_port;
use crate::process::Process;
use crate::run::is_alive;

/// How long it may take to start.
const LONGEST_START: Duration = Duration::from_secs(20);

/// A PgBouncer on the loopback. Ends when dropped.
#[derive(Debug)]
pub struct PgBouncer {
    process: Process,
    address: SocketAddr,
}

impl PgBouncer {
    /// Starts one before the server at that address, which is given in the words of its settings, as in `host=127.0.0.1 port=5432 user=joe`:
    /// no client's name is looked at. `settings` are further lines, such as `pool_mode = session`.
    ///
    /// # Errors
    ///
    /// If it does not start.
    pub fn start(server: &str, settings: &str) -> Result<Self> {
        let program = Kind::PGBOUNCER.program_on_path();
        let program = program.context("PgBouncer is missing; install it: apt-get install pgbouncer")?;
        let port = free_port()?;
        let process = Process::new(Kind::PGBOUNCER, program, port, Vec::new())?;
        // Whoever finds the server gone looks again soon.
        let text = format!(
            "[databases]\n* = {server}\n[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\n\
             auth_type = any\nmax_client_conn = 800\nserver_login_retry = 0.1\n{settings}\n"
        );
        std::fs::write(process.path("data.ini"), text)?;
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let mut bouncer = Self { process, address };
        bouncer.process.spawn()?;
        let start = Instant::now();
        while TcpStream::connect(address).is_err() {
            if start.elapsed() > LONGEST_START || !bouncer.process.id().is_some_and(is_alive) {
                let log = std::fs::read_to_string(bouncer.process.path("log"));
                bail!("PgBouncer does not start: {}", log.unwrap_or_default());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(bouncer)
    }

    /// Where clients connect to.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}
