//! TLS with servers of OpenSSL, as most servers use it: pins, and certificates of clients. Which certificates of servers are taken, and what
//! is said of the others, is shown on every backend by the tests of the command.

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

fn openssl(folder: &TempDir, arguments: &str) -> String {
    let mut command = Command::new("openssl");
    command.current_dir(folder.path()).args(arguments.split_whitespace());
    let done = command.stderr(Stdio::null()).output().expect("openssl is installed");
    assert!(done.status.success(), "openssl {arguments}");
    String::from_utf8(done.stdout).unwrap()
}

/// A folder with certificates that signed themselves, in `NAME.pem`, and their keys in `NAME.key`.
fn with_certificates(names: &[&str]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in names {
        let made = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj";
        openssl(
            &folder,
            &format!("{made} /CN={name} -out {name}.pem -keyout {name}.key"),
        );
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
        let mut command = Command::new("openssl");
        command.current_dir(folder.path()).args(arguments.split_whitespace());
        let quiet = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let server = Self(quiet.spawn().unwrap(), Endpoint::new("localhost", port));
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

    /// What comes back for a line that is sent.
    async fn ask(&self, files: &TlsFiles) -> Result<String, LockError> {
        let stream = tcp::connect(&self.1, LIMIT).await.unwrap();
        let mut stream = tls::connect(stream, &self.1, files, &[], &PEER, LIMIT).await?;
        stream.write_all(b"abc\n").await.unwrap();
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).await.unwrap();
        Ok(line)
    }

    async fn refused(&self, files: &TlsFiles, says: &str) {
        let error = self.ask(files).await.expect_err(says);
        assert!(matches!(error, LockError::Configuration { .. }), "{error:?}");
        assert!(error.to_string().contains(says), "{error:#}");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn ca(folder: &TempDir, name: &str) -> TlsFiles {
    TlsFiles {
        ca: Some(folder.path().join(format!("{name}.pem"))),
        ..TlsFiles::default()
    }
}

#[tokio::test]
async fn a_pinned_certificate_is_trusted_and_no_other_one() {
    let folder = with_certificates(&["one", "other"]);
    let pin = |name| {
        let printed = openssl(&folder, &format!("x509 -in {name}.pem -noout -fingerprint -sha256"));
        Pin::parse(&format!("sha256:{}", printed.trim().split_once('=').unwrap().1))
    };
    let server = Server::start(&folder, "one", "").await;
    let pinned = |name| TlsFiles {
        pin: pin(name),
        ..TlsFiles::default()
    };
    assert_eq!(server.ask(&pinned("one")).await.unwrap(), "cba\n");
    server.refused(&pinned("other"), "not the one that pin= names").await;
    let both = TlsFiles {
        pin: pin("one"),
        ..ca(&folder, "other")
    };
    server.refused(&both, "ca=FILE").await;
}

#[tokio::test]
async fn a_server_that_wants_a_certificate_gets_it_or_the_error_says_so() {
    let folder = with_certificates(&["server", "client", "stranger"]);
    let named = |name: &str, key: &str| TlsFiles {
        cert: Some(folder.path().join(format!("{name}.pem"))),
        key: Some(folder.path().join(format!("{key}.key"))),
        ..ca(&folder, "server")
    };
    for version in ["-tls1_2", "-tls1_3", "-tls1_3 -num_tickets 0"] {
        let more = format!("-Verify 1 -verify_return_error -CAfile client.pem {version}");
        let server = Server::start(&folder, "server", &more).await;
        assert_eq!(
            server.ask(&named("client", "client")).await.unwrap(),
            "cba\n",
            "{version}"
        );
        for (files, says) in [
            (ca(&folder, "server"), "cert=FILE and key=FILE"),
            (named("stranger", "stranger"), "refused the client's certificate"),
            (named("client", "stranger"), "is not that of the certificate"),
            (named("client", "none"), "no private key"),
        ] {
            server.refused(&files, says).await;
        }
    }
    let optional = Server::start(&folder, "server", "-verify 1 -CAfile client.pem").await;
    assert_eq!(optional.ask(&ca(&folder, "server")).await.unwrap(), "cba\n");
}
