//! Whatever is wrong is said in a way that tells what to change, and costs nothing that is held.

#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a test may fail")]

mod server;

use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use lock_core::{DistributedLock, LockError, Locks};
use lock_postgres::tokio_postgres::NoTls;
use lock_postgres::tokio_postgres::config::TargetSessionAttrs;
use lock_postgres::{PostgresConfig, Tls, schema_sql};
use rustix::process::Signal;
use server::proxy::Proxy;
use server::{PATIENCE, Server, claim, granted, in_time};

const TTL: Duration = Duration::from_secs(20);

async fn refusal(config: PostgresConfig) -> LockError {
    let error = config.connect().await.unwrap_err();
    assert!(!format!("{error} {error:?}").contains("hunter2"), "{error:?}");
    error
}

fn is_configuration(error: &LockError, words: &str) {
    assert!(matches!(error, LockError::Configuration { .. }), "{error:?}");
    assert!(error.to_string().contains(words), "{error}");
}

fn is_unsafe(error: &LockError, words: &str) {
    assert!(matches!(error, LockError::UnsafeConfiguration { .. }), "{error:?}");
    assert!(error.to_string().contains(words), "{error}");
}

fn is_unavailable(error: &LockError, words: &str) {
    assert!(matches!(error, LockError::Unavailable { .. }), "{error:?}");
    assert!(error.to_string().contains(words), "{error}");
}

fn login(server: &Server, change: impl FnOnce(&mut lock_postgres::tokio_postgres::Config)) -> PostgresConfig {
    let mut login = server.login();
    change(&mut login);
    PostgresConfig::new(login).tls(Tls::Disable)
}

#[tokio::test]
async fn a_wrong_password_a_missing_database_and_a_missing_server_each_say_so() {
    let mut server = Server::start();
    server.run_sql("CREATE ROLE joe LOGIN PASSWORD 'right'").await;
    server.wants_password_of("joe").await;
    is_configuration(
        &refusal(login(&server, |login| {
            login.user("joe").password("hunter2");
        }))
        .await,
        "refused the user or the password",
    );
    is_configuration(
        &refusal(login(&server, |login| {
            login.dbname("nothing");
        }))
        .await,
        "nothing",
    );
    is_configuration(
        &refusal(login(&server, |login| {
            login.user("nobody at all");
        }))
        .await,
        "user",
    );
    let config = server.config().op_timeout(Duration::from_secs(2));
    server.end(Signal::KILL);
    is_unavailable(&refusal(config).await, "connecting");
}

#[tokio::test]
async fn a_role_that_may_not_make_the_schema_is_shown_the_sql_and_needs_no_more_than_that() {
    let server = Server::start();
    server
        .run_sql("CREATE ROLE joe LOGIN; REVOKE CREATE ON DATABASE postgres FROM PUBLIC")
        .await;
    let joe = || {
        login(&server, |login| {
            login.user("joe");
        })
    };
    let error = refusal(joe()).await;
    is_configuration(&error, "GRANT SELECT, UPDATE ON \"fencelock\".counter TO \"joe\"");
    let sql = error.to_string();
    let (_, sql) = sql.split_once(":\n").unwrap();
    server.run_sql(sql).await;
    let lock = joe().connect().await.unwrap();
    granted(&lock, &claim("a", TTL)).await;
    // Without a right that is needed it says what to do.
    server
        .run_sql("REVOKE UPDATE ON SEQUENCE fencelock.token FROM joe; REVOKE UPDATE ON fencelock.counter FROM joe")
        .await;
    is_configuration(&refusal(joe()).await, "lacks a right");
    // The schema is as it is printed, whoever makes it.
    server.run_sql(&schema_sql("fencelock", Some("joe")).unwrap()).await;
    joe().connect().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_schema_that_somebody_makes_while_a_role_without_that_right_connects_is_used() {
    /// Less than any request has.
    const STEP: usize = 32;
    let server = Server::start();
    server
        .run_sql("CREATE ROLE joe LOGIN; REVOKE CREATE ON DATABASE postgres FROM PUBLIC")
        .await;
    let schema = schema_sql("fencelock", Some("joe")).unwrap();
    let mut moments = 0;
    for bytes in (0..).step_by(STEP) {
        server.run_sql("DROP SCHEMA IF EXISTS fencelock CASCADE").await;
        let proxy = Proxy::to(server.port()).await;
        proxy.hold_requests_after(bytes);
        let mut login = server.login_at(proxy.port());
        login.user("joe");
        let connecting = tokio::spawn(PostgresConfig::new(login).tls(Tls::Disable).connect());
        in_time(async {
            while !proxy.holds_requests() && !connecting.is_finished() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        })
        .await;
        if connecting.is_finished() {
            is_configuration(&connecting.await.unwrap().unwrap_err(), "missing");
            break;
        }
        server.run_sql(&schema).await;
        proxy.pass();
        connecting.await.unwrap().unwrap();
        moments += 1;
    }
    println!("made at {moments} moments of a connection");
    assert!(moments > 0);
}

#[tokio::test]
async fn a_server_without_a_connection_left_is_unavailable_and_keeps_what_is_held() {
    let server = Server::with(&["max_connections=8", "superuser_reserved_connections=0"]);
    let locks = Locks::new(server.client().await);
    let guard = locks.lock("a").await.unwrap();
    let mut others = Vec::new();
    let error = loop {
        match server.config().connect().await {
            Ok(client) => others.push(client),
            Err(error) => break error,
        }
        assert!(others.len() < 10);
    };
    is_unavailable(&error, "max_connections");
    // A client needs two to begin with, so that one is left.
    let mut more = Vec::new();
    while let Ok((client, connection)) = server.login().connect(NoTls).await {
        tokio::spawn(connection);
        more.push(client);
    }
    // Who waits is served by a session that is there, too.
    let other = Locks::new(others[0].clone());
    let theirs = other.lock("w").await.unwrap();
    let waiting = tokio::spawn(locks.lock("w").into_future());
    server::in_time(async {
        while locks.stats().waiting == 0 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    // Long enough for it to want a session of its own, on most machines; it must be served in any case.
    tokio::time::sleep(Duration::from_millis(100)).await;
    theirs.release().await.unwrap();
    let served = tokio::time::timeout(PATIENCE, waiting).await;
    served.expect("it is served").unwrap().unwrap().release().await.unwrap();
    // People can still look, by a session that is there.
    assert_eq!(locks.holder("a").await.unwrap().unwrap().token, Some(guard.token()));
    guard.renew_now().await.unwrap();
    guard.release().await.unwrap();
    // Nor is there one for who must have a session to itself.
    locks.lock("b").await.unwrap().release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_table_of_locks_is_unavailable_and_keeps_what_is_held() {
    let server = Server::with(&["max_locks_per_transaction=10", "max_connections=12"]);
    let lock = server.client().await;
    let locks = Locks::new(lock.clone());
    let mut guards = Vec::new();
    let error = loop {
        match locks.lock(format!("n {}", guards.len())).no_wait().await {
            Ok(guard) => guards.push(guard),
            Err(error) => break error,
        }
        assert!(guards.len() < 100_000);
    };
    is_unavailable(&error, "max_locks_per_transaction");
    assert!(guards.iter().all(lock_core::LockGuard::is_held));
    println!("{} locks fit", guards.len());
    guards.pop().unwrap().release().await.unwrap();
    locks.lock("one more").no_wait().await.unwrap().release().await.unwrap();
}

#[tokio::test]
async fn a_server_that_recovers_and_a_standby_are_told_apart_from_a_primary() {
    let primary = Server::start();
    drop(primary.client().await);
    let folder = tempfile::Builder::new().prefix("fencelock-pg-").tempdir().unwrap();
    server::give(folder.path());
    let data = folder.path().join("data");
    let mut backup = server::program("pg_basebackup");
    backup.args([
        "-h",
        "127.0.0.1",
        "-p",
        &primary.port().to_string(),
        "-U",
        "postgres",
        "--no-sync",
        "-R",
        "-c",
        "fast",
    ]);
    assert!(backup.arg("-D").arg(&data).status().unwrap().success());
    let standby = Server::on_data(&data, &[]);
    is_unsafe(&refusal(standby.config()).await, "primary");
    is_unsafe(
        &refusal(standby.config().allow_unsafe_configuration(true)).await,
        "primary",
    );
    // Whichever comes first, the one that can be written to is found.
    let both = login(&standby, |login| {
        login
            .host("127.0.0.1")
            .port(primary.port())
            .target_session_attrs(TargetSessionAttrs::ReadWrite);
    });
    let lock = both.connect().await.unwrap();
    granted(&lock, &claim("a", TTL)).await;
    assert_eq!(primary.locks().await, 1);
    // Without hot_standby it lets nobody in at all.
    drop(standby);
    let recovering = Server::on_data(&data, &["hot_standby=off"]);
    is_unavailable(&refusal(recovering.config()).await, "recovering");
}

#[tokio::test]
async fn what_is_unsafe_is_refused_at_each_connect_unless_it_is_allowed() {
    let server = Server::with(&["fsync=off"]);
    is_unsafe(&refusal(server.config()).await, "fsync = on");
    let lock = server
        .config()
        .allow_unsafe_configuration(true)
        .connect()
        .await
        .unwrap();
    granted(&lock, &claim("a", TTL)).await;
    drop(lock);

    let server = Server::start();
    let lock = server.client().await;
    server.run_sql("ALTER SEQUENCE fencelock.token CACHE 10").await;
    is_unsafe(&refusal(server.config()).await, "CACHE 1");
    // A client that was connected before finds it with its next session.
    server
        .run_sql(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name LIKE 'fencelock %'",
        )
        .await;
    let refused = async {
        loop {
            match lock.try_acquire(&claim("a", TTL)).await {
                Err(error) if error.is_retryable() => {}
                other => break other.unwrap_err(),
            }
        }
    };
    let error = server::in_time(refused).await;
    is_unsafe(&error, "CACHE 1");
    server.run_sql("ALTER SEQUENCE fencelock.token CACHE 1").await;
    granted(&lock, &claim("a", TTL)).await;
}

/// A PgBouncer before the server.
struct Bouncer {
    process: Child,
    port: u16,
    _folder: tempfile::TempDir,
}

impl Bouncer {
    fn start(server: &Server, mode: &str) -> Self {
        let folder = tempfile::Builder::new().prefix("fencelock-pg-").tempdir().unwrap();
        server::give(folder.path());
        let port = std::net::TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap()
            .port();
        let settings = folder.path().join("pgbouncer.ini");
        let text = format!(
            "[databases]\n* = user=postgres host=127.0.0.1 port={}\n[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\n\
             unix_socket_dir =\nauth_type = any\npool_mode = {mode}\ndefault_pool_size = 20\n",
            server.port()
        );
        // With `any` nobody's name is looked at; everybody is this user.
        std::fs::write(&settings, text).unwrap();
        let mut command = server::command("pgbouncer");
        let process = command
            .arg(&settings)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let process = process
            .spawn()
            .expect("there is no PgBouncer; install it: apt-get install pgbouncer");
        let start = Instant::now();
        while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(start.elapsed() < PATIENCE, "pgbouncer does not start");
            std::thread::sleep(Duration::from_millis(5));
        }
        Self {
            process,
            port,
            _folder: folder,
        }
    }

    fn config(&self, server: &Server) -> PostgresConfig {
        PostgresConfig::new(server.login_at(self.port)).tls(Tls::Disable)
    }
}

impl Drop for Bouncer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[tokio::test]
async fn a_pooler_that_shares_sessions_is_refused_and_gets_no_setting_of_ours() {
    let server = Server::start();
    drop(server.client().await);
    for mode in ["transaction", "statement"] {
        let bouncer = Bouncer::start(&server, mode);
        is_unsafe(&refusal(bouncer.config(&server)).await, "pool_mode = session");
        let leaked: i64 = {
            let (client, connection) = server.login_at(bouncer.port).connect(NoTls).await.unwrap();
            tokio::spawn(connection);
            let rows = client
                .simple_query("SELECT count(*) FROM pg_settings WHERE name = 'idle_session_timeout' AND setting <> '0'")
                .await;
            match &rows.unwrap()[1] {
                lock_postgres::tokio_postgres::SimpleQueryMessage::Row(row) => row.get(0).unwrap().parse().unwrap(),
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(leaked, 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pooler_that_shares_nothing_does_no_harm() {
    let server = Server::start();
    let bouncer = Bouncer::start(&server, "session");
    let (one, two) = (bouncer.config(&server).connect().await.unwrap(), server.client().await);
    let short = Duration::from_millis(600);
    let mine = claim("a", short).with_own_lease();
    let first = granted(&one, &mine).await;
    assert!(server::is_busy(&two, &claim("a", TTL)).await);
    // Nobody renews it: the server ends the session behind the pooler.
    server.until_locks(0, short + Duration::from_millis(500)).await;
    let next = granted(&two, &claim("a", TTL)).await;
    assert!(next.token > first.token);
    // Kept for as long as it is renewed.
    let locks = Locks::new(one);
    let guard = locks.lock("b").ttl(short).await.unwrap();
    tokio::time::sleep(3 * short).await;
    assert!(guard.is_held());
    guard.release().await.unwrap();
}
