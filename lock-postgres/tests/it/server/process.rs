//! Postgres servers: one that all tests share, on which each has a database of its own, and those that a test has to itself.

use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use lock_postgres::tokio_postgres::NoTls;
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process};
use test_servers::LocalPostgres;

use super::database::Database;
use super::locking::{HANG_LIMIT, in_time, until};

/// A server whose data and processes end with it. Trusts all users. Stands for its database `postgres`.
pub(crate) struct Server {
    local: LocalPostgres,
    database: Database,
    /// With which it is started again, if not the right one.
    clock: Option<String>,
}

impl Deref for Server {
    type Target = Database;

    fn deref(&self) -> &Database {
        &self.database
    }
}

/// The server that all tests of this program share. It ends with the program.
fn shared() -> &'static Server {
    static SHARED: OnceLock<Server> = OnceLock::new();
    SHARED.get_or_init(|| {
        Server::with(&[
            // Enough for all tests that run at a time, however many threads there are.
            "max_connections=500",
            "max_prepared_transactions=10",
            // The name of the database comes first: each test reads the lines of its own.
            "log_line_prefix=%d %m [%p] %a ",
        ])
    })
}

impl Server {
    pub(crate) fn start() -> Self {
        Self::with(&[
            "log_connections=on",
            "log_disconnections=on",
            "log_line_prefix=%m [%p] %a ",
        ])
    }

    /// With these settings, as in `fsync=off`.
    pub(crate) fn with(settings: &[&str]) -> Self {
        Self::started(settings, None)
    }

    /// On a copy of that data.
    pub(crate) fn on_data(data: &Path, settings: &[&str]) -> Self {
        Self::started(settings, Some(data))
    }

    fn started(settings: &[&str], data: Option<&Path>) -> Self {
        let local = LocalPostgres::start(&[&["max_connections=60"], settings].concat(), data).unwrap();
        let database = Database {
            port: local.port(),
            data: local.data(),
            log: local.file("log"),
            name: "postgres".to_owned(),
        };
        Self {
            local,
            database,
            clock: None,
        }
    }

    /// Ends it: `KILL` as a crash does, `QUIT` at once, `INT` cleanly.
    pub(crate) fn end(&mut self, signal: Signal) {
        self.local.end(signal).unwrap();
    }

    /// From its next start on its clock says an hour less than it is.
    pub(crate) fn set_clock_back(&mut self) {
        self.clock = Some("-1h".to_owned());
    }

    /// One whose clock can be set while it runs.
    pub(crate) fn with_a_clock_that_steps() -> Self {
        let mut server = Self::start();
        server.end(Signal::INT);
        server.step_clock(0);
        server.clock = Some(format!("@{}", server.clock_file().display()));
        server.start_again();
        server
    }

    fn clock_file(&self) -> PathBuf {
        self.local.file("clock")
    }

    /// Sets its clock so many seconds ahead of the right time, or behind.
    pub(crate) fn step_clock(&self, seconds: i64) {
        // At once, as its processes read it all the time.
        let next = self.local.file("clock.next");
        std::fs::write(&next, format!("{seconds:+}s\n")).unwrap();
        std::fs::rename(&next, self.clock_file()).unwrap();
    }

    /// From its next start on its clock is right.
    pub(crate) fn set_clock_right(&mut self) {
        self.clock = None;
    }

    /// How many seconds its clock is behind, as its sessions see it.
    pub(crate) async fn seconds_behind(&self) -> f64 {
        let theirs: f64 = self.value("SELECT extract(epoch FROM now())::float8").await;
        SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64() - theirs
    }

    pub(crate) fn start_again(&mut self) {
        self.local.start_again(self.clock.as_deref()).unwrap();
    }

    pub(crate) fn restart(&mut self, signal: Signal) {
        self.end(signal);
        self.start_again();
    }

    /// Kills the process of its own that this query finds, and waits until it has ended all others and takes requests
    /// again.
    pub(crate) async fn survives_the_end_of(&self, sql: &str) {
        // It goes on for a moment before it knows.
        let witness = self.plain().await;
        let start = Instant::now();
        loop {
            let found = witness.query(sql, &[]).await.unwrap();
            let pid = found.first().map(|row| row.get(0)).and_then(Pid::from_raw);
            match pid.map(|pid| kill_process(pid, Signal::KILL)) {
                // It has ended meanwhile. Under libfaketime the server was seen to take sessions for idle after a fraction of
                // their limit, and never without it.
                None | Some(Err(Errno::SRCH)) => assert!(start.elapsed() < HANG_LIMIT, "{}", self.log()),
                Some(killed) => break killed.unwrap(),
            }
        }
        while !witness.is_closed() || self.try_plain().await.is_err() {
            assert!(start.elapsed() < HANG_LIMIT, "{}", self.log());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Has the server ask that role for its password, and waits until it does.
    pub(crate) async fn wants_password_of(&self, role: &str) {
        let file = self.data().join("pg_hba.conf");
        let rules = std::fs::read_to_string(&file).unwrap();
        std::fs::write(&file, format!("host all {role} all scram-sha-256\n{rules}")).unwrap();
        self.run_sql("SELECT pg_reload_conf()").await;
        let mut login = self.login();
        login.user(role);
        // Without a password it is not even tried.
        until("the password is wanted", async || login.connect(NoTls).await.is_err()).await;
    }

    /// Copies the data of the running server into that folder, for a standby that follows it.
    pub(crate) fn copy_for_standby(&self, data: &Path) {
        let mut backup = LocalPostgres::program("pg_basebackup").unwrap();
        backup.args(["-h", "127.0.0.1", "-p", &self.port().to_string(), "-U", "postgres"]);
        backup.args(["--no-sync", "-R", "-c", "fast", "-D"]).arg(data);
        let done = backup.output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    }

    /// From now on no commit is confirmed that has something to log: the standby that has to confirm it is not there.
    pub(crate) async fn loses_its_standby(&self) {
        self.commits_wait_for("gone").await;
    }

    pub(crate) async fn forgets_its_standby(&self) {
        self.commits_wait_for("").await;
    }

    async fn commits_wait_for(&self, standby: &str) {
        let plain = self.plain().await;
        let set = format!("ALTER SYSTEM SET synchronous_standby_names = '{standby}'");
        plain.batch_execute(&set).await.unwrap();
        plain.batch_execute("SELECT pg_reload_conf()").await.unwrap();
        // Whoever connects later inherits it from the first process, which may not have read it yet.
        until("the setting is read", async || {
            self.value::<String>("SHOW synchronous_standby_names").await == standby
        })
        .await;
        // The checkpointer tells all others whether they have to wait.
        let committing = self.plain().await;
        let commit = "SELECT pg_logical_emit_message(true, 'test', 'a commit with something to log')";
        if standby.is_empty() {
            in_time(committing.batch_execute(commit)).await.unwrap();
            return;
        }
        let pid: i32 = committing
            .query_one("SELECT pg_backend_pid()", &[])
            .await
            .unwrap()
            .get(0);
        let commits = async {
            loop {
                committing.batch_execute(commit).await.unwrap();
            }
        };
        let until_one_waits = async {
            let waits = "SELECT wait_event = 'SyncRep' IS TRUE FROM pg_stat_activity WHERE pid = $1";
            while !plain.query_one(waits, &[&pid]).await.unwrap().get::<_, bool>(0) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        in_time(async {
            tokio::select! {
                () = until_one_waits => {}
                never = commits => never,
            }
        })
        .await;
        plain.execute("SELECT pg_cancel_backend($1)", &[&pid]).await.unwrap();
    }
}

impl Database {
    /// A database of its own on the shared server.
    pub(crate) async fn new() -> Self {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let server = shared();
        let name = format!("test_{}", MADE.fetch_add(1, Ordering::Relaxed));
        server.run_sql(&format!("CREATE DATABASE {name}")).await;
        Self {
            port: server.port(),
            data: server.data(),
            log: server.local.file("log"),
            name,
        }
    }

    /// One whose statements are all in the [log](Self::log).
    pub(crate) async fn with_statements_logged() -> Self {
        let database = Self::new().await;
        let set = format!("ALTER DATABASE {} SET log_statement = 'all'", database.name);
        database.run_sql(&set).await;
        database
    }
}
