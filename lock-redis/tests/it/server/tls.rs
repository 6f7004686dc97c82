//! A certificate for servers of tests.

use std::path::{Path, PathBuf};

use rcgen::{CertificateParams, KeyPair};
use tempfile::TempDir;

/// A certificate for `localhost` and more names, which is its own authority, with its key, in files.
pub(crate) struct Certificate(TempDir);

impl Certificate {
    pub(crate) fn new(names: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let names: Vec<_> = ["localhost"].iter().chain(names).map(|&name| name.to_owned()).collect();
        let params = CertificateParams::new(names).unwrap();
        let key = KeyPair::generate().unwrap();
        std::fs::write(folder.path().join("cert.pem"), params.self_signed(&key).unwrap().pem()).unwrap();
        std::fs::write(folder.path().join("key.pem"), key.serialize_pem()).unwrap();
        Self(folder)
    }

    /// Where files beside it can be.
    pub(crate) fn folder(&self) -> &Path {
        self.0.path()
    }

    /// The authority.
    pub(crate) fn file(&self) -> PathBuf {
        self.folder().join("cert.pem")
    }

    /// What a server takes to listen at a free port by TLS, too, and to talk to others by TLS alone; and the port.
    pub(crate) fn arguments(&self) -> (Vec<String>, u16) {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let arguments = [vec!["--tls-port".to_owned(), port.to_string()], self.files()];
        (arguments.concat(), port)
    }

    /// The same without a port.
    pub(crate) fn files(&self) -> Vec<String> {
        let path = |name: &str| self.folder().join(name).to_str().unwrap().to_owned();
        let [cert, key] = ["cert.pem", "key.pem"].map(path);
        let arguments = [
            ["--tls-cert-file", &cert],
            ["--tls-key-file", &key],
            ["--tls-ca-cert-file", &cert],
            ["--tls-auth-clients", "no"],
            ["--tls-replication", "yes"],
        ];
        arguments.concat().into_iter().map(str::to_owned).collect()
    }
}
