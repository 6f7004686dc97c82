//! The ways to a server.

#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a test may fail")]

mod server;

use std::net::{SocketAddr, TcpListener};
use std::time::Duration;

use lock_core::LockError;
use lock_postgres::{PostgresConfig, PostgresLock};
use server::{Server, claim, granted, is_busy};

const TTL: Duration = Duration::from_secs(20);

#[tokio::test]
async fn a_server_is_reached_by_a_socket() {
    let server = Server::start();
    let folder = server.folder().to_str().unwrap().replace('/', "%2F");
    let url = format!("postgres://postgres@{folder}:{}/postgres", server.port());
    let lock = PostgresLock::connect(&url).await.unwrap();
    granted(&lock, &claim("a", TTL)).await;
    assert!(is_busy(&server.client().await, &claim("a", TTL)).await);
    let missing = url.replace("%2Ffencelock-pg", "%2Fnone-fencelock-pg");
    let error = PostgresLock::connect(missing).await.unwrap_err();
    assert!(matches!(error, LockError::Unavailable { .. }), "{error:?}");
}

/// An address that nobody listens at.
fn dead() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

#[tokio::test]
async fn the_first_of_several_servers_that_can_be_used_is_used() {
    let server = Server::start();
    let url = format!("postgres://postgres@{},127.0.0.1:{}/postgres", dead(), server.port());
    let lock = PostgresLock::connect(&url).await.unwrap();
    granted(&lock, &claim("a", TTL)).await;
    assert!(is_busy(&server.client().await, &claim("a", TTL)).await);
}

#[tokio::test]
async fn a_server_that_does_not_answer_leaves_time_for_the_next() {
    let server = Server::start();
    // It takes connections and says nothing.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = listener.local_addr().unwrap();
    let url = format!("postgres://postgres@{silent},127.0.0.1:{}/postgres", server.port());
    let lock = PostgresLock::connect(&url).await.unwrap();
    granted(&lock, &claim("a", TTL)).await;
    assert_eq!(server.locks().await, 1);
}

#[tokio::test]
async fn all_servers_that_cannot_be_used_are_named_with_the_reason() {
    let server = Server::start();
    let here = format!("127.0.0.1:{}", server.port());
    let [one, two] = [dead(), dead()];
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = listener.local_addr().unwrap();
    let refusal = async |servers: &str, database: &str| {
        let url = format!("postgres://joe:hunter2@{servers}/{database}?op_timeout=2s");
        PostgresLock::connect(url).await.unwrap_err()
    };

    let none = refusal(&format!("{one},{two},{silent}"), "postgres").await;
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
    let some = refusal(&format!("{here},{one}"), "nowhere").await;
    assert!(matches!(some, LockError::Unavailable { .. }), "{some:?}");
    let said = format!("{some:#}");
    assert!(
        said.contains(&format!("{here}: ")) && said.contains("role \"joe\" does not exist"),
        "{said}"
    );
    let all = refusal(&format!("{here},{here}"), "nowhere").await;
    assert!(matches!(all, LockError::Configuration { .. }), "{all:?}");
}

#[tokio::test]
async fn a_configuration_of_the_driver_is_used_with_its_servers() {
    let server = Server::start();
    let lock = PostgresConfig::new(server.login()).connect().await.unwrap();
    granted(&lock, &claim("a", TTL)).await;
    assert_eq!(server.locks().await, 1);
}
