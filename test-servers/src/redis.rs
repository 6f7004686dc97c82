//! Redis and what is like it.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

use crate::kind::Place;
use crate::server::Server;

/// For how long servers may take to agree with each other.
const LONGEST: Duration = Duration::from_secs(60);

/// Whether it is a replica or a node of a cluster is said by further arguments.
pub(crate) fn arguments(place: Place<'_>, bind: &str) -> Vec<String> {
    let port = place.port.to_string();
    let words = [
        // A killed server has lost nothing that it acknowledged, and no test waits for the disk: what was handed to the
        // system outlives the process.
        ["--appendonly", "yes"],
        ["--appendfsync", "no"],
        ["--save", ""],
        ["--dir", place.data],
        ["--port", &port],
        ["--bind", bind],
        ["--protected-mode", "no"],
    ];
    words.concat().into_iter().map(str::to_owned).collect()
}

/// The command of a sentinel. The lines of its configuration are further arguments; it writes to that file, and keeps what it has
/// written there when it is started again.
pub(crate) fn sentinel(program: &str, place: Place<'_>) -> Vec<String> {
    const SCRIPT: &str = r#"file=$1 program=$2 port=$3
shift 3
[ -s "$file" ] || printf '%s\n' "$@" >"$file"
exec "$program" "$file" --sentinel --port "$port" --bind 127.0.0.1"#;
    let file = format!("{}/sentinel.conf", place.data);
    let port = place.port.to_string();
    let words = ["sh", "-c", SCRIPT, "sh", &file, program, &port];
    words.map(str::to_owned).to_vec()
}

/// Asks the server, with spaces between the words of the command. Returns its reply as text: of an array, a line for each element.
pub(crate) async fn command(server: &Server, command: &str) -> Result<String> {
    let mut connection = BufReader::new(TcpStream::connect(server.authority()).await?);
    let answer = ask(&mut connection, command).await;
    answer.with_context(|| format!("{command} at {server}"))
}

/// Waits until the answer of the server has all these words.
pub(crate) async fn until(server: &Server, question: &str, words: &[&str]) -> Result<()> {
    let what = format!("{words:?} in the answer of {server} to {question}");
    let has_all = || async {
        let answer = command(server, question).await?;
        Ok(words.iter().all(|word| answer.contains(word)))
    };
    eventually(&what, has_all).await
}

/// Waits until it is so. A server that does not answer is asked again.
pub(crate) async fn eventually<F>(what: &str, mut is_so: impl FnMut() -> F) -> Result<()>
where
    F: Future<Output = Result<bool>>,
{
    let start = Instant::now();
    loop {
        let answer = is_so().await;
        if matches!(answer, Ok(true)) {
            return Ok(());
        }
        if start.elapsed() > LONGEST {
            bail!("waited in vain until {what}: {answer:?}");
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// The version. A server that loads its data does not count as ready.
pub(crate) async fn probe(authority: &str, user_info: Option<&str>, has_data: bool) -> Result<String> {
    let mut connection = BufReader::new(TcpStream::connect(authority).await?);
    if let Some(user_info) = user_info {
        let (user, password) = user_info.split_once(':').unwrap_or((user_info, ""));
        let user = if user.is_empty() { "default" } else { user };
        ask(&mut connection, &format!("AUTH {user} {password}")).await?;
    }
    if has_data {
        // Refused while the data is being loaded.
        ask(&mut connection, "DBSIZE").await?;
    }
    let info = ask(&mut connection, "INFO server").await?;
    let version = |key| info.lines().find_map(|line| line.strip_prefix(key));
    // Valkey tells both.
    let valkey = version("valkey_version:").map(|version| format!("Valkey {version}"));
    let redis = || version("redis_version:").map(|version| format!("Redis {version}"));
    valkey.or_else(redis).context("it does not tell its version")
}

/// Asks, and reads the reply.
async fn ask(connection: &mut BufReader<TcpStream>, command: &str) -> Result<String> {
    let request = format!("{command}\r\n");
    connection.get_mut().write_all(request.as_bytes()).await?;
    let (mut elements, mut left) = (Vec::new(), 1);
    while left > 0 {
        left -= 1;
        let mut line = String::new();
        connection.read_line(&mut line).await?;
        match line.trim_end().split_at_checked(1) {
            Some(("$", "-1")) => elements.push(String::new()),
            Some(("$", length)) => {
                let mut text = vec![0; length.parse::<usize>()? + 2];
                connection.read_exact(&mut text).await?;
                elements.push(String::from_utf8_lossy(&text).replace('\r', ""));
            }
            Some(("*", count)) => left += count.parse::<usize>().unwrap_or(0),
            Some(("+" | ":", answer)) => elements.push(answer.to_owned()),
            Some(("-", error)) => bail!(error.to_owned()),
            _ => bail!("it does not answer as Redis does: {line:?}"),
        }
    }
    let trimmed: Vec<_> = elements.iter().map(|element| element.trim_end_matches('\n')).collect();
    Ok(trimmed.join("\n"))
}
