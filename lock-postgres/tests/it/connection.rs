//! The ways to a server.

use std::net::TcpListener;
use std::time::Duration;

use lock_core::{LockError, Locks, LossReason};
use lock_postgres::{PostgresConfig, PostgresLock};

use crate::server::{Database, claim, granted, in_time, is_busy};

const TTL: Duration = Duration::from_secs(30);

#[tokio::test]
async fn a_server_is_reached_by_a_socket() {
    let server = Database::new().await;
    let folder = server.data().to_str().unwrap().replace('/', "%2F");
    let url = format!("postgres://postgres@{folder}:{}/{}", server.port(), server.name());
    let lock = PostgresLock::connect(&url).await.unwrap();
    granted(&lock, &claim("a", TTL)).await;
    assert!(is_busy(&server.client().await, &claim("a", TTL)).await);
    let missing = url.replace("%2Ffencelock-", "%2Fnone-fencelock-");
    let error = PostgresLock::connect(missing).await.unwrap_err();
    assert!(matches!(error, LockError::Unavailable { .. }), "{error:?}");
}

/// Addresses that nobody listens at, as the port is one of the system's.
const DEAD: [&str; 2] = ["127.0.0.1:1", "127.0.0.2:1"];

#[tokio::test]
async fn the_first_of_several_servers_that_can_be_used_is_used() {
    let server = Database::new().await;
    let (dead, port, name) = (DEAD[0], server.port(), server.name());
    let url = format!("postgres://postgres@{dead},127.0.0.1:{port}/{name}");
    let lock = PostgresLock::connect(&url).await.unwrap();
    granted(&lock, &claim("a", TTL)).await;
    assert!(is_busy(&server.client().await, &claim("a", TTL)).await);
}

#[tokio::test]
async fn a_server_that_does_not_answer_leaves_time_for_the_next() {
    let server = Database::new().await;
    // It takes connections and says nothing.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = listener.local_addr().unwrap();
    let (port, name) = (server.port(), server.name());
    let url = format!("postgres://postgres@{silent},127.0.0.1:{port}/{name}");
    let lock = PostgresLock::connect(&url).await.unwrap();
    granted(&lock, &claim("a", TTL)).await;
    assert_eq!(server.locks().await, 1);
}

#[tokio::test]
async fn all_servers_that_cannot_be_used_are_named_with_the_reason() {
    let server = Database::new().await;
    let here = format!("127.0.0.1:{}", server.port());
    let [one, two] = DEAD;
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = listener.local_addr().unwrap();
    let refusal = async |servers: &str, database: &str, limit: &str| {
        let url = format!("postgres://joe:hunter2@{servers}/{database}?op_timeout={limit}");
        PostgresLock::connect(url).await.unwrap_err()
    };

    let none = refusal(&format!("{one},{two},{silent}"), "postgres", "2s").await;
    assert!(matches!(none, LockError::Unavailable { .. }), "{none:?}");
    let said = format!("{none:#}");
    for part in [
        format!("cannot be reached at {one}: Connection refused"),
        format!("cannot be reached at {two}: Connection refused"),
        format!("{silent}: no answer within 500ms"),
    ] {
        assert!(said.contains(&part), "{said}");
    }
    assert!(!said.contains("hunter2"), "{said}");

    // The one that is not there may be the right one.
    let some = refusal(&format!("{here},{one}"), "nowhere", "60s").await;
    assert!(matches!(some, LockError::Unavailable { .. }), "{some:?}");
    let said = format!("{some:#}");
    assert!(
        said.contains(&format!("{here}: ")) && said.contains("role \"joe\" does not exist"),
        "{said}"
    );
    let all = refusal(&format!("{here},{here}"), "nowhere", "60s").await;
    assert!(matches!(all, LockError::Configuration { .. }), "{all:?}");
}

#[tokio::test]
async fn a_configuration_of_the_driver_is_used_with_its_servers() {
    let server = Database::new().await;
    let lock = PostgresConfig::new(server.login()).connect().await.unwrap();
    granted(&lock, &claim("a", TTL)).await;
    assert_eq!(server.locks().await, 1);
}

#[tokio::test]
async fn a_session_that_is_ended_is_told_at_once() {
    let server = Database::new().await;
    let locks = Locks::new(server.client().await);
    let guard = locks.lock("a").ttl(TTL).await.unwrap();
    server.end_sessions().await;
    let told = in_time(guard.lost().wait()).await;
    // And not because its time is over.
    assert_eq!(told, LossReason::Revoked);
    assert!(!guard.is_held());
    locks.lock("a").ttl(TTL).await.unwrap().release().await.unwrap();
}
