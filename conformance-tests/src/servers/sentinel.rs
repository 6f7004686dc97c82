//! A Redis with replicas, watched by sentinels.

use std::time::{Duration, Instant};

use futures_util::future::try_join_all;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

use super::error::ServerError;
use super::kind::Kind;
use super::redis;
use super::server::Server;

/// How long is waited until the sentinels know all servers and each other.
const PATIENCE: Duration = Duration::from_secs(60);

/// A Redis or Valkey with replicas, and the sentinels that watch it, on the loopback of this machine. They end, with their data, when this is
/// dropped.
///
/// Each is a [`Server`] as others are, except that its container, if it is in one, shares the network of this machine and cannot be
/// taken off it.
#[derive(Debug)]
pub struct RedisSentinels {
    servers: Vec<Server>,
    sentinels: Vec<Server>,
}

impl RedisSentinels {
    /// What the sentinels call the service.
    pub const SERVICE: &str = "fencelock-tests";

    /// Starts a primary of that kind with so many replicas and so many sentinels, with further arguments for each server, and waits until all know
    /// each other. The sentinels replace a primary that has not answered for `down_after`.
    ///
    /// # Errors
    ///
    /// Those of [`Server::start_own`].
    pub async fn start(
        kind: &'static Kind,
        replicas: usize,
        sentinels: usize,
        down_after: Duration,
        arguments: &[&str],
    ) -> Result<Self, ServerError> {
        // A replica is synchronized as soon as it comes.
        let arguments = [&["--repl-diskless-sync-delay", "0"], arguments].concat();
        let primary = Server::start_own(kind.peer(), &arguments).await?;
        let (host, port) = primary.authority().rsplit_once(':').unwrap_or(("", ""));
        let of = [&["--replicaof", host, port], &*arguments].concat();
        let replicas = (0..replicas).map(|_| Server::start_own(kind.peer(), &of));
        let service = Self::SERVICE;
        let quorum = sentinels / 2 + 1;
        let lines = [
            format!("sentinel monitor {service} {host} {port} {quorum}"),
            format!("sentinel down-after-milliseconds {service} {}", down_after.as_millis()),
            // After twice that time the sentinels may replace the next primary.
            format!("sentinel failover-timeout {service} {}", down_after.as_millis()),
        ];
        let lines: Vec<_> = lines.iter().map(String::as_str).collect();
        let replicas = try_join_all(replicas).await?;
        let sentinels = (0..sentinels).map(|_| Server::start_own(kind.sentinel(), &lines));
        let sentinels = try_join_all(sentinels).await?;
        let servers = [primary].into_iter().chain(replicas).collect();
        let started = Self { servers, sentinels };
        started.until_ready().await?;
        Ok(started)
    }

    /// The server that was started as the primary, and then its replicas.
    #[must_use]
    pub fn servers(&self) -> &[Server] {
        &self.servers
    }

    /// The sentinels.
    #[must_use]
    pub fn sentinels(&self) -> &[Server] {
        &self.sentinels
    }

    /// How a client connects to the primary.
    #[must_use]
    pub fn url(&self) -> String {
        let hosts: Vec<_> = self.sentinels.iter().map(Server::authority).collect();
        format!("redis+sentinel://{}/{}", hosts.join(","), Self::SERVICE)
    }

    /// Waits until the replicas have the data of the primary, and every sentinel knows the others and the replicas. A failover needs all
    /// of them.
    async fn until_ready(&self) -> Result<(), ServerError> {
        for replica in &self.servers[1..] {
            redis::until(replica, "INFO replication", &["master_link_status:up"]).await?;
        }
        let wanted = [
            ("num-slaves", self.servers.len() - 1),
            ("num-other-sentinels", self.sentinels.len() - 1),
        ];
        let start = Instant::now();
        for sentinel in &self.sentinels {
            loop {
                let known = state(sentinel.authority()).await;
                let is_known = |(field, number): (&str, usize)| {
                    let known = known.as_ref().ok().and_then(|known| value(known, field));
                    known.is_some_and(|known| known == number.to_string())
                };
                if wanted.into_iter().all(is_known) {
                    break;
                }
                if start.elapsed() > PATIENCE {
                    return Err(ServerError::NotReady {
                        server: sentinel.to_string(),
                        waited: start.elapsed(),
                        last: format!("{known:?}"),
                        log: String::new(),
                    });
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
        Ok(())
    }
}

/// What the sentinel knows of the primary: names and values in turn.
async fn state(authority: &str) -> std::io::Result<Vec<String>> {
    let mut connection = BufReader::new(TcpStream::connect(authority).await?);
    let question = format!("SENTINEL MASTER {}\r\n", RedisSentinels::SERVICE);
    connection.get_mut().write_all(question.as_bytes()).await?;
    let mut line = String::new();
    connection.read_line(&mut line).await?;
    let length: usize = line
        .trim_end()
        .trim_start_matches('*')
        .parse()
        .map_err(std::io::Error::other)?;
    let mut words = Vec::new();
    for _ in 0..length {
        // The length of the word, and the word, which has no line break.
        line.clear();
        connection.read_line(&mut line).await?;
        line.clear();
        connection.read_line(&mut line).await?;
        words.push(line.trim_end().to_owned());
    }
    Ok(words)
}

fn value<'a>(state: &'a [String], field: &str) -> Option<&'a str> {
    let at = state.iter().position(|word| word == field)?;
    state.get(at + 1).map(String::as_str)
}
