//! Encryption, and what each side must prove: `sslmode` and the files that belong to it.

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::Duration;

use lock_core::LockError;
use lock_postgres::PostgresLock;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use rustix::process::Signal;
use tempfile::TempDir;

use crate::server::{Database, Server, claim, granted};
use test_servers::LocalPostgres;

const TTL: Duration = Duration::from_secs(30);

/// Whether the sessions of clients are encrypted.
const ENCRYPTED: &str = "SELECT bool_and(s.ssl) FROM pg_stat_ssl s JOIN pg_stat_activity a USING (pid) \
                         WHERE a.application_name LIKE 'fencelock %' AND a.datname = current_database()";

fn folder() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    // The server looks for its files as somebody else.
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    folder
}

fn write(folder: &TempDir, name: &str, text: &str, mode: u32) -> PathBuf {
    let file = folder.path().join(name);
    std::fs::write(&file, text).unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).unwrap();
    file
}

fn params(name: &str, is_ca: bool) -> CertificateParams {
    let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
    params.distinguished_name.push(DnType::CommonName, name);
    if is_ca {
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    }
    params
}

/// The certificate, and the key to it, with which it signed itself.
fn self_signed(params: &CertificateParams) -> (String, String) {
    let key = KeyPair::generate().unwrap();
    (params.self_signed(&key).unwrap().pem(), key.serialize_pem())
}

/// An authority, its certificate, and what it signs.
struct Authority(Issuer<'static, KeyPair>, String);

impl Authority {
    fn new(name: &str) -> Self {
        let key = KeyPair::generate().unwrap();
        let params = params(name, true);
        let certificate = params.self_signed(&key).unwrap().pem();
        Self(Issuer::new(params, key), certificate)
    }

    fn signs(&self, params: &CertificateParams) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        (params.signed_by(&key, &self.0).unwrap().pem(), key.serialize_pem())
    }
}

/// A server with that certificate; `more` are settings of its own.
fn secure(folder: &TempDir, (certificate, key): &(String, String), more: &[&str]) -> Server {
    let certificate = write(folder, "server.pem", certificate, 0o644);
    let key = write(folder, "server.key", key, 0o600);
    LocalPostgres::give(&key).unwrap();
    let (certificate, key) = (
        format!("ssl_cert_file={}", certificate.display()),
        format!("ssl_key_file={}", key.display()),
    );
    let settings = ["ssl=on", &certificate, &key];
    Server::with(&[&settings, more].concat())
}

fn url(server: &Database, host: &str, query: &str) -> String {
    format!(
        "postgres://postgres@{host}:{}/{}?{query}&op_timeout=30s",
        server.port(),
        server.name()
    )
}

async fn refusal(url: &str) -> String {
    let error = PostgresLock::connect(url).await.expect_err(url);
    assert!(matches!(error, LockError::Configuration { .. }), "{error:?}");
    format!("{error:#}")
}

/// Connects, and looks whether that is encrypted.
async fn is_encrypted(server: &Database, url: &str) -> bool {
    let lock = PostgresLock::connect(url)
        .await
        .unwrap_or_else(|error| panic!("{url}: {error}"));
    granted(&lock, &claim("a", TTL)).await;
    let encrypted = server.value::<bool>(ENCRYPTED).await;
    drop(lock);
    server.until_no_sessions().await;
    encrypted
}

/// Puts lines before those that decide who is let in, as it is from the start on.
fn let_in(server: &mut Server, lines: &str) {
    let file = server.data().join("pg_hba.conf");
    let rules = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, format!("{lines}\n{rules}")).unwrap();
    server.restart(Signal::INT);
}

#[tokio::test]
async fn a_connection_is_encrypted_as_the_address_wants_it() {
    let folder = folder();
    let own = self_signed(&params("localhost", false));
    let server = secure(&folder, &own, &[]);
    let root = |name: &str| format!("sslrootcert={}", folder.path().join(name).display());
    let full = |name: &str| format!("sslmode=verify-full&{}", root(name));
    let own = root("server.pem");
    write(&folder, "empty.pem", "", 0o644);
    for (host, query, encrypted) in [
        ("localhost", "sslmode=disable", false),
        ("localhost", "sslmode=prefer", true),
        ("127.0.0.1", "sslmode=require", true),
        (
            "127.0.0.1",
            "sslmode=require&application_name=shop&options=-c%20search_path%3Dnone",
            true,
        ),
        ("127.0.0.1", &*format!("sslmode=require&{own}"), true),
        ("127.0.0.1", &*format!("sslmode=verify-ca&{own}"), true),
        ("localhost", &*format!("sslmode=verify-full&{own}"), true),
        ("localhost", &*own, true),
        // By a socket of this machine it never is, whatever is asked for.
        (
            &*server.data().to_str().unwrap().replace('/', "%2F"),
            "sslmode=require",
            false,
        ),
    ] {
        let url = url(&server, host, query);
        assert_eq!(is_encrypted(&server, &url).await, encrypted, "{url}");
    }
    // Not trusted; not the name in the certificate; no such file; nothing in it.
    for (host, query, says) in [
        ("localhost", "sslmode=verify-ca", "ca=FILE"),
        ("localhost", "sslmode=verify-full", "ca=FILE"),
        ("localhost", "sslrootcert=system", "ca=FILE"),
        (
            "127.0.0.1",
            &*full("server.pem"),
            "is not for the host 127.0.0.1, but for",
        ),
        ("localhost", &*full("none.pem"), "none.pem"),
        ("localhost", &*full("empty.pem"), "no certificate"),
    ] {
        let refused = refusal(&url(&server, host, query)).await;
        assert!(refused.contains(says), "{query}: {refused}");
    }
}

#[tokio::test]
async fn an_authority_that_is_named_counts_in_each_mode_that_encrypts() {
    let folder = folder();
    let (right, wrong) = (Authority::new("right"), Authority::new("wrong"));
    let mut server = secure(&folder, &right.signs(&params("elsewhere", false)), &[]);
    let [right, wrong] = [("right.pem", right), ("wrong.pem", wrong)]
        .map(|(file, authority)| write(&folder, file, &authority.1, 0o644).display().to_string());
    let with = |mode: &str, root: &str| url(&server, "127.0.0.1", &format!("sslmode={mode}&sslrootcert={root}"));
    for mode in ["prefer", "require", "verify-ca"] {
        assert!(is_encrypted(&server, &with(mode, &right)).await, "{mode}");
        assert!(refusal(&with(mode, &wrong)).await.contains("ca=FILE"), "{mode}");
    }
    let refused = refusal(&with("verify-full", &right)).await;
    assert!(refused.contains("is not for the host"), "{refused}");
    // The server refuses what is not encrypted.
    let_in(&mut server, "hostnossl all all all reject");
    let refused = refusal(&url(&server, "127.0.0.1", "sslmode=disable")).await;
    assert!(
        refused.contains("pg_hba.conf") && refused.contains("change sslmode"),
        "{refused}"
    );
}

#[tokio::test]
async fn a_client_shows_its_certificate() {
    let folder = folder();
    let (servers, clients, others) = (
        Authority::new("servers"),
        Authority::new("clients"),
        Authority::new("others"),
    );
    let ca = write(&folder, "clients.pem", &clients.1, 0o644);
    let ca = format!("ssl_ca_file={}", ca.display());
    let mut server = secure(&folder, &servers.signs(&params("localhost", false)), &[&ca]);
    let root = write(&folder, "servers.pem", &servers.1, 0o644);
    server.run_sql("CREATE ROLE joe LOGIN SUPERUSER").await;
    let_in(&mut server, "hostssl all joe all cert");
    let files = |name: &str, (certificate, key): (String, String)| {
        let certificate = write(&folder, &format!("{name}.crt"), &certificate, 0o644);
        let key = write(&folder, &format!("{name}.key"), &key, 0o600);
        format!("cert={}&key={}", certificate.display(), key.display())
    };
    let joe = params("joe", false);
    let as_joe = |query: &str| {
        let query = format!("sslmode=verify-full&sslrootcert={}&{query}", root.display());
        url(&server, "localhost", &query).replace("postgres@", "joe@")
    };
    let good = files("joe", clients.signs(&joe));
    assert!(is_encrypted(&server, &as_joe(&good)).await);
    for (query, said) in [
        ("", "give one with cert=FILE and key=FILE"),
        (
            &*files("jim", clients.signs(&params("jim", false))),
            "certificate authentication failed",
        ),
        (
            &*files("stranger", others.signs(&joe)),
            "refused the client's certificate",
        ),
        (&*files("broken", (clients.signs(&joe).0, String::new())), "broken.key"),
    ] {
        let refused = refusal(&as_joe(query)).await;
        assert!(refused.contains(said), "{query}: {refused}");
    }
}

#[tokio::test]
async fn channel_binding_can_be_required() {
    let folder = folder();
    let server = secure(&folder, &self_signed(&params("localhost", false)), &[]);
    server
        .run_sql("CREATE ROLE joe LOGIN SUPERUSER PASSWORD 'secret'")
        .await;
    server.wants_password_of("joe").await;
    let as_joe = |query: &str| url(&server, "localhost", query).replace("postgres@", "joe:secret@");
    assert!(is_encrypted(&server, &as_joe("sslmode=require&channel_binding=require")).await);
    let refused = refusal(&as_joe("sslmode=disable&channel_binding=require")).await;
    assert!(refused.contains("channel binding"), "{refused}");
}

#[tokio::test]
async fn a_server_without_tls_is_told_apart_from_one_that_is_gone() {
    let server = Database::new().await;
    assert!(!is_encrypted(&server, &url(&server, "127.0.0.1", "sslmode=prefer")).await);
    let refused = refusal(&url(&server, "127.0.0.1", "sslmode=require")).await;
    assert!(refused.contains("correct sslmode"), "{refused}");
}
