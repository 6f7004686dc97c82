//! A PgBouncer before a server.

use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use lock_core::LockError;
use rustix::process::geteuid;
use tempfile::TempDir;

use super::admin::{PASSWORD, ROLE};

/// How long it may take to start.
const PATIENCE: Duration = Duration::from_secs(20);

/// Whom it runs as if the tests run as root, which it refuses to be.
const NOBODY: u32 = 65_534;

/// Ends it when the process that started it has ended, however it did: the pipe that is read has no other end then.
const WATCH: &str = r#"PATH=$PATH:/usr/sbin
pgbouncer "$1" </dev/null &
read -r _
kill -9 $!"#;

/// One that gives each client a session of its own, as the role that may do no more than it must. Ends when dropped.
pub(crate) struct Bouncer {
    process: Child,
    address: SocketAddr,
    _folder: TempDir,
}

impl Bouncer {
    pub(crate) fn start(server: &str) -> Result<Self, LockError> {
        // Between the look for a free port and the start another process may take it.
        for _ in 0..4 {
            if let Some(bouncer) = Self::start_once(server).map_err(failed)? {
                return Ok(bouncer);
            }
        }
        Err(failed(
            "pgbouncer does not start; if it is missing, install it: apt-get install pgbouncer",
        ))
    }

    fn start_once(server: &str) -> std::io::Result<Option<Self>> {
        let folder = tempfile::Builder::new().prefix("fencelock-bouncer-").tempdir()?;
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port();
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let (host, server_port) = server.rsplit_once(':').unwrap_or((server, "5432"));
        let settings = folder.path().join("pgbouncer.ini");
        // With `any` nobody's name is looked at. Whoever finds the server gone looks again soon.
        let text = format!(
            "[databases]\n* = host={host} port={server_port} user={ROLE} password={PASSWORD}\n[pgbouncer]\n\
             listen_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = any\npool_mode = session\n\
             default_pool_size = 300\nmax_client_conn = 800\nserver_login_retry = 0.1\n"
        );
        std::fs::write(&settings, text)?;
        let mut command = Command::new("sh");
        command.args(["-c", WATCH, "sh"]).arg(&settings).current_dir("/");
        if geteuid().is_root() {
            chown(folder.path(), Some(NOBODY), Some(NOBODY))?;
            command.uid(NOBODY).gid(NOBODY);
        }
        let process = command
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        let bouncer = Self {
            process,
            address,
            _folder: folder,
        };
        let start = Instant::now();
        while start.elapsed() < PATIENCE {
            if TcpStream::connect(address).is_ok() {
                return Ok(Some(bouncer));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(None)
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Bouncer {
    fn drop(&mut self) {
        // The end of the pipe is what its watcher waits for.
        drop(self.process.stdin.take());
        let _ = self.process.wait();
    }
}

fn failed(error: impl Into<lock_core::Source>) -> LockError {
    LockError::failed("starting a PgBouncer", error)
}
