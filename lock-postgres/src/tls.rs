//! TLS as `sslmode` has it.

use std::sync::Arc;

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

/// Returns what encrypts connections as `tls` wants it, and the record of its handshake.
pub(crate) async fn connector(tls: Tls, files: &TlsFiles) -> Result<(MakeRustlsConnect, Arc<Handshake>), LockError> {
    let verify = match tls {
        Tls::VerifyFull => Verify::Full,
        Tls::VerifyCa => Verify::Authority,
        // As in libpq, authorities that are named count in each mode.
        _ if files.ca.is_some() => Verify::Authority,
        _ => Verify::Nothing,
    };
    let (config, handshake) = client_config(files, verify).await?;
    Ok((MakeRustlsConnect::new(config), handshake))
}
