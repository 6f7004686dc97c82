//! Redis and what is like it.

use std::io;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

use super::kind::Place;

pub(super) fn arguments(place: Place<'_>) -> Vec<String> {
    let port = place.port.to_string();
    let bind = if place.contained { "0.0.0.0" } else { "127.0.0.1" };
    [
        // A killed server has lost nothing that it acknowledged, and no test waits for the disk: what was handed to the
        // system outlives the process.
        ["--appendonly", "yes"],
        ["--appendfsync", "no"],
        ["--save", ""],
        ["--dir", place.data],
        ["--port", &port],
        ["--bind", bind],
        ["--protected-mode", "no"],
    ]
    .concat()
    .into_iter()
    .map(str::to_owned)
    .collect()
}

pub(super) async fn probe(authority: &str, user_info: Option<&str>) -> io::Result<String> {
    let mut connection = BufReader::new(TcpStream::connect(authority).await?);
    if let Some(user_info) = user_info {
        let (user, password) = user_info.split_once(':').unwrap_or((user_info, ""));
        let user = if user.is_empty() { "default" } else { user };
        ask(&mut connection, &format!("AUTH {user} {password}")).await?;
    }
    // Refused while the data is being loaded.
    ask(&mut connection, "DBSIZE").await?;
    let info = ask(&mut connection, "INFO server").await?;
    let version = |key| info.lines().find_map(|line| line.strip_prefix(key));
    // Valkey tells both.
    let version = version("valkey_version:")
        .map(|version| format!("Valkey {version}"))
        .or_else(|| version("redis_version:").map(|version| format!("Redis {version}")));
    version.ok_or_else(|| io::Error::other("it does not tell its version"))
}

/// Asks, and reads a reply of one line or one text.
async fn ask(connection: &mut BufReader<TcpStream>, command: &str) -> io::Result<String> {
    connection
        .get_mut()
        .write_all(format!("{command}\r\n").as_bytes())
        .await?;
    let mut line = String::new();
    connection.read_line(&mut line).await?;
    match line.trim_end().split_at_checked(1) {
        Some(("$", length)) => {
            let length: usize = length.parse().map_err(io::Error::other)?;
            let mut text = vec![0; length + 2];
            connection.read_exact(&mut text).await?;
            Ok(String::from_utf8_lossy(&text).replace('\r', ""))
        }
        Some(("+" | ":", answer)) => Ok(answer.to_owned()),
        Some(("-", error)) => Err(io::Error::other(error.to_owned())),
        _ => Err(io::Error::other(format!("it does not answer as Redis does: {line:?}"))),
    }
}
