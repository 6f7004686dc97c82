//! The ways to a server.

use std::net::TcpListener;
use std::time::Duration;

use lock_core::LockError;
use lock_postgres::PostgresLock;

use crate::server::{Database, claim, granted, is_busy};

const TTL: Duration = Duration::from_secs(30);

/// Addresses that nobody listens at, as the port is one of the system's.
const DEAD: [&str; 2] = ["127.0.0.1:1", "127.0.0.2:1"];

#[tokio::test]
async fn the_first_of_several_servers_that_can_be_used_is_used() {
    let server = Database::new().await;
    // It takes connections and says nothing.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (dead, silent) = (DEAD[0], listener.local_addr().unwrap());
    let here = format!("127.0.0.1:{}", server.port());
    let socket = format!("{}:{}", server.data().display(), server.port()).replace('/', "%2F");
    for hosts in [&socket, &format!("{dead},{here}"), &format!("{silent},{here}")] {
        let url = format!("postgres://postgres@{hosts}/{}?op_timeout=20s", server.name());
        let lock = PostgresLock::connect(&url).await.unwrap();
        let grant = granted(&lock, &claim(hosts, TTL)).await;
        assert!(is_busy(&server.client().await, &claim(grant.claim.name().as_str(), TTL)).await);
    }
    let missing = format!("postgres://postgres@%2Fnone{socket}/postgres");
    let error = PostgresLock::connect(missing).await.unwrap_err();
    assert!(matches!(error, LockError::Unavailable { .. }), "{error:?}");
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
