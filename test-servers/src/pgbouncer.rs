//! A PgBouncer before a Postgres.

use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use tempfile::TempDir;

use crate::machine::free_port;
use crate::process::{as_nobody, folder};
use crate::run::is_alive;

/// How long it may take to start.
const LONGEST_START: Duration = Duration::from_secs(20);

/// Ends it when the process that started it has ended, however it did: the pipe that is read has no other end then.
const WATCH: &str = r#"PATH=$PATH:/usr/sbin
pgbouncer "$1" </dev/null &
read -r _
kill -9 $!"#;

/// A PgBouncer on the loopback. Ends when dropped.
#[derive(Debug)]
pub struct PgBouncer {
    process: Child,
    address: SocketAddr,
    _folder: TempDir,
}

impl PgBouncer {
    /// Starts one before the server at that address, which is given in the words of its settings, as in `host=127.0.0.1 port=5432 user=joe`:
    /// no client's name is looked at. `settings` are further lines, such as `pool_mode = session`.
    ///
    /// # Errors
    ///
    /// If it does not start.
    pub fn start(server: &str, settings: &str) -> Result<Self> {
        let folder = folder()?;
        let port = free_port()?;
        let file = folder.path().join("pgbouncer.ini");
        // Whoever finds the server gone looks again soon.
        let text = format!(
            "[databases]\n* = {server}\n[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\n\
             auth_type = any\nmax_client_conn = 800\nserver_login_retry = 0.1\n{settings}\n"
        );
        std::fs::write(&file, text)?;
        let mut command = Command::new("sh");
        command.args(["-c", WATCH, "sh"]).arg(&file).process_group(0);
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let bouncer = Self {
            process: as_nobody(&mut command).spawn()?,
            address: SocketAddr::from((Ipv4Addr::LOCALHOST, port)),
            _folder: folder,
        };
        let start = Instant::now();
        while TcpStream::connect(bouncer.address).is_err() {
            if start.elapsed() > LONGEST_START || !is_alive(bouncer.process.id()) {
                bail!("pgbouncer does not start; if it is missing, install it: apt-get install pgbouncer");
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

impl Drop for PgBouncer {
    fn drop(&mut self) {
        // The end of the pipe is what its watcher waits for.
        drop(self.process.stdin.take());
        let _ = self.process.wait();
    }
}
