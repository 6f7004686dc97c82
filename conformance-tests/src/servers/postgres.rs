//! PostgreSQL.

use std::io;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::kind::Place;

pub(super) fn arguments(place: Place<'_>) -> Vec<String> {
    let mut arguments = vec!["-p".to_owned(), place.port.to_string()];
    if !place.contained {
        let data = place.data;
        arguments.extend(["-D".to_owned(), data.to_owned(), "-k".to_owned(), data.to_owned()]);
        // A chroot has no /dev/shm.
        for setting in ["listen_addresses=127.0.0.1", "dynamic_shared_memory_type=mmap"] {
            arguments.extend(["-c".to_owned(), setting.to_owned()]);
        }
    }
    arguments
}

pub(super) fn preparation(data: &str) -> Vec<String> {
    [
        "initdb",
        "--auth=trust",
        "--username=postgres",
        "--no-sync",
        "--pgdata",
        data,
    ]
    .map(str::to_owned)
    .to_vec()
}

/// Logs in without a password, as far as to where the server tells its version and that it is ready.
pub(super) async fn probe(authority: &str) -> io::Result<String> {
    const PROTOCOL: i32 = 3 << 16;
    let mut connection = TcpStream::connect(authority).await?;
    let parameters = b"user\0postgres\0database\0postgres\0\0";
    let length = i32::try_from(8 + parameters.len()).map_err(io::Error::other)?;
    connection.write_i32(length).await?;
    connection.write_i32(PROTOCOL).await?;
    connection.write_all(parameters).await?;
    let mut version = None;
    loop {
        let kind = connection.read_u8().await?;
        let length = connection.read_i32().await?;
        let mut body = vec![0; usize::try_from(length - 4).map_err(io::Error::other)?];
        connection.read_exact(&mut body).await?;
        let texts: Vec<_> = body.split(|byte| *byte == 0).map(String::from_utf8_lossy).collect();
        match (kind, &texts[..]) {
            (b'S', [key, value, ..]) if key == "server_version" => version = Some(value.to_string()),
            (b'Z', _) => {
                // Else it would count as a client that was lost.
                connection.write_all(b"X\0\0\0\x04").await?;
                let version = version.ok_or_else(|| io::Error::other("it does not tell its version"))?;
                return Ok(format!("PostgreSQL {version}"));
            }
            (b'E', _) => return Err(io::Error::other(texts.join(" "))),
            _ => {}
        }
    }
}
