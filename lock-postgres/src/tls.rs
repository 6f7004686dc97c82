//! TLS by rustls with ring, with libpq's meaning of `sslmode` and of the files that belong to it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::{env, fs, io};

use lock_core::LockError;
use tokio_postgres_rustls::MakeRustlsConnect;
use tokio_rustls::rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use tokio_rustls::rustls::client::{WebPkiServerVerifier, verify_server_name};
use tokio_rustls::rustls::crypto::{CryptoProvider, ring};
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use tokio_rustls::rustls::server::ParsedCertificate;
use tokio_rustls::rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme,
};

use crate::config::Tls;
use crate::failure::Failure;

/// The files that a connection needs, as configured. libpq looks for the same ones in `~/.postgresql`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Certificates {
    pub(crate) roots: Roots,
    pub(crate) own: Option<PathBuf>,
    pub(crate) key: Option<PathBuf>,
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

/// What makes a connection encrypted, and whether it came to that.
pub(crate) struct Connector {
    pub(crate) connector: MakeRustlsConnect,
    /// Whether the server showed its certificate.
    pub(crate) shook_hands: Arc<AtomicBool>,
}

/// What makes connections encrypted as `tls` wants it.
pub(crate) async fn connector(tls: Tls, certificates: &Certificates) -> Result<Connector, Failure> {
    let certificates = certificates.clone();
    // Not on the thread that renews locks: there may be hundreds of files.
    let reading = tokio::task::spawn_blocking(move || build(tls, &certificates));
    reading
        .await
        .map_err(|e| wrong("the certificates cannot be read".to_owned(), e))?
}

fn build(tls: Tls, certificates: &Certificates) -> Result<Connector, Failure> {
    // Named, as another crate in the program may bring a provider of its own.
    let provider = Arc::new(ring::default_provider());
    let shook_hands = Arc::new(AtomicBool::new(false));
    let verifier = Verifier {
        trusted: trusted(tls, &certificates.roots, &provider)?,
        names: tls == Tls::VerifyFull,
        provider: Arc::clone(&provider),
        shook_hands: Arc::clone(&shook_hands),
    };
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|e| wrong("TLS cannot be set up".to_owned(), e))?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier));
    let config = match own(certificates)? {
        Some((chain, key, file)) => config.with_client_auth_cert(chain, key).map_err(|e| {
            wrong(
                format!("the client certificate in {} cannot be used", file.display()),
                e,
            )
        })?,
        None => config.with_no_client_auth(),
    };
    Ok(Connector {
        connector: MakeRustlsConnect::new(config),
        shook_hands,
    })
}

/// Those whom the server's certificate must come from.
#[derive(Debug)]
struct Trusted {
    webpki: Arc<WebPkiServerVerifier>,
    /// As they are in the file.
    certificates: Vec<CertificateDer<'static>>,
}

/// Judges the server as `sslmode` has it. Without anybody trusted it believes any server.
#[derive(Debug)]
struct Verifier {
    trusted: Option<Trusted>,
    /// Whether the certificate must be for that host.
    names: bool,
    provider: Arc<CryptoProvider>,
    shook_hands: Arc<AtomicBool>,
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.shook_hands.store(true, Ordering::Release);
        let Some(trusted) = &self.trusted else {
            return Ok(ServerCertVerified::assertion());
        };
        let verified = trusted
            .webpki
            .verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now);
        match verified {
            // The name is looked at last.
            Err(Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) if !self.names => Ok(ServerCertVerified::assertion()),
            // A certificate that signed itself is that of an authority, mostly, which webpki takes for no server's. Trusted as
            // it is, there is nothing more to know of it: its dates are looked at before, and have errors of their own.
            Err(Error::InvalidCertificate(CertificateError::Other(_)))
                if trusted.certificates.iter().any(|trusted| trusted == end_entity) =>
            {
                if self.names {
                    verify_server_name(&ParsedCertificate::try_from(end_entity)?, server_name)?;
                }
                Ok(ServerCertVerified::assertion())
            }
            verified => verified,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        tokio_rustls::rustls::crypto::verify_tls12_signature(message, cert, dss, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        tokio_rustls::rustls::crypto::verify_tls13_signature(message, cert, dss, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// Whom to trust in that mode. Where there is a file of theirs, libpq verifies in every mode; without one any server is
/// believed, unless that was ruled out.
fn trusted(tls: Tls, roots: &Roots, provider: &Arc<CryptoProvider>) -> Result<Option<Trusted>, Failure> {
    let at_home = home("root.crt");
    let file = match roots {
        Roots::File(file) => Some(file.as_path()),
        Roots::Default => at_home.as_deref(),
        Roots::System => None,
    };
    let must = [Tls::VerifyCa, Tls::VerifyFull].contains(&tls) || *roots == Roots::System;
    let (store, certificates) = match file {
        Some(file) => from_file(file)?,
        None if must => (from_system()?, Vec::new()),
        None => return Ok(None),
    };
    let webpki = WebPkiServerVerifier::builder_with_provider(Arc::new(store), Arc::clone(provider)).build();
    let webpki = webpki.map_err(|e| wrong("the trusted certificates cannot be used".to_owned(), e))?;
    Ok(Some(Trusted { webpki, certificates }))
}

/// That file in `~/.postgresql`, if it is there.
fn home(name: &str) -> Option<PathBuf> {
    let file = PathBuf::from(env::var_os("HOME")?).join(".postgresql").join(name);
    file.exists().then_some(file)
}

fn from_file(path: &Path) -> Result<(RootCertStore, Vec<CertificateDer<'static>>), Failure> {
    let certificates = read_certificates(path)?;
    let mut roots = RootCertStore::empty();
    for certificate in &certificates {
        let added = roots.add(certificate.clone());
        added.map_err(|e| wrong(format!("a certificate in {} cannot be used", path.display()), e))?;
    }
    Ok((roots, certificates))
}

fn read_certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, Failure> {
    let unreadable = |e| wrong(format!("no certificate can be read from {}", path.display()), e);
    let found = CertificateDer::pem_file_iter(path).map_err(unreadable)?;
    let found: Vec<_> = found.collect::<Result<_, _>>().map_err(unreadable)?;
    if found.is_empty() {
        return Err(LockError::configuration(format!("there is no certificate in {}", path.display())).into());
    }
    Ok(found)
}

fn from_system() -> Result<RootCertStore, Failure> {
    let found = rustls_native_certs::load_native_certs();
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(found.certs);
    if roots.is_empty() {
        return Err(LockError::configuration(
            "this system has no trusted certificates; install them (ca-certificates), or name the authority with \
             sslrootcert=FILE",
        )
        .into());
    }
    Ok(roots)
}

type Own = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>, PathBuf);

/// What the client shows of itself.
fn own(certificates: &Certificates) -> Result<Option<Own>, Failure> {
    let Some(file) = certificates.own.clone().or_else(|| home("postgresql.crt")) else {
        return Ok(None);
    };
    let Some(key) = certificates.key.clone().or_else(|| home("postgresql.key")) else {
        return Err(LockError::configuration(format!(
            "there is a client certificate, {}, but no private key for it; give it with sslkey=FILE",
            file.display()
        ))
        .into());
    };
    let chain = read_certificates(&file)?;
    let unreadable = |e: Box<dyn std::error::Error + Send + Sync>| {
        wrong(
            format!(
                "no private key can be read from {}; it must be a PEM file and not encrypted",
                key.display()
            ),
            e,
        )
    };
    if !is_private(&key).map_err(|e| unreadable(e.into()))? {
        return Err(LockError::configuration(format!(
            "others can read the private key {}; make it 0600 (or 0640 if root owns it)",
            key.display()
        ))
        .into());
    }
    let parsed = PrivateKeyDer::from_pem_file(&key).map_err(|e| unreadable(e.into()))?;
    Ok(Some((chain, parsed, file)))
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

fn wrong(message: String, source: impl Into<lock_core::Source>) -> Failure {
    Failure::Known(LockError::configuration(message).with_source(source))
}
