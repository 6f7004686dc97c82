//! Where a member is, and how it and this client show who they are.

use lock_core::LockError;
use tonic::transport::Endpoint;

use crate::config::Host;
use crate::failure::Failure;
use crate::session::Settings;

impl Settings {
    /// The endpoint at that host.
    pub(crate) async fn endpoint(&self, host: &Host) -> Result<Endpoint, Failure> {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        let endpoint = Endpoint::from_shared(format!("{scheme}://{host}")).map_err(|e| {
            Failure::Known(
                LockError::configuration("a host in the address of etcd cannot be used".to_owned()).with_source(e),
            )
        })?;
        #[cfg(feature = "tls")]
        if let Some(tls) = &self.tls {
            let tls = certificates(tls).await?.domain_name(&host.name);
            return endpoint.tls_config(tls).map_err(|e| wrong("TLS cannot be set up", e));
        }
        Ok(endpoint)
    }
}

/// Reads the files anew each time, as certificates are replaced before they end.
#[cfg(feature = "tls")]
async fn certificates(tls: &crate::config::Tls) -> Result<tonic::transport::ClientTlsConfig, Failure> {
    use tonic::transport::{Certificate, ClientTlsConfig, Identity};

    let mut config = ClientTlsConfig::new();
    config = match &tls.ca {
        Some(ca) => config.ca_certificate(Certificate::from_pem(read(ca).await?)),
        None => config.with_native_roots(),
    };
    if let (Some(certificate), Some(key)) = (&tls.certificate, &tls.key) {
        config = config.identity(Identity::from_pem(read(certificate).await?, read(key).await?));
    }
    Ok(config)
}

#[cfg(feature = "tls")]
async fn read(path: &std::path::Path) -> Result<Vec<u8>, Failure> {
    let (read, shown) = (path.to_owned(), path.display().to_string());
    // Not on the thread that renews locks.
    let reading = tokio::task::spawn_blocking(move || std::fs::read(read)).await;
    match reading.map_err(std::io::Error::other).flatten() {
        Ok(text) => Ok(text),
        Err(e) => Err(wrong(format!("{shown} cannot be read"), e)),
    }
}

#[cfg(feature = "tls")]
fn wrong(message: impl Into<String>, source: impl Into<lock_core::Source>) -> Failure {
    Failure::Known(LockError::configuration(message.into()).with_source(source))
}
