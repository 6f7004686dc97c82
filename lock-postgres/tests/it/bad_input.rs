//! Whatever is wrong is said in a way that tells what to change, and costs nothing that is held.

use std::future::IntoFuture;
use std::time::{Duration, Instant};

use lock_core::{DistributedLock, LockError, Locks, Renewal, Wait};
use lock_postgres::tokio_postgres::NoTls;
use lock_postgres::{PostgresConfig, Tls, schema_sql};
use rustix::process::Signal;

use crate::server::{Database, HANG_LIMIT, Server, claim, granted, in_time};

const TTL: Duration = Duration::from_secs(30);

pub(crate) async fn refusal(config: PostgresConfig) -> LockError {
    let error = config.connect().await.unwrap_err();
    assert!(!format!("{error} {error:?}").contains("hunter2"), "{error:?}");
    error
}

pub(crate) fn is_configuration(error: &LockError, words: &str) {
    assert!(matches!(error, LockError::Configuration { .. }), "{error:?}");
    assert!(format!("{error:#}").contains(words), "{error}");
}

pub(crate) fn is_unsafe(error: &LockError, words: &str) {
    assert!(matches!(error, LockError::UnsafeConfiguration { .. }), "{error:?}");
    assert!(format!("{error:#}").contains(words), "{error}");
}

pub(crate) fn is_unavailable(error: &LockError, words: &str) {
    assert!(matches!(error, LockError::Unavailable { .. }), "{error:?}");
    assert!(format!("{error:#}").contains(words), "{error}");
}

pub(crate) fn login(
    server: &Database,
    change: impl FnOnce(&mut lock_postgres::tokio_postgres::Config),
) -> PostgresConfig {
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
    is_configuration(&refusal(server.config_as("nobody at all")).await, "user");
    let config = server.config().op_timeout(Duration::from_secs(10));
    server.end(Signal::KILL);
    is_unavailable(&refusal(config).await, "connecting");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_login_that_is_refused_for_a_while_ends_no_wait_of_a_client_that_was_connected() {
    let server = Server::start();
    server.run_sql("CREATE ROLE joe LOGIN SUPERUSER").await;
    let config = || server.config_as("joe");
    let locks = Locks::new(config().connect().await.unwrap());
    locks.lock("a").await.unwrap().release().await.unwrap();
    server.run_sql("ALTER ROLE joe NOLOGIN").await;
    server
        .run_sql("SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity WHERE usename = 'joe'")
        .await;
    let waiting = tokio::spawn(locks.lock("a").wait_for(HANG_LIMIT).into_future());
    loop {
        // The end of the sessions may be noticed first.
        let refused = in_time(locks.lock("b").no_wait().into_future()).await.unwrap_err();
        assert!(refused.is_retryable(), "{refused:?}");
        if format!("{refused:#}").contains("refused the user") {
            break;
        }
    }
    is_configuration(&refusal(config()).await, "refused the user");
    server.run_sql("ALTER ROLE joe LOGIN").await;
    waiting.await.unwrap().unwrap().release().await.unwrap();
}

#[tokio::test]
async fn a_role_that_may_not_make_the_schema_is_shown_the_sql_and_needs_no_more_than_that() {
    let server = Database::new().await;
    server
        .run_sql(&format!(
            "CREATE ROLE no_maker LOGIN; REVOKE CREATE ON DATABASE {} FROM PUBLIC",
            server.name()
        ))
        .await;
    let joe = || server.config_as("no_maker");
    let error = refusal(joe()).await;
    is_configuration(&error, "GRANT SELECT, UPDATE ON \"fencelock\".counter TO \"no_maker\"");
    let sql = error.to_string();
    let (_, sql) = sql.split_once(":\n").unwrap();
    server.run_sql(sql).await;
    let lock = joe().connect().await.unwrap();
    granted(&lock, &claim("a", TTL)).await;
    // Without a right that is needed it says what to do.
    server
        .run_sql(
            "REVOKE UPDATE ON SEQUENCE fencelock.token FROM no_maker; REVOKE UPDATE ON fencelock.counter FROM no_maker",
        )
        .await;
    is_configuration(&refusal(joe()).await, "lacks a right");
    // The schema is as it is printed, whoever makes it.
    server
        .run_sql(&schema_sql("fencelock", Some("no_maker")).unwrap())
        .await;
    joe().connect().await.unwrap();
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
    let answer = in_time(lock.acquire(&claim("a", TTL), Wait::until(Some(deadline)))).await;
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
        assert!(begun.elapsed() < HANG_LIMIT, "{error}");
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
async fn what_is_unsafe_is_refused_unless_it_is_allowed() {
    let server = Server::with(&["fsync=off"]);
    is_unsafe(&refusal(server.config()).await, "fsync = on");
    let lock = server
        .config()
        .allow_unsafe_configuration(true)
        .connect()
        .await
        .unwrap();
    granted(&lock, &claim("a", TTL)).await;
}

#[tokio::test]
async fn a_sequence_that_is_unsafe_is_refused_at_each_connect_and_found_by_the_next_session() {
    let server = Database::new().await;
    let lock = server.client().await;
    server.run_sql("ALTER SEQUENCE fencelock.token CACHE 10").await;
    is_unsafe(&refusal(server.config()).await, "CACHE 1");
    // A client that was connected before finds it with its next session.
    server.end_sessions().await;
    let refused = async {
        loop {
            match lock.try_acquire(&claim("a", TTL)).await {
                Err(error) if error.is_retryable() => {}
                other => break other.unwrap_err(),
            }
        }
    };
    let error = in_time(refused).await;
    is_unsafe(&error, "CACHE 1");
    server.run_sql("ALTER SEQUENCE fencelock.token CACHE 1").await;
    granted(&lock, &claim("a", TTL)).await;
}

#[tokio::test]
async fn any_limit_for_requests_but_zero_will_do() {
    let server = Database::new().await;
    let lock = server.config().op_timeout(Duration::MAX).connect().await.unwrap();
    let grant = granted(&lock, &claim("n", TTL)).await;
    assert_eq!(lock.renew(&grant.lease).await.unwrap(), Renewal::Renewed);
    let zero = server.config().op_timeout(Duration::ZERO);
    is_configuration(&zero.connect().await.unwrap_err(), "op_timeout");
}
