//! TLS with libpq's meaning of `sslmode` and of the files that belong to it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{env, fs, io};

use lock_core::LockError;
use lock_transport::tls::{Handshake, Peer, Verify, client_config};
use lock_transport::{Pin, TlsFiles};
use tokio_postgres_rustls::MakeRustlsConnect;

use crate::config::Tls;
use crate::failure::Failure;

pub(crate) const PEER: Peer = Peer {
    product: "Postgres",
    plain: "correct sslmode: disable is without TLS",
    client_auth: "",
};

/// The files that a connection needs, as configured. libpq looks for the same ones in `~/.postgresql`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Certificates {
    pub(crate) roots: Roots,
    pub(crate) own: Option<PathBuf>,
    pub(crate) key: Option<PathBuf>,
    pub(crate) pin: Option<Pin>,
}

/// Whom to trust.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum Roots {
    /// The file in the home directory, or else the system's.
    #[default]
    Default,
    /// What the system trusts.
    System,
    /// Those in that file.
    File(PathBuf),
}

/// What makes a connection encrypted, and what came of it.
pub(crate) struct Connector {
    pub(crate) connector: MakeRustlsConnect,
    pub(crate) handshake: Arc<Handshake>,
}

/// What makes connections encrypted as `tls` wants it.
pub(crate) async fn connector(tls: Tls, certificates: &Certificates) -> Result<Connector, Failure> {
    let certificates = certificates.clone();
    // Not on the thread that renews locks: there may be hundreds of files.
    let reading = tokio::task::spawn_blocking(move || build(tls, &certificates)).await;
    Ok(reading.map_err(|e| wrong("the certificates cannot be read".to_owned(), e))??)
}

fn build(tls: Tls, certificates: &Certificates) -> Result<Connector, LockError> {
    let ca = match &certificates.roots {
        Roots::File(file) => Some(file.clone()),
        Roots::Default => home("root.crt"),
        Roots::System => None,
    };
    // Where there is a file of authorities, libpq verifies in every mode; without one any server is believed, unless that was ruled out.
    let verify = match tls {
        Tls::VerifyFull => Verify::Full,
        Tls::VerifyCa => Verify::Authority,
        _ if ca.is_some() || certificates.roots == Roots::System => Verify::Authority,
        _ => Verify::Nothing,
    };
    let (cert, key) = own(certificates)?.unzip();
    let pin = certificates.pin;
    let (config, handshake) = client_config(&TlsFiles { ca, cert, key, pin }, verify)?;
    Ok(Connector {
        connector: MakeRustlsConnect::new(config),
        handshake,
    })
}

/// That file in `~/.postgresql`, if it is there.
fn home(name: &str) -> Option<PathBuf> {
    let file = PathBuf::from(env::var_os("HOME")?).join(".postgresql").join(name);
    file.exists().then_some(file)
}

/// What the client shows of itself, and the key to it.
fn own(certificates: &Certificates) -> Result<Option<(PathBuf, PathBuf)>, LockError> {
    let Some(file) = certificates.own.clone().or_else(|| home("postgresql.crt")) else {
        return Ok(None);
    };
    let Some(key) = certificates.key.clone().or_else(|| home("postgresql.key")) else {
        return Err(LockError::configuration(format!(
            "there is a client certificate, {}, but no private key for it; give it with key=FILE (or sslkey=FILE)",
            file.display()
        )));
    };
    let shown = key.display();
    match is_private(&key) {
        Ok(true) => Ok(Some((file, key))),
        Ok(false) => Err(LockError::configuration(format!(
            "others can read the private key {shown}; make it 0600 (or 0640 if root owns it)"
        ))),
        Err(e) => Err(wrong(format!("no private key can be read from {shown}"), e)),
    }
}

/// Whether only its owner can read it; if that is root, its group may.
#[cfg(unix)]
fn is_private(file: &Path) -> io::Result<bool> {
    use std::os::unix::fs::MetadataExt;
    let file = fs::metadata(file)?;
    let others = if file.uid() == 0 { 0o037 } else { 0o077 };
    Ok(file.mode() & others == 0)
}

#[cfg(not(unix))]
fn is_private(file: &Path) -> io::Result<bool> {
    fs::metadata(file).map(|_| true)
}

fn wrong(message: String, source: impl Into<lock_core::Source>) -> LockError {
    LockError::configuration(message).with_source(source)
}
