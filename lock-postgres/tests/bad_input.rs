//! Whatever is wrong is said in a way that tells what to change, and costs nothing that is held.

#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a test may fail")]

mod server;

use std::time::{Duration, Instant};

use lock_core::{BusySignal, DistributedLock, LockError, Locks, Renewal};
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
    assert!(format!("{error:#}").contains(words), "{error}");
}

fn is_unsafe(error: &LockError, words: &str) {
    assert!(matches!(error, LockError::UnsafeConfiguration { .. }), "{error:?}");
    assert!(format!("{error:#}").contains(words), "{error}");
}

fn is_unavailable(error: &LockError, words: &str) {
    assert!(matches!(error, LockError::Unavailable { .. }), "{error:?}");
    assert!(format!("{error:#}").contains(words), "{error}");
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

#[tokio::test]
async fn a_wait_that_ends_before_the_server_has_a_connection_left_says_so_and_not_that_the_lock_is_held() {
    let server = Server::with(&["max_connections=4", "superuser_reserved_connections=0"]);
    let lock = server.config().connect_lazy().unwrap();
    let mut others = Vec::new();
    while let Ok((client, connection)) = server.login().connect(NoTls).await {
        tokio::spawn(connection);
        others.push(client);
    }
    let deadline = lock.clock().now();
    let signal = BusySignal::new(|_| {});
    let answer = in_time(lock.try_then_wait(&claim("a", TTL), Some(deadline), signal)).await;
    is_unavailable(&answer.unwrap_err(), "max_connections");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_table_of_locks_is_unavailable_and_keeps_what_is_held() {
    let server = Server::with(&["max_locks_per_transaction=10", "max_connections=12"]);
    let lock = server.client().await;
    let locks = Locks::new(lock.clone());
    // Now: to connect takes entries of the table as well.
    let plain = server.plain().await;
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
    // That is no lack of connections: a session that cannot be begun for it is not tried again and again.
    drop(guards.split_off(guards.len() - 5));
    let begun = Instant::now();
    // As soon as there is room again.
    while let Err(error) = plain.batch_execute("UPDATE fencelock.counter SET era = ''").await {
        assert!(begun.elapsed() < PATIENCE, "{error}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    while plain
        .batch_execute(&format!("SELECT pg_advisory_lock({})", fastrand::i64(..)))
        .await
        .is_ok()
    {}
    let errors = || server.log().matches("out of shared memory").count();
    let before = errors();
    is_unavailable(&refusal(server.config()).await, "max_locks_per_transaction");
    assert_eq!(errors() - before, 1);
    drop(plain);
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
    primary.copy_for_standby(&data);
    let standby = Server::on_data(&data, &[]);
    is_unsafe(&refusal(standby.config()).await, "primary");
    is_unsafe(
        &refusal(standby.config().allow_unsafe_configuration(true)).await,
        "primary",
    );
    // Whichever comes first, and whatever is asked for, the primary is found.
    for attributes in [TargetSessionAttrs::Any, TargetSessionAttrs::ReadWrite] {
        let both = login(&standby, |login| {
            login
                .host("127.0.0.1")
                .port(primary.port())
                .target_session_attrs(attributes);
        });
        let lock = both.connect().await.unwrap();
        granted(&lock, &claim("a", TTL)).await;
        assert_eq!(primary.locks().await, 1);
        drop(lock);
        primary.until_locks(0, PATIENCE).await;
    }
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_whose_lock_is_not_to_be_renewed_is_asked_nothing_even_if_there_is_no_other() {
    let server = Server::with(&[
        "max_connections=6",
        "superuser_reserved_connections=0",
        "log_statement=all",
        "log_line_prefix=[%p] ",
    ]);
    let config = server.config().op_timeout(Duration::from_secs(4));
    let lock = config.connect().await.unwrap();
    let grant = granted(&lock, &claim("a", PATIENCE).with_own_lease()).await;
    let session = server.sessions().await[0];
    let mut others = Vec::new();
    let start = Instant::now();
    // A connection that has just been closed counts until its process has ended.
    while others.len() < 5 {
        match server.login().connect(NoTls).await {
            Ok((client, connection)) => {
                tokio::spawn(connection);
                others.push(client);
            }
            Err(error) => {
                assert!(start.elapsed() < PATIENCE, "{} connections, then {error}", others.len());
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
    }
    assert!(lock.holder(grant.claim.name()).await.is_err());
    let asked = format!("[{session}] LOG:  statement: SELECT l.pid");
    assert!(!server.log().contains(&asked), "it lengthened the lock");
}

#[tokio::test]
async fn any_limit_for_requests_but_zero_will_do() {
    let server = Server::start();
    let lock = server.config().op_timeout(Duration::MAX).connect().await.unwrap();
    let grant = granted(&lock, &claim("n", TTL)).await;
    assert_eq!(lock.renew(&grant.lease).await.unwrap(), Renewal::Renewed);
    let zero = server.config().op_timeout(Duration::ZERO);
    is_configuration(&zero.connect().await.unwrap_err(), "op_timeout");
}
