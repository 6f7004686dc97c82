//! TLS by rustls with ring: certificates, keys, and what is wrong with them.

use std::error::Error as StdError;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use lock_core::LockError;
use sha2::{Digest, Sha256};
use socket2::SockRef;
use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use tokio_rustls::rustls::client::{ResolvesClientCert, verify_server_cert_signed_by_trust_anchor, verify_server_name};
use tokio_rustls::rustls::crypto::{self, CryptoProvider, WebPkiSupportedAlgorithms, ring};
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use tokio_rustls::rustls::server::ParsedCertificate;
use tokio_rustls::rustls::sign::CertifiedKey;
use tokio_rustls::rustls::{
    AlertDescription as Alert, CertificateError, ClientConfig, DigitallySignedStruct, Error, ProtocolVersion,
    RootCertStore, SignatureScheme,
};

use crate::{Endpoint, Pin, TlsFiles};

/// What the server's certificate must prove.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Verify {
    /// A trusted authority issued it, for that host.
    #[default]
    Full,
    /// A trusted authority issued it.
    Authority,
    /// Nothing but what [`TlsFiles::ca`] and [`TlsFiles::pin`] ask for.
    Nothing,
}

/// Verifies the server's certificate, presents that of the client, and notes whether the server asked for one, for the connections of one
/// configuration.
#[derive(Debug)]
pub struct Handshake {
    verify: Verify,
    /// `None` trusts every authority.
    roots: Option<RootCertStore>,
    /// The certificates in [`TlsFiles::ca`].
    trusted: Vec<CertificateDer<'static>>,
    pin: Option<Pin>,
    algorithms: WebPkiSupportedAlgorithms,
    /// The client's certificate.
    own: Option<Arc<CertifiedKey>>,
    asked: AtomicBool,
}

/// Words about a server, for errors.
#[derive(Clone, Copy, Debug)]
pub struct Peer {
    /// The product: `Redis`.
    pub product: &'static str,
    /// What to do about a server without TLS: `use redis: instead of rediss:`.
    pub plain: &'static str,
    /// What else to do about a server that wants client certificates, with the punctuation before it, or nothing.
    pub client_auth: &'static str,
}

/// Reads the files and returns a configuration of them. Must be called on a runtime of tokio.
///
/// A server certificate that is in [`TlsFiles::ca`] itself is trusted, even if it is that of an authority, as `openssl req -x509` makes it. If
/// it names no host at all, it is valid for every host.
///
/// # Errors
///
/// [`LockError::Configuration`] if a file cannot be read or used.
pub async fn client_config(files: &TlsFiles, verify: Verify) -> Result<(ClientConfig, Arc<Handshake>), LockError> {
    let files = files.clone();
    // Not on the thread that renews locks: there may be hundreds of files.
    let reading = tokio::task::spawn_blocking(move || read(&files, verify)).await;
    reading.map_err(|e| wrong("the certificates cannot be read, as the runtime of this client ends", e))?
}

fn read(files: &TlsFiles, verify: Verify) -> Result<(ClientConfig, Arc<Handshake>), LockError> {
    // Named, as another crate in the program may install a provider of its own.
    let provider = Arc::new(ring::default_provider());
    let (mut roots, mut trusted) = (RootCertStore::empty(), Vec::new());
    if let Some(path) = &files.ca {
        trusted = certificates(path)?;
        for certificate in &trusted {
            let unusable = |e| wrong(format!("a certificate in {} cannot be used", path.display()), e);
            roots.add(certificate.clone()).map_err(unusable)?;
        }
    }
    let trusts_system = files.ca.is_none() && files.pin.is_none() && verify != Verify::Nothing;
    if trusts_system {
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        if roots.is_empty() {
            return Err(LockError::configuration(
                "this system has no trusted certificates; install them (ca-certificates), or name the authority with ca=FILE",
            ));
        }
    }
    let handshake = Arc::new(Handshake {
        verify,
        roots: (trusts_system || files.ca.is_some()).then_some(roots),
        trusted,
        pin: files.pin,
        algorithms: provider.signature_verification_algorithms,
        own: own(files, &provider)?,
        asked: AtomicBool::new(false),
    });
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|e| wrong("TLS cannot be set up", e))?
        .dangerous()
        .with_custom_certificate_verifier(Arc::clone(&handshake) as Arc<dyn ServerCertVerifier>)
        .with_client_cert_resolver(Arc::clone(&handshake) as Arc<dyn ResolvesClientCert>);
    Ok((config, handshake))
}

/// The client's certificate and its key, if they are given.
fn own(files: &TlsFiles, provider: &CryptoProvider) -> Result<Option<Arc<CertifiedKey>>, LockError> {
    let (Some(cert), Some(key)) = (&files.cert, &files.key) else {
        return Ok(None);
    };
    let chain = certificates(cert)?;
    let (at, key_at) = (cert.display(), key.display());
    let unread = format!("no private key can be read from {key_at}; it must be a PEM file and not encrypted");
    let key = PrivateKeyDer::from_pem_file(key).map_err(|e| wrong(unread, e))?;
    let certified = CertifiedKey::from_der(chain, key, provider).map_err(|e| {
        let message = match e {
            Error::InconsistentKeys(_) => format!("the private key in {key_at} is not that of the certificate in {at}"),
            _ => format!(
                "the certificate in {at} with the key in {key_at} cannot be used; it must have a key of RSA, P-256, P-384 or Ed25519"
            ),
        };
        wrong(message, e)
    })?;
    Ok(Some(Arc::new(certified)))
}

/// The certificates in a file: at least one.
fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, LockError> {
    let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let at = path.display();
    let found = read.map_err(|e| wrong(format!("no certificate can be read from {at}"), e))?;
    if found.is_empty() {
        return Err(LockError::configuration(format!("there is no certificate in {at}")));
    }
    Ok(found)
}

fn wrong(message: impl Into<String>, source: impl Into<lock_core::Source>) -> LockError {
    LockError::configuration(message).with_source(source)
}

/// Starts TLS on a connection to `endpoint`, with the protocols `alpn` to choose from, and waits for the server's verdict on the client's
/// certificate if the server asked for one.
///
/// # Errors
///
/// [`LockError::Configuration`] if a file cannot be used, or one side refuses the certificate of the other; [`LockError::Unavailable`] if the
/// connection ends, or takes three quarters of `op_timeout`.
pub async fn connect(
    stream: TcpStream,
    endpoint: &Endpoint,
    files: &TlsFiles,
    alpn: &[&[u8]],
    peer: &Peer,
    op_timeout: Duration,
) -> Result<TlsStream<TcpStream>, LockError> {
    let (mut config, handshake) = client_config(files, Verify::Full).await?;
    config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
    let unnamed = "the host in the address is not one that a certificate can name";
    let name = ServerName::try_from(endpoint.host.clone()).map_err(|e| wrong(unnamed, e))?;
    let connecting = async {
        let mut stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await?;
        let version = stream.get_ref().1.protocol_version();
        if handshake.asked.load(Ordering::Acquire) && version == Some(ProtocolVersion::TLSv1_3) {
            // A server that accepts the certificate and stays silent costs this time.
            let verdict = timeout((op_timeout / 8).min(VERDICT), verdict(&mut stream)).await;
            verdict.unwrap_or(Ok(()))?;
        }
        Ok(stream)
    };
    // A server without TLS waits for more. This limit is below the caller's, so that the caller gets the reason.
    match timeout(op_timeout * 3 / 4, connecting).await {
        Ok(connected) => connected.map_err(|error: io::Error| explain(error, &handshake, endpoint, peer)),
        Err(_) => Err(LockError::unavailable(
            "connecting",
            format!(
                "{} at {endpoint} does not answer to TLS; if it has none, {}",
                peer.product, peer.plain
            ),
        )),
    }
}

/// How long the client waits for the verdict on its certificate. Most servers send a session ticket with it.
const VERDICT: Duration = Duration::from_millis(250);

/// In TLS 1.3 the server looks at the client's certificate after the handshake has ended for the client. Reads the first record after that,
/// and leaves its content for later reads.
async fn verdict(stream: &mut TlsStream<TcpStream>) -> io::Result<()> {
    let (tcp, session) = stream.get_mut();
    let tcp = &*tcp;
    let read = || session.read_tls(&mut &*SockRef::from(tcp));
    match tcp.async_io(Interest::READABLE, read).await? {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        _ => session.process_new_packets().map(drop).map_err(io::Error::other),
    }
}

/// Returns why TLS with the server failed, and what to do.
///
/// [`LockError::Configuration`] if one side refuses the certificate of the other, or they have no cipher in common; it is
/// [`lasting`](LockError::lasting) if this client has no certificate to show. [`LockError::Unavailable`] if the connection just ended.
pub fn explain(
    error: impl StdError + Send + Sync + 'static,
    handshake: &Handshake,
    endpoint: &Endpoint,
    peer: &Peer,
) -> LockError {
    let at = format!("{} at {endpoint}", peer.product);
    let asked = handshake.asked.load(Ordering::Acquire);
    let lacks = asked && handshake.own.is_none();
    // The server asks for a certificate when all else is settled, so its alerts are about the certificate then.
    let refuses = |alert: &Alert| asked && *alert != Alert::InternalError;
    let message = match find(&error) {
        Some(Error::InvalidCertificate(reason)) => {
            format!("the certificate of {at} {}", untrusted(reason, &endpoint.host))
        }
        Some(Error::InvalidMessage(_)) => format!("{at} does not speak TLS; {}", peer.plain),
        Some(Error::AlertReceived(alert)) if lacks && refuses(alert) => {
            let message = format!(
                "{at} wants to see a certificate of the client; give one with cert=FILE and key=FILE{}",
                peer.client_auth
            );
            return wrong(message, error).lasting();
        }
        Some(Error::AlertReceived(alert)) if refuses(alert) => format!(
            "{at} refused the client's certificate; correct cert=FILE and key=FILE: the server must trust its authority, and it must not have \
             expired"
        ),
        Some(
            Error::AlertReceived(Alert::HandshakeFailure | Alert::ProtocolVersion | Alert::InsufficientSecurity)
            | Error::PeerIncompatible(_),
        ) => format!(
            "{at} and this client have no way to encrypt in common; the server needs TLS 1.2 or 1.3, and a certificate with a key of RSA \
             (2048 bits or more), P-256, P-384 or Ed25519: P-521 and DSA are not supported"
        ),
        _ => {
            let hint = match lacks {
                true => {
                    "perhaps it wants to see a certificate of the client: then give one with cert=FILE and key=FILE"
                }
                false => &format!("it may be starting or stopping, or not speak TLS: then {}", peer.plain),
            };
            return LockError::unavailable("connecting", format!("TLS with {at} failed; {hint}")).with_source(error);
        }
    };
    wrong(message, error)
}

/// Returns whether the error is one of TLS: about a certificate, a protocol version, or a server without TLS.
pub fn is_cause_of(error: &(dyn StdError + 'static)) -> bool {
    find(error).is_some()
}

/// The error of rustls among the causes. An `io::Error` does not name its inner error as a source.
fn find<'a>(error: &'a (dyn StdError + 'static)) -> Option<&'a Error> {
    if let Some(found) = error.downcast_ref() {
        return Some(found);
    }
    match error.downcast_ref::<io::Error>().and_then(io::Error::get_ref) {
        Some(inner) => find(inner),
        None => find(error.source()?),
    }
}

/// Why the client does not accept the server's certificate, and what to do.
fn untrusted(reason: &CertificateError, host: &str) -> String {
    use CertificateError as Reason;
    let why = match reason {
        Reason::Expired | Reason::ExpiredContext { .. } => {
            "has expired; renew it at the server, or correct the clock of this machine"
        }
        Reason::NotValidYet | Reason::NotValidYetContext { .. } => {
            "is not valid yet; correct the clock of this machine or of the one that made it"
        }
        Reason::NotValidForNameContext { presented, .. } if !presented.is_empty() => {
            let names = presented
                .join(", ")
                .replace("DnsName(", "")
                .replace("IpAddress(", "")
                .replace(')', "");
            &format!("is not for the host {host}, but for {names}; use a host that it names, or make one for {host}")
        }
        Reason::NotValidForName | Reason::NotValidForNameContext { .. } => {
            &format!("names no host; make one for {host} (openssl req -x509 -addext subjectAltName=DNS:{host})")
        }
        // With another key than that of the trusted authority of the same name, it is of another authority.
        Reason::UnknownIssuer
        | Reason::BadSignature
        | Reason::UnsupportedSignatureAlgorithmForPublicKeyContext { .. } => {
            "is of no authority that is trusted; name its authority, or itself if it signed itself, with ca=FILE"
        }
        Reason::InvalidPurpose | Reason::InvalidPurposeContext { .. } => {
            "is not for servers; make one with the extended key usage serverAuth"
        }
        Reason::ApplicationVerificationFailure => "is not the one that pin= names; correct the pin or the host",
        Reason::UnsupportedSignatureAlgorithmContext { .. } => {
            "is signed in a way that is not supported; make one whose authority has a key of RSA, P-256, P-384 or Ed25519: P-521, DSA and \
             SHA-1 are not supported"
        }
        // The reasons of webpki, which rustls passes on as they are.
        Reason::Other(other) => match format!("{other:?}") {
            text if text.contains("UnsupportedCertVersion") => {
                "is of the old format X.509 version 1, which is not supported; make one of version 3 (openssl req -x509)"
            }
            text if text.contains("CaUsedAsEndEntity") => {
                "is that of an authority, and not one that is trusted as a server; name this certificate itself with ca=FILE"
            }
            text => &format!("cannot be used ({text}); replace it at the server"),
        },
        _ => "cannot be used; replace it at the server",
    };
    why.to_owned()
}

impl ServerCertVerifier for Handshake {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        if self.pin.is_some_and(|pin| pin.0[..] != Sha256::digest(end_entity)[..]) {
            return Err(CertificateError::ApplicationVerificationFailure.into());
        }
        let Some(roots) = &self.roots else {
            return Ok(ServerCertVerified::assertion());
        };
        let certificate = ParsedCertificate::try_from(end_entity)?;
        let is_trusted_itself = self.trusted.iter().any(|trusted| trusted == end_entity);
        let algorithms = self.algorithms.all;
        match verify_server_cert_signed_by_trust_anchor(&certificate, roots, intermediates, now, algorithms) {
            // For webpki, a certificate of an authority is never that of a server. It has checked the dates before, with errors of their own.
            Err(Error::InvalidCertificate(CertificateError::Other(_))) if is_trusted_itself => {}
            verified => verified?,
        }
        if self.verify == Verify::Full {
            match verify_server_name(&certificate, server_name) {
                Err(Error::InvalidCertificate(CertificateError::NotValidForNameContext { presented, .. }))
                    if is_trusted_itself && presented.is_empty() => {}
                named => named?,
            }
        }
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        crypto::verify_tls12_signature(message, cert, dss, &self.algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        crypto::verify_tls13_signature(message, cert, dss, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

impl ResolvesClientCert for Handshake {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        self.asked.store(true, Ordering::Release);
        self.own.clone()
    }

    fn has_certs(&self) -> bool {
        self.own.is_some()
    }
}
