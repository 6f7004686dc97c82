//! TLS by rustls with ring: certificates, keys, and what is wrong with them.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use lock_core::LockError;
use sha2::{Digest, Sha256};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use tokio_rustls::rustls::client::{ResolvesClientCert, WebPkiServerVerifier, verify_server_name};
use tokio_rustls::rustls::crypto::{self, CryptoProvider, ring};
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use tokio_rustls::rustls::server::ParsedCertificate;
use tokio_rustls::rustls::sign::CertifiedKey;
use tokio_rustls::rustls::{
    AlertDescription, CertificateError, ClientConfig, DigitallySignedStruct, Error, OtherError, ProtocolVersion,
    RootCertStore, SignatureScheme,
};

use crate::{Endpoint, Pin, TlsFiles};

/// What the server's certificate must prove.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Verify {
    /// That it is of a trusted authority, and for that host.
    #[default]
    Full,
    /// That it is of a trusted authority.
    Authority,
    /// Nothing but what [`TlsFiles::pin`] asks for.
    Nothing,
}

/// Judges the server's certificate, shows that of the client, and notes what the other side did in the handshakes of one configuration.
#[derive(Debug)]
pub struct Handshake {
    /// `None` trusts every authority.
    webpki: Option<Arc<WebPkiServerVerifier>>,
    /// The certificates in the file of trusted ones.
    trusted: Vec<CertificateDer<'static>>,
    /// Whether the server's certificate must be for its host.
    names: bool,
    pin: Option<Pin>,
    provider: Arc<CryptoProvider>,
    /// The client's certificate.
    own: Option<Arc<CertifiedKey>>,
    shown: AtomicBool,
    asked: AtomicBool,
}

impl Handshake {
    /// Whether the server showed its certificate.
    pub fn was_shown(&self) -> bool {
        self.shown.load(Ordering::Acquire)
    }
}

/// Words about a server, for errors.
#[derive(Clone, Copy, Debug)]
pub struct Peer {
    /// The product: `Redis`.
    pub product: &'static str,
    /// What to do about a server without TLS: `use redis: instead of rediss:`.
    pub plain: &'static str,
    /// What else to do about a server that wants client certificates, in parentheses with a blank before it, or nothing.
    pub client_auth: &'static str,
}

/// Reads the files, and makes a configuration of them. It may block for as long as reading files does.
///
/// A server certificate that is in [`TlsFiles::ca`] itself is trusted, also if it is that of an authority, as `openssl req -x509` makes it.
/// If it names no host at all, it is taken for the host that it is trusted for.
///
/// # Errors
///
/// [`LockError::Configuration`] if a file cannot be read or used.
pub fn client_config(files: &TlsFiles, verify: Verify) -> Result<(ClientConfig, Arc<Handshake>), LockError> {
    // Named, as another crate in the program may bring a provider of its own.
    let provider = Arc::new(ring::default_provider());
    let mut roots = RootCertStore::empty();
    let trusted = files.ca.as_deref().map_or(Ok(Vec::new()), certificates)?;
    for certificate in &trusted {
        let added = roots.add(certificate.clone());
        added.map_err(|e| wrong(format!("a certificate in {} cannot be used", shown(&files.ca)), e))?;
    }
    if files.ca.is_none() && files.pin.is_none() && verify != Verify::Nothing {
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        if roots.is_empty() {
            return Err(LockError::configuration(
                "this system has no trusted certificates; install them (ca-certificates), or name the authority with ca=FILE",
            ));
        }
    }
    let webpki = (!roots.is_empty())
        .then(|| WebPkiServerVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider)).build());
    let handshake = Arc::new(Handshake {
        webpki: webpki
            .transpose()
            .map_err(|e| wrong("the trusted certificates cannot be used", e))?,
        trusted,
        names: verify == Verify::Full,
        pin: files.pin,
        own: own(files, &provider)?,
        provider: Arc::clone(&provider),
        shown: AtomicBool::new(false),
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

/// Begins TLS on a connection to `endpoint`, with the protocols `alpn` to choose from, and waits for the server's verdict on the client's
/// certificate if it asked for one.
///
/// # Errors
///
/// [`LockError::Configuration`] if a file cannot be used, or a certificate of one side does not convince the other;
/// [`LockError::Unavailable`] if the connection ends, or takes three quarters of `op_timeout`.
pub async fn connect(
    stream: TcpStream,
    endpoint: &Endpoint,
    files: &TlsFiles,
    alpn: &[&[u8]],
    peer: &Peer,
    op_timeout: Duration,
) -> Result<TlsStream<TcpStream>, LockError> {
    let read = files.clone();
    // Not on the thread that renews locks: there may be hundreds of files.
    let reading = tokio::task::spawn_blocking(move || client_config(&read, Verify::Full)).await;
    let (mut config, handshake) =
        reading.map_err(|e| wrong("the certificates cannot be read, as the runtime of this client ends", e))??;
    config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
    let unnamed = "the host in the address is not one that a certificate can name";
    let name = ServerName::try_from(endpoint.host.clone()).map_err(|e| wrong(unnamed, e))?;
    let connecting = async {
        let mut stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await?;
        let version = stream.get_ref().1.protocol_version();
        if handshake.asked.load(Ordering::Acquire) && version == Some(ProtocolVersion::TLSv1_3) {
            // A server that is content and silent costs this time.
            let verdict = timeout((op_timeout / 8).min(VERDICT), verdict(&mut stream)).await;
            verdict.unwrap_or(Ok(()))?;
        }
        Ok(stream)
    };
    // A server without TLS waits for more. Sooner than the caller gives up, so that the caller gets the reason.
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

/// How long the verdict on a client's certificate is waited for. Most servers send a session ticket with it.
const VERDICT: Duration = Duration::from_millis(250);

/// In TLS 1.3 the server looks at the client's certificate when the handshake is over for the client. Reads the first record after that,
/// and leaves what is in it for later reads.
async fn verdict(stream: &mut TlsStream<TcpStream>) -> io::Result<()> {
    /// What has arrived already.
    struct Arrived<'a>(&'a TcpStream);

    impl io::Read for Arrived<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            self.0.try_read(buffer)
        }
    }

    loop {
        stream.get_ref().0.readable().await?;
        let (tcp, session) = stream.get_mut();
        match session.read_tls(&mut Arrived(tcp)) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(_) => return session.process_new_packets().map(drop).map_err(io::Error::other),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
}

/// Returns why TLS with the server failed, and what to do.
///
/// [`LockError::Configuration`] if a certificate of one side does not convince the other, or they cannot agree how to encrypt; it is
/// [`lasting`](LockError::lasting) if this client has no certificate to show. [`LockError::Unavailable`] if the connection just ended.
pub fn explain(
    error: impl std::error::Error + Send + Sync + 'static,
    handshake: &Handshake,
    endpoint: &Endpoint,
    peer: &Peer,
) -> LockError {
    use AlertDescription as Alert;
    let at = format!("{} at {endpoint}", peer.product);
    let asked = handshake.asked.load(Ordering::Acquire);
    let lacking = asked && handshake.own.is_none();
    let refused = asked && matches!(find(&error), Some(Error::AlertReceived(alert)) if REFUSALS.contains(alert));
    let message = match find(&error) {
        Some(Error::InvalidCertificate(reason)) => {
            format!("the certificate of {at} {}", untrusted(reason, &endpoint.host))
        }
        Some(Error::InvalidMessage(_)) => format!("{at} does not speak TLS; {}", peer.plain),
        _ if refused && lacking => format!(
            "{at} wants to see a certificate of the client; give one with cert=FILE and key=FILE{}",
            peer.client_auth
        ),
        _ if refused => format!(
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
            let hint = match lacking {
                true => {
                    "perhaps it wants to see a certificate of the client: then give one with cert=FILE and key=FILE"
                }
                false => &format!("it may be starting or stopping, or not speak TLS: then {}", peer.plain),
            };
            return LockError::unavailable("connecting", format!("TLS with {at} failed; {hint}")).with_source(error);
        }
    };
    let failure = LockError::configuration(message).with_source(error);
    match refused && lacking {
        true => failure.lasting(),
        false => failure,
    }
}

/// Whether the error is one of TLS: about a certificate, or that the other side does not speak it, or not in this way.
pub fn is_cause_of(error: &(dyn std::error::Error + 'static)) -> bool {
    find(error).is_some()
}

/// The error of rustls among the causes. One in an `io::Error` is none of its sources.
fn find<'a>(error: &'a (dyn std::error::Error + 'static)) -> Option<&'a Error> {
    if let Some(found) = error.downcast_ref() {
        return Some(found);
    }
    match error.downcast_ref::<io::Error>().and_then(io::Error::get_ref) {
        Some(inner) => find(inner),
        None => find(error.source()?),
    }
}

/// The alerts that may be about the client's certificate, if the server asked for one.
const REFUSALS: [AlertDescription; 11] = [
    AlertDescription::CertificateRequired,
    AlertDescription::NoCertificate,
    AlertDescription::BadCertificate,
    AlertDescription::UnsupportedCertificate,
    AlertDescription::CertificateRevoked,
    AlertDescription::CertificateExpired,
    AlertDescription::CertificateUnknown,
    AlertDescription::UnknownCA,
    AlertDescription::AccessDenied,
    AlertDescription::DecryptError,
    AlertDescription::HandshakeFailure,
];

/// Why the server's certificate is not taken, and what to do.
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

/// What the client shows of itself.
fn own(files: &TlsFiles, provider: &CryptoProvider) -> Result<Option<Arc<CertifiedKey>>, LockError> {
    let (Some(cert), Some(key)) = (&files.cert, &files.key) else {
        return Ok(None);
    };
    let chain = certificates(cert)?;
    let (at, key_at) = (shown(&files.cert), shown(&files.key));
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

fn shown(file: &Option<PathBuf>) -> String {
    file.iter().map(|file| file.display().to_string()).collect()
}

fn wrong(message: impl Into<String>, source: impl Into<lock_core::Source>) -> LockError {
    LockError::configuration(message).with_source(source)
}

impl ServerCertVerifier for Handshake {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.shown.store(true, Ordering::Release);
        if self.pin.is_some_and(|pin| pin.0[..] != Sha256::digest(end_entity)[..]) {
            return Err(CertificateError::ApplicationVerificationFailure.into());
        }
        let Some(webpki) = &self.webpki else {
            return Ok(ServerCertVerified::assertion());
        };
        let verified = webpki.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now);
        let itself = self.trusted.iter().any(|trusted| trusted == end_entity);
        let named = match verified {
            // A certificate of an authority is that of no server, for webpki. Trusted as it is, there is nothing more to know of it: its
            // dates were looked at before, and have errors of their own.
            Err(Error::InvalidCertificate(CertificateError::Other(OtherError(_)))) if itself => {
                verify_server_name(&ParsedCertificate::try_from(end_entity)?, server_name)
            }
            verified => verified.map(drop),
        };
        match named {
            Err(Error::InvalidCertificate(CertificateError::NotValidForName)) if !self.names => {}
            Err(Error::InvalidCertificate(CertificateError::NotValidForNameContext { presented, .. }))
                if !self.names || itself && presented.is_empty() => {}
            named => named?,
        }
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        crypto::verify_tls12_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        crypto::verify_tls13_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
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
