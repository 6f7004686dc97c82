//! TLS by rustls with ring.

use std::path::Path;
use std::sync::Arc;

use lock_core::LockError;
use tokio_postgres_rustls::MakeRustlsConnect;
use tokio_rustls::rustls::client::WebPkiServerVerifier;
use tokio_rustls::rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use tokio_rustls::rustls::crypto::{CryptoProvider, ring};
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use tokio_rustls::rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme,
};

use crate::config::Tls;
use crate::failure::Failure;

/// What makes connections encrypted as `tls` wants it.
pub(crate) async fn connector(tls: Tls, ca: Option<&Path>) -> Result<MakeRustlsConnect, Failure> {
    // Named, as another crate in the program may bring a provider of its own.
    let provider = Arc::new(ring::default_provider());
    let config = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(|e| wrong("TLS cannot be set up".to_owned(), e))?;
    let config = match tls {
        Tls::VerifyFull => config.with_root_certificates(roots(ca).await?).with_no_client_auth(),
        Tls::Disable | Tls::Prefer | Tls::Require | Tls::VerifyCa => {
            let authority = match tls {
                Tls::VerifyCa => {
                    let roots = Arc::new(roots(ca).await?);
                    let verifier = WebPkiServerVerifier::builder_with_provider(roots, Arc::clone(&provider)).build();
                    Some(verifier.map_err(|e| wrong("the trusted certificates cannot be used".to_owned(), e))?)
                }
                _ => None,
            };
            config
                .dangerous()
                .with_custom_certificate_verifier(Arc::new(Lenient { authority, provider }))
                .with_no_client_auth()
        }
    };
    Ok(MakeRustlsConnect::new(config))
}

/// Believes any server, as `sslmode=require` wants it, or any that the authority vouches for, under whatever name.
#[derive(Debug)]
struct Lenient {
    authority: Option<Arc<WebPkiServerVerifier>>,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Lenient {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let Some(authority) = &self.authority else {
            return Ok(ServerCertVerified::assertion());
        };
        match authority.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now) {
            // The name is looked at last.
            Err(Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) => Ok(ServerCertVerified::assertion()),
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

/// The authorities in `ca`, or those that the system trusts.
async fn roots(ca: Option<&Path>) -> Result<RootCertStore, Failure> {
    let ca = ca.map(Path::to_owned);
    // Not on the thread that renews locks: there may be hundreds of files.
    let reading = tokio::task::spawn_blocking(move || match ca {
        Some(path) => from_file(&path),
        None => from_system(),
    });
    reading
        .await
        .map_err(|e| wrong("the trusted certificates cannot be read".to_owned(), e))?
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
            "this system has no trusted certificates; install them (ca-certificates), or name the authority with \
             sslrootcert=FILE",
        )
        .into());
    }
    Ok(roots)
}

fn wrong(message: String, source: impl Into<lock_core::Source>) -> Failure {
    Failure::Known(LockError::Configuration {
        message,
        source: Some(source.into()),
    })
}
