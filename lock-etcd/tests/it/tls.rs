//! TLS: whom the client trusts, and how it shows who it is.

use std::path::PathBuf;
use std::sync::Arc;

use crate::server::{LONG, claim, config_at, granted, shared};
use lock_core::LockError;
use lock_etcd::EtcdConfig;
use rcgen::{CertificateParams, CertifiedIssuer, KeyPair};
use tempfile::TempDir;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::pki_types::PrivateKeyDer;
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{RootCertStore, ServerConfig};

/// An authority, and where its certificate and those that it gives out are.
struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    folder: TempDir,
}

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::new(["localhost".to_owned()]).unwrap();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("ca.pem"), issuer.pem()).unwrap();
        Self { issuer, folder }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn give_out(&self, name: &str) -> (rcgen::Certificate, KeyPair) {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new([name.to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        std::fs::write(self.file("cert.pem"), certificate.pem()).unwrap();
        std::fs::write(self.file("key.pem"), key.serialize_pem()).unwrap();
        (certificate, key)
    }

    /// TLS before a server: with a certificate for that name; only for those whom `clients` has given a certificate, if it is
    /// there. Gives the port.
    async fn before(&self, target: &str, name: &str, clients: Option<&Self>) -> u16 {
        let (certificate, key) = self.give_out(name);
        let config = ServerConfig::builder();
        let config = match clients {
            None => config.with_no_client_auth(),
            Some(clients) => {
                let mut roots = RootCertStore::empty();
                roots.add(clients.issuer.der().clone()).unwrap();
                config.with_client_cert_verifier(WebPkiClientVerifier::builder(Arc::new(roots)).build().unwrap())
            }
        };
        let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
        listen(
            config.with_single_cert(vec![certificate.der().clone()], key).unwrap(),
            target,
        )
        .await
    }
}

/// Passes what arrives by TLS on to the server. Gives the port.
async fn listen(mut config: ServerConfig, target: &str) -> u16 {
    config.alpn_protocols = vec![b"h2".to_vec()];
    let (acceptor, target) = (TlsAcceptor::from(Arc::new(config)), target.to_owned());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let (acceptor, target) = (acceptor.clone(), target.clone());
            tokio::spawn(async move {
                let mut client = acceptor.accept(client).await?;
                let mut server = TcpStream::connect(target).await?;
                copy_bidirectional(&mut client, &mut server).await
            });
        }
    });
    port
}

async fn refused(config: EtcdConfig, words: &str) {
    let error = config.connect().await.unwrap_err();
    assert!(matches!(error, LockError::Configuration { .. }), "{error:?}");
    assert!(format!("{error:#}").contains(words), "{error}");
}

#[tokio::test]
async fn a_member_is_trusted_by_its_authority_and_its_name() {
    let (server, authority, stranger) = (shared().await, Authority::new(), Authority::new());
    let port = authority.before(server.authority(), "localhost", None).await;
    let at = |host: &str, ca: &Authority| {
        let ca = ca.file("ca.pem");
        let config = EtcdConfig::from_url(&format!("etcds://{host}:{port}?ca={}", ca.display()));
        config.unwrap().namespace(server.namespace())
    };
    let lock = at("localhost", &authority).connect().await.unwrap();
    granted(&lock, &claim("n", LONG)).await;
    refused(at("localhost", &stranger), "name its authority, or itself").await;
    refused(at("127.0.0.1", &authority), "is not for the host 127.0.0.1, but for").await;
    refused(EtcdConfig::new("localhost", port).tls(), "ca=FILE").await;
    let no_file = at("localhost", &authority).trust("/no/such/file.pem");
    refused(no_file, "no certificate can be read from /no/such/file.pem").await;
}

#[tokio::test]
async fn a_client_shows_its_certificate() {
    let (server, authority, clients, stranger) = (shared().await, Authority::new(), Authority::new(), Authority::new());
    let port = authority.before(server.authority(), "localhost", Some(&clients)).await;
    let anonymous = || {
        EtcdConfig::new("localhost", port)
            .namespace(server.namespace())
            .trust(authority.file("ca.pem"))
    };
    let named = |by: &Authority| {
        by.give_out("a client");
        anonymous().identity(by.file("cert.pem"), by.file("key.pem"))
    };
    granted(&named(&clients).connect().await.unwrap(), &claim("n", LONG)).await;
    refused(anonymous(), "give one with cert=FILE and key=FILE").await;
    refused(named(&stranger), "refused the client's certificate").await;
}

#[tokio::test]
async fn tls_and_none_are_told_apart() {
    let (server, authority) = (shared().await, Authority::new());
    let without = server.authority().replace("127.0.0.1", "localhost");
    let tls = EtcdConfig::from_url(&format!("etcds://{without}")).unwrap();
    let error = tls.connect().await.unwrap_err();
    assert!(
        format!("{error:#}").contains("speak TLS") && format!("{error:#}").contains("etcd:"),
        "{error}"
    );
    let port = authority.before(server.authority(), "localhost", None).await;
    let error = config_at(&format!("localhost:{port}")).connect().await.unwrap_err();
    assert!(format!("{error:#}").contains("etcds:"), "{error}");
}
