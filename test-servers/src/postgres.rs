//! PostgreSQL.

use anyhow::{Context as _, Result, bail};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::kind::Place;

pub(crate) fn arguments(place: Place<'_>) -> Vec<String> {
    let (port, data) = (place.port.to_string(), place.data);
    let mut words = vec!["-p", &port];
    if !place.contained {
        words.extend(["-D", data, "-k", data, "-c", "listen_addresses=127.0.0.1"]);
        // As it is with segments of the usual size.
        words.extend(["-c", "max_wal_size=1GB"]);
    }
    words.into_iter().map(str::to_owned).collect()
}

/// Logs in without a password, as far as to where the server tells its version and that it is ready.
pub(crate) async fn probe(authority: &str) -> Result<String> {
    const PROTOCOL: i32 = 3 << 16;
    let mut connection = TcpStream::connect(authority).await?;
    let parameters = b"user\0postgres\0database\0postgres\0\0";
    connection.write_i32(i32::try_from(8 + parameters.len())?).await?;
    connection.write_i32(PROTOCOL).await?;
    connection.write_all(parameters).await?;
    let mut version = None;
    loop {
        let kind = connection.read_u8().await?;
        let length = connection.read_i32().await?;
        let mut body = vec![0; usize::try_from(length - 4)?];
        connection.read_exact(&mut body).await?;
        let texts: Vec<_> = body.split(|byte| *byte == 0).map(String::from_utf8_lossy).collect();
        match (kind, &texts[..]) {
            (b'S', [key, value, ..]) if key == "server_version" => version = Some(value.to_string()),
            (b'Z', _) => {
                // Else it would count as a client that was lost.
                connection.write_all(b"X\0\0\0\x04").await?;
                let version = version.context("it does not tell its version")?;
                return Ok(format!("PostgreSQL {version}"));
            }
            (b'E', _) => bail!(texts.join(" ")),
            _ => {}
        }
    }
}
