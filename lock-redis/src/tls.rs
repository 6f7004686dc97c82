//! TLS by rustls with ring.

use std::path::Path;
use std::sync::Arc;

use lock_core::LockError;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{self, ClientConfig, RootCertStore, crypto};

use crate::failure::Failure;

/// Makes sure of the server by the certificates in `ca`, or by those that the system trusts.
pub(crate) async fn wrap(stream: TcpStream, host: &str, ca: Option<&Path>) -> Result<TlsStream<TcpStream>, Failure> {
    let ca = ca.map(Path::to_owned);
    // Not on the thread that renews locks: there may be hundreds of files.
    let reading = tokio::task::spawn_blocking(move || match ca {
        Some(path) => from_file(&path),
        None => from_system(),
    });
    let roots = reading
        .await
        .map_err(|e| wrong("the trusted certificates cannot be read".to_owned(), e))??;
    // Named, as another crate in the program may bring a provider of its own.
    let config = ClientConfig::builder_with_provider(Arc::new(crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|e| wrong("TLS cannot be set up".to_owned(), e))?
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = ServerName::try_from(host.to_owned()).map_err(|e| {
        wrong(
            "the host in the address is not one that a certificate can name".to_owned(),
            e,
        )
    })?;
    let connected = TlsConnector::from(Arc::new(config)).connect(name, stream).await;
    connected.map_err(
        |e| match e.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
            Some(rustls::Error::InvalidCertificate(_)) => wrong(
                format!("the certificate of Redis is not trusted for {host}; name its authority with ca=FILE"),
                e,
            ),
            Some(rustls::Error::InvalidMessage(_)) => wrong(
                "the server does not speak TLS; use redis: instead of rediss:, or its TLS port".to_owned(),
                e,
            ),
            _ => Failure::Known(LockError::unavailable("connecting", format!("TLS with {host} failed")).with_source(e)),
        },
    )
}

fn from_file(path: &Path) -> Result<RootCertStore, Failure> {
    let unreadable = |e| wrong(format!("no certificate can be read from {}", path.display()), e);
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_file_iter(path).map_err(unreadable)? {
        let added = roots.add(certificate.map_err(unreadable)?);
        added.map_err(|e| wrong(format!("a certificate in {} cannot be used", path.display()), e))?;
    }
    if roots.is_empty() {
        return Err(LockError::configuration(format!("there is no certificate in {}", path.display())).into());
    }
    Ok(roots)
}

fn from_system() -> Result<RootCertStore, Failure> {
    let found = rustls_native_certs::load_native_certs();
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(found.certs);
    if roots.is_empty() {
        return Err(LockError::configuration(
            "this system has no trusted certificates; install them (ca-certificates), or name the authority with ca=FILE",
        )
        .into());
    }
    Ok(roots)
}

fn wrong(message: String, source: impl Into<lock_core::Source>) -> Failure {
    Failure::Known(LockError::configuration(message).with_source(source))
}
