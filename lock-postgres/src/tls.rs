//! TLS with libpq's meaning of `sslmode` and of the files that belong to it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{env, fs, io};

use lock_core::LockError;
use lock_transport::TlsFiles;
use lock_transport::tls::{Handshake, Peer, Verify, client_config};
use tokio_postgres_rustls::MakeRustlsConnect;

use crate::config::Tls;

pub(crate) const PEER: Peer = Peer {
    product: "Postgres",
    plain: "correct sslmode: disable is without TLS",
    client_auth: "",
};

/// What makes connections encrypted as `tls` wants it, and what the handshake with it came to.
pub(crate) async fn connector(
    tls: Tls,
    files: &TlsFiles,
    system_roots: bool,
) -> Result<(MakeRustlsConnect, Arc<Handshake>), LockError> {
    let files = files.clone();
    // Not on the thread that renews locks: there may be hundreds of files.
    let reading = tokio::task::spawn_blocking(move || build(tls, files, system_roots)).await;
    reading.map_err(|e| {
        wrong(
            "the certificates cannot be read, as the runtime of this client ends".to_owned(),
            e,
        )
    })?
}

/// Files that are not configured are those in `~/.postgresql`, as with libpq.
fn build(tls: Tls, mut files: TlsFiles, system_roots: bool) -> Result<(MakeRustlsConnect, Arc<Handshake>), LockError> {
    if !system_roots {
        files.ca = files.ca.or_else(|| home("root.crt"));
    }
    // Where there is a file of authorities, libpq verifies in every mode; without one any server is believed, unless that was ruled out.
    let verify = match tls {
        Tls::VerifyFull => Verify::Full,
        Tls::VerifyCa => Verify::Authority,
        _ if files.ca.is_some() || system_roots => Verify::Authority,
        _ => Verify::Nothing,
    };
    files.cert = files.cert.or_else(|| home("postgresql.crt"));
    files.key = match &files.cert {
        Some(cert) => Some(private_key(cert, files.key)?),
        None => None,
    };
    let (config, handshake) = client_config(&files, verify)?;
    Ok((MakeRustlsConnect::new(config), handshake))
}

/// That file in `~/.postgresql`, if it is there.
fn home(name: &str) -> Option<PathBuf> {
    let file = PathBuf::from(env::var_os("HOME")?).join(".postgresql").join(name);
    file.exists().then_some(file)
}

/// The key to the certificate that the client shows.
fn private_key(cert: &Path, key: Option<PathBuf>) -> Result<PathBuf, LockError> {
    let Some(key) = key.or_else(|| home("postgresql.key")) else {
        return Err(LockError::configuration(format!(
            "there is a client certificate, {}, but no private key for it; give it with key=FILE (or sslkey=FILE)",
            cert.display()
        )));
    };
    let shown = key.display();
    match is_private(&key) {
        Ok(true) => Ok(key),
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
