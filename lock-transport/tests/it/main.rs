//! TLS with servers of OpenSSL, as most servers use it: pins, and certificates of clients. The tests of the command show on every backend
//! which certificates of servers are accepted, and what is said of the others.

#![cfg(feature = "tls")]
#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a test may fail")]

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use lock_core::LockError;
use lock_transport::{Endpoint, Pin, TlsFiles, tcp, tls};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};

const LIMIT: Duration = Duration::from_secs(60);
const PEER: tls::Peer = tls::Peer {
    product: "Example",
    plain: "use example: instead of examples:",
    client_auth: "",
};

fn openssl(folder: &TempDir, arguments: &str) -> Command {
    let mut command = Command::new("openssl");
    command.current_dir(folder.path()).args(arguments.split_whitespace());
    command.stdin(Stdio::null()).stderr(Stdio::null());
    command
}

/// A folder with self-signed certificates in `NAME.pem`, and their keys in `NAME.key`.
fn with_certificates(names: &[&str]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in names {
        let request = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj";
        let request = format!("{request} /CN={name} -out {name}.pem -keyout {name}.key");
        assert!(openssl(&folder, &request).status().unwrap().success());
    }
    folder
}

/// A server of OpenSSL that sends back each line in reverse. It ends when dropped.
struct Server(Child, Endpoint);

impl Server {
    async fn start(folder: &TempDir, name: &str, more: &str) -> Self {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        drop(listener);
        let arguments = format!("s_server -4 -rev -accept 127.0.0.1:{port} -cert {name}.pem -key {name}.key {more}");
        let child = openssl(folder, &arguments).stdout(Stdio::null()).spawn().unwrap();
        let server = Self(child, Endpoint::new("localhost", port));
        let listening = async {
            while tcp::connect(&server.1, LIMIT).await.is_err() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(LIMIT, listening)
            .await
            .expect("the server listens");
        server
    }

    /// Sends a line, and checks that it comes back, or that an error says that.
    async fn check(&self, files: &TlsFiles, says: &str) {
        let answer = async {
            let stream = tcp::connect(&self.1, LIMIT).await.unwrap();
            let mut stream = tls::connect(stream, &self.1, files, &[], &PEER, LIMIT).await?;
            stream.write_all(b"abc\n").await.unwrap();
            let mut line = String::new();
            BufReader::new(stream).read_line(&mut line).await.unwrap();
            Ok(line)
        };
        match answer.await {
            Ok(line) => assert_eq!((&*line, says), ("cba\n", "")),
            Err(error @ LockError::Configuration { .. }) => {
                assert!(
                    !says.is_empty() && error.to_string().contains(says),
                    "{says}: {error:#}"
                );
            }
            Err(error) => panic!("{says}: {error:?}"),
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test]
async fn a_pinned_certificate_is_trusted_and_no_other_one() {
    let folder = with_certificates(&["one", "other"]);
    let files = |pinned: &str, ca: Option<&str>| {
        let print = format!("x509 -in {pinned}.pem -noout -fingerprint -sha256");
        let printed = String::from_utf8(openssl(&folder, &print).output().unwrap().stdout).unwrap();
        TlsFiles {
            ca: ca.map(|name| folder.path().join(name)),
            pin: Pin::parse(&format!("sha256:{}", printed.trim().split_once('=').unwrap().1)),
            ..TlsFiles::default()
        }
    };
    let server = Server::start(&folder, "one", "").await;
    server.check(&files("one", None), "").await;
    server.check(&files("other", None), "not the one that pin= names").await;
    server.check(&files("one", Some("other.pem")), "ca=FILE").await;
}

#[tokio::test]
async fn a_server_that_wants_a_certificate_gets_it_or_the_error_says_so() {
    let folder = with_certificates(&["server", "client", "stranger"]);
    let path = |name: &str| Some(folder.path().join(name));
    let without = || TlsFiles {
        ca: path("server.pem"),
        ..TlsFiles::default()
    };
    let with = |cert: &str, key: &str| TlsFiles {
        cert: path(cert),
        key: path(key),
        ..without()
    };
    for version in ["-tls1_2", "-tls1_3", "-tls1_3 -num_tickets 0"] {
        let more = format!("-Verify 1 -verify_return_error -CAfile client.pem {version}");
        let server = Server::start(&folder, "server", &more).await;
        for (files, says) in [
            (with("client.pem", "client.key"), ""),
            (without(), "cert=FILE and key=FILE"),
            (with("stranger.pem", "stranger.key"), "refused the client's certificate"),
            (with("client.pem", "stranger.key"), "is not that of the certificate"),
            (with("client.pem", "none.key"), "no private key"),
        ] {
            server.check(&files, says).await;
        }
    }
    let optional = Server::start(&folder, "server", "-verify 1 -CAfile client.pem").await;
    optional.check(&without(), "").await;
}
