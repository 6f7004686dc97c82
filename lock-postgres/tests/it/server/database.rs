//! A database, and ways to look at it.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use lock_postgres::tokio_postgres::{self, Client, NoTls};
use lock_postgres::{PostgresConfig, PostgresLock, Tls};

use super::locking::{HANG_LIMIT, name, until};

/// A busy machine may stand still for seconds, in which no test is to find that the server did not answer.
const OP_TIMEOUT: Duration = Duration::from_secs(30);

/// The sessions of this crate's clients in the database, oldest first.
pub(crate) const SESSIONS: &str = "SELECT pid FROM pg_stat_activity \
                                   WHERE application_name LIKE 'fencelock %' AND datname = current_database() ORDER BY backend_start";

/// The number of advisory locks in the database, granted or waited for.
const LOCKS: &str = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' \
                     AND database = (SELECT oid FROM pg_database WHERE datname = current_database())";

fn patient(login: tokio_postgres::Config) -> PostgresConfig {
    PostgresConfig::new(login).tls(Tls::Disable).op_timeout(OP_TIMEOUT)
}

/// Most tests need no more than one of their own on the shared server.
pub(crate) struct Database {
    pub(super) port: u16,
    /// The folder of the data of its server.
    pub(super) data: PathBuf,
    /// The file of its log.
    pub(super) log: PathBuf,
    pub(super) name: String,
}

impl Database {
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// What the server has written to its log. On the shared server: about this database.
    pub(crate) fn log(&self) -> String {
        let log = std::fs::read_to_string(&self.log).unwrap_or_default();
        if self.name == "postgres" {
            return log;
        }
        let prefix = format!("{} ", self.name);
        let mut ours = String::new();
        let mut is_ours = false;
        for line in log.split_inclusive('\n') {
            // The lines of a statement but the first begin with a tab.
            is_ours = if line.starts_with('\t') {
                is_ours
            } else {
                line.starts_with(&prefix)
            };
            if is_ours {
                ours.push_str(line);
            }
        }
        ours
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn data(&self) -> PathBuf {
        self.data.clone()
    }

    pub(crate) fn config(&self) -> PostgresConfig {
        self.config_at(self.port)
    }

    /// Of a client that reaches the database at that port, such as through a proxy.
    pub(crate) fn config_at(&self, port: u16) -> PostgresConfig {
        patient(self.login_at(port))
    }

    pub(crate) fn config_as(&self, role: &str) -> PostgresConfig {
        let mut login = self.login();
        login.user(role);
        patient(login)
    }

    pub(crate) fn login(&self) -> tokio_postgres::Config {
        self.login_at(self.port)
    }

    pub(crate) fn login_at(&self, port: u16) -> tokio_postgres::Config {
        let mut config = tokio_postgres::Config::new();
        config.host("127.0.0.1").port(port).user("postgres").dbname(&self.name);
        config
    }

    pub(crate) async fn client(&self) -> PostgresLock {
        self.config().connect().await.unwrap()
    }

    pub(super) async fn try_plain(&self) -> Result<Client, tokio_postgres::Error> {
        let (client, connection) = self.login().connect(NoTls).await?;
        tokio::spawn(connection);
        Ok(client)
    }

    /// A connection that is not the backend's.
    pub(crate) async fn plain(&self) -> Client {
        self.try_plain().await.unwrap()
    }

    pub(crate) async fn run_sql(&self, sql: &str) {
        self.plain().await.batch_execute(sql).await.unwrap();
    }

    /// The one value that the question has for an answer.
    pub(crate) async fn value<T: for<'a> tokio_postgres::types::FromSql<'a>>(&self, sql: &str) -> T {
        self.plain().await.query_one(sql, &[]).await.unwrap().get(0)
    }

    /// How many advisory locks there are, granted or waited for.
    pub(crate) async fn locks(&self) -> i64 {
        self.value(LOCKS).await
    }

    /// Waits until there are that many, and returns how long that took.
    pub(crate) async fn until_locks(&self, wanted: i64) -> Duration {
        let plain = self.plain().await;
        let start = Instant::now();
        loop {
            let found: i64 = plain.query_one(LOCKS, &[]).await.unwrap().get(0);
            if found == wanted {
                return start.elapsed();
            }
            assert!(start.elapsed() < HANG_LIMIT, "{found} advisory locks, and not {wanted}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Ends the sessions that clients have, and waits until they have ended.
    pub(crate) async fn end_sessions(&self) {
        let limit = HANG_LIMIT.as_millis();
        // False as well if a session has ended by itself meanwhile.
        let end = format!("SELECT pid, pg_terminate_backend(pid, {limit}) FROM ({SESSIONS}) s");
        let ended = self.plain().await.query(&end, &[]).await.unwrap();
        let left = self.sessions().await;
        assert!(
            ended.iter().all(|row| !left.contains(&row.get(0))),
            "the sessions do not end"
        );
    }

    /// Waits until no client has a session.
    pub(crate) async fn until_no_sessions(&self) {
        let plain = self.plain().await;
        until("the sessions end", async || {
            plain.query(SESSIONS, &[]).await.unwrap().is_empty()
        })
        .await;
    }

    /// Waits until that many sessions wait for the name.
    pub(crate) async fn until_waiting(&self, name: &str, wanted: i64) {
        let plain = self.plain().await;
        let key = self.config().connect_lazy().unwrap().key(&self::name(name));
        let (high, low) = ((key as u64 >> 32) as i64, key & 0xffff_ffff);
        let sql = format!("{LOCKS} AND classid = {high} AND objid = {low} AND (NOT granted OR mode = 'ShareLock')");
        until(&format!("{wanted} sessions wait"), async || {
            plain.query_one(&sql, &[]).await.unwrap().get::<_, i64>(0) == wanted
        })
        .await;
    }

    /// The backends of fencelock's sessions.
    pub(crate) async fn sessions(&self) -> Vec<i32> {
        let rows = self.plain().await.query(SESSIONS, &[]).await.unwrap();
        rows.iter().map(|row| row.get(0)).collect()
    }
}
