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
    let said = none.to_string();
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
    let said = some.to_string();
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

#[cfg(feature = "tls")]
mod tls {
    use std::os::unix::fs::PermissionsExt;
    use std::path::PathBuf;

    use super::*;

    /// Whether the sessions of clients are encrypted.
    const ENCRYPTED: &str = "SELECT bool_and(s.ssl) FROM pg_stat_ssl s JOIN pg_stat_activity a USING (pid) \
                             WHERE a.application_name LIKE 'fencelock %'";

    async fn refusal(url: &str) -> String {
        let error = PostgresLock::connect(url).await.unwrap_err();
        assert!(matches!(error, LockError::Configuration { .. }), "{error:?}");
        error.to_string()
    }

    /// A server with a certificate for `localhost`, and the file of the authority.
    fn secure() -> (Server, tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        // The server looks for them as somebody else.
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        let own = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
        let (cert, key) = (folder.path().join("cert.pem"), folder.path().join("key.pem"));
        std::fs::write(&cert, own.cert.pem()).unwrap();
        std::fs::write(&key, own.signing_key.serialize_pem()).unwrap();
        std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o600)).unwrap();
        server::give(&key);
        let server = Server::with(&[
            "ssl=on",
            &format!("ssl_cert_file={}", cert.display()),
            &format!("ssl_key_file={}", key.display()),
        ]);
        (server, folder, cert)
    }

    #[tokio::test]
    async fn a_connection_is_encrypted_as_the_address_wants_it() {
        let (server, folder, cert) = secure();
        let url =
            |host: &str, mode: &str| format!("postgres://postgres@{host}:{}/postgres?sslmode={mode}", server.port());
        let trusted = |host: &str, mode: &str| format!("{}&sslrootcert={}", url(host, mode), cert.display());
        for (url, encrypted) in [
            (url("localhost", "disable"), false),
            (url("localhost", "prefer"), true),
            (url("127.0.0.1", "require"), true),
            (trusted("127.0.0.1", "verify-ca"), true),
            (trusted("localhost", "verify-full"), true),
        ] {
            let lock = PostgresLock::connect(&url).await.unwrap();
            granted(&lock, &claim("a", TTL)).await;
            assert_eq!(server.value::<bool>(ENCRYPTED).await, encrypted, "{url}");
            drop(lock);
            server.until_locks(0, server::PATIENCE).await;
            server::in_time(async {
                while !server.sessions().await.is_empty() {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            })
            .await;
        }
        // Not trusted; not the name in the certificate; no such file; nothing in it.
        assert!(refusal(&url("localhost", "verify-ca")).await.contains("TLS"));
        assert!(refusal(&url("localhost", "verify-full")).await.contains("TLS"));
        assert!(refusal(&trusted("127.0.0.1", "verify-full")).await.contains("TLS"));
        let none = folder.path().join("none.pem");
        let from = |file: &PathBuf| format!("{}&sslrootcert={}", url("localhost", "verify-full"), file.display());
        assert!(refusal(&from(&none)).await.contains("none.pem"));
        std::fs::write(&none, "").unwrap();
        assert!(refusal(&from(&none)).await.contains("no certificate"));
    }

    #[tokio::test]
    async fn a_server_without_tls_is_told_apart_from_one_that_is_gone() {
        let server = Server::start();
        let url = format!("postgres://postgres@127.0.0.1:{}/postgres", server.port());
        PostgresLock::connect(format!("{url}?sslmode=prefer")).await.unwrap();
        let refused = refusal(&format!("{url}?sslmode=require")).await;
        assert!(refused.contains("correct sslmode"), "{refused}");
    }
}
