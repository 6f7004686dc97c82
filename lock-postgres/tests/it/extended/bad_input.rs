//! A standby in place of a primary, a server without connections, a schema that appears while a client connects.

use std::time::{Duration, Instant};

use lock_core::{DistributedLock, Locks};
use lock_postgres::tokio_postgres::NoTls;
use lock_postgres::tokio_postgres::config::TargetSessionAttrs;
use lock_postgres::{PostgresConfig, Tls, schema_sql};

use crate::bad_input::{is_configuration, is_unavailable, is_unsafe, login, refusal};
use crate::server::proxy::Proxy;
use crate::server::{Database, HANG_LIMIT, Server, claim, granted, in_time};
use test_servers::LocalPostgres;

const TTL: Duration = Duration::from_secs(30);

#[tokio::test]
async fn a_server_that_recovers_and_a_standby_are_told_apart_from_a_primary() {
    let primary = Server::start();
    drop(primary.client().await);
    let folder = LocalPostgres::folder().unwrap();
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
        primary.until_locks(0).await;
    }
    // Without hot_standby it lets nobody in at all.
    drop(standby);
    let recovering = Server::on_data(&data, &["hot_standby=off"]);
    is_unavailable(&refusal(recovering.config()).await, "recovering");
}

/// How many clients connect at a time, each to a database of its own.
const LANES: usize = 4;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_schema_that_somebody_makes_while_a_role_without_that_right_connects_is_used() {
    let lanes: Vec<_> = (0..LANES)
        .map(|lane| tokio::spawn(make_at_every_fourth(lane)))
        .collect();
    let mut moments = 0;
    for lane in lanes {
        moments += lane.await.unwrap();
    }
    println!("made at {moments} moments of a connection");
    assert!(moments > LANES);
}

/// Makes the schema when a connecting client has sent that many bytes, for each such number of this lane, and returns how many
/// they were.
async fn make_at_every_fourth(lane: usize) -> usize {
    /// Less than any request has.
    const STEP: usize = 32;
    let server = Database::new().await;
    let role = format!("late_maker_{lane}");
    let start = format!(
        "CREATE ROLE {role} LOGIN; REVOKE CREATE ON DATABASE {} FROM PUBLIC",
        server.name()
    );
    server.run_sql(&start).await;
    let schema = schema_sql("fencelock", Some(&role)).unwrap();
    let mut moments = 0;
    for bytes in (lane * STEP..).step_by(LANES * STEP) {
        server.run_sql("DROP SCHEMA IF EXISTS fencelock CASCADE").await;
        let proxy = Proxy::to(server.port()).await;
        proxy.hold_requests_after(bytes);
        let mut login = server.login_at(proxy.port());
        login.user(&role);
        let connecting = tokio::spawn(
            PostgresConfig::new(login)
                .tls(Tls::Disable)
                .op_timeout(HANG_LIMIT)
                .connect(),
        );
        in_time(async {
            while proxy.left() > 0 && !connecting.is_finished() {
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
    moments
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
    in_time(async {
        while locks.stats().waiting == 0 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    // Long enough for it to want a session of its own, on most machines; it must be served in any case.
    tokio::time::sleep(Duration::from_millis(100)).await;
    theirs.release().await.unwrap();
    in_time(waiting).await.unwrap().unwrap().release().await.unwrap();
    // People can still look, by a session that is there.
    assert_eq!(
        locks.holders("a").await.unwrap().pop().unwrap().token,
        Some(guard.token())
    );
    guard.renew_now().await.unwrap();
    guard.release().await.unwrap();
    // Nor is there one for who must have a session to itself.
    locks.lock("b").await.unwrap().release().await.unwrap();
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
    let grant = granted(&lock, &claim("a", HANG_LIMIT).with_own_lease()).await;
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
                assert!(
                    start.elapsed() < HANG_LIMIT,
                    "{} connections, then {error}",
                    others.len()
                );
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
    }
    assert!(lock.holders(grant.claim.name()).await.is_err());
    let asked = format!("[{session}] LOG:  statement: SELECT l.pid");
    assert!(!server.log().contains(&asked), "it lengthened the lock");
}
