//! A PgBouncer before a server.

use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use lock_postgres::PostgresConfig;
use lock_postgres::tokio_postgres::{Client, NoTls, SimpleQueryMessage};

use super::locking::HANG_LIMIT;
use super::machine::{command, give};
use super::process::Server;

/// Ends when dropped.
pub(crate) struct Bouncer {
    process: Child,
    pub(crate) port: u16,
    _folder: tempfile::TempDir,
}

impl Bouncer {
    /// With these lines of its settings, such as `pool_mode = session`.
    pub(crate) fn start(server: &Server, settings: &str) -> Self {
        let folder = tempfile::Builder::new().prefix("fencelock-pg-").tempdir().unwrap();
        give(folder.path());
        let port = std::net::TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap()
            .port();
        let file = folder.path().join("pgbouncer.ini");
        // With `any` nobody's name is looked at; everybody is this user.
        let text = format!(
            "[databases]\n* = user=postgres host=127.0.0.1 port={}\n[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\n\
             unix_socket_dir =\nauth_type = any\nmax_client_conn = 500\n{settings}\n",
            server.port()
        );
        std::fs::write(&file, text).unwrap();
        let process = command("pgbouncer")
            .arg(&file)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("there is no PgBouncer; install it: apt-get install pgbouncer");
        let start = Instant::now();
        while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(start.elapsed() < HANG_LIMIT, "pgbouncer does not start");
            std::thread::sleep(Duration::from_millis(5));
        }
        Self {
            process,
            port,
            _folder: folder,
        }
    }

    pub(crate) fn config(&self, server: &Server) -> PostgresConfig {
        server.config_at(self.port)
    }

    /// A connection of an application that shares the pool.
    pub(crate) async fn plain(&self, server: &Server) -> Client {
        let (client, connection) = server.login_at(self.port).connect(NoTls).await.unwrap();
        tokio::spawn(connection);
        client
    }
}

impl Drop for Bouncer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The one value that a statement is answered with, by the simple protocol: poolers that share have no other.
pub(crate) async fn simple(client: &Client, sql: &str) -> Option<String> {
    let answer = client.simple_query(sql).await.unwrap();
    answer.iter().rev().find_map(|message| match message {
        SimpleQueryMessage::Row(row) => row.get(0).map(str::to_owned),
        _ => None,
    })
}
