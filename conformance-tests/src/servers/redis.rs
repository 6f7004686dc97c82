//! Redis and what is like it.

use std::io;
use std::time::{Duration, Instant};

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

use super::error::ServerError;
use super::kind::Place;
use super::server::Server;

/// For how long servers may take to agree with each other.
const PATIENCE: Duration = Duration::from_secs(60);

pub(super) fn arguments(place: Place<'_>) -> Vec<String> {
    arguments_at(place, if place.contained { "0.0.0.0" } else { "127.0.0.1" })
}

/// Whether it is a replica or a node of a cluster is said by the caller that starts it.
pub(super) fn peer_arguments(place: Place<'_>) -> Vec<String> {
    arguments_at(place, "127.0.0.1")
}

/// The command of a sentinel. The lines of its configuration are further arguments; it writes to that file, and keeps what it has
/// written there when it is started again.
pub(super) fn sentinel(program: &str, place: Place<'_>) -> Vec<String> {
    const SCRIPT: &str = r#"file=$1 program=$2 port=$3
shift 3
[ -s "$file" ] || printf '%s\n' "$@" >"$file"
exec "$program" "$file" --sentinel --port "$port" --bind 127.0.0.1"#;
    let file = format!("{}/sentinel.conf", place.data);
    let port = place.port.to_string();
    ["sh", "-c", SCRIPT, "sh", &file, program, &port]
        .map(str::to_owned)
        .to_vec()
}

fn arguments_at(place: Place<'_>, bind: &str) -> Vec<String> {
    let port = place.port.to_string();
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

/// Asks the server there, and returns its reply, which must be one line or one text.
pub(super) async fn command(authority: &str, command: &str) -> io::Result<String> {
    let mut connection = BufReader::new(TcpStream::connect(authority).await?);
    ask(&mut connection, command).await
}

/// Waits until the answer of the server has all these words.
pub(super) async fn until(server: &Server, question: &str, words: &[&str]) -> Result<(), ServerError> {
    let start = Instant::now();
    loop {
        let answer = command(server.authority(), question).await;
        if matches!(&answer, Ok(answer) if words.iter().all(|word| answer.contains(word))) {
            return Ok(());
        }
        if start.elapsed() > PATIENCE {
            let error = io::Error::other(format!("no {words:?} in the answer to {question}: {answer:?}"));
            return Err(ServerError::system("waiting for servers that belong together")(error));
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
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
    version(&mut connection).await
}

/// It has no data.
pub(super) async fn probe_sentinel(authority: &str) -> io::Result<String> {
    let mut connection = BufReader::new(TcpStream::connect(authority).await?);
    version(&mut connection).await
}

async fn version(connection: &mut BufReader<TcpStream>) -> io::Result<String> {
    let info = ask(connection, "INFO server").await?;
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
