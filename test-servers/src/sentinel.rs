//! A Redis with replicas, watched by sentinels.

use std::time::Duration;

use anyhow::Result;
use futures_util::future::try_join_all;

use crate::kind::{Kind, Role};
use crate::redis;
use crate::server::Server;

/// A Redis or Valkey with replicas, and the sentinels that watch it, on the loopback of this machine. They end, with their data, when this is
/// dropped.
///
/// Each is a [`Server`] as others are, except that its container, if it is in one, shares the network of this machine.
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
    /// Those of [`Server::start_own`], or if they do not come to know each other.
    pub async fn start(
        kind: &'static Kind,
        replicas: usize,
        sentinels: usize,
        down_after: Duration,
        arguments: &[&str],
    ) -> Result<Self> {
        let peer = kind.with(Role::RedisPeer);
        // A replica is synchronized as soon as it comes.
        let arguments = [&["--repl-diskless-sync-delay", "0"], arguments].concat();
        let primary = Server::start_as(peer, &arguments).await?;
        let (host, port) = primary.authority().rsplit_once(':').unwrap_or_default();
        let of = [&["--replicaof", host, port], &*arguments].concat();
        let replicas = try_join_all((0..replicas).map(|_| Server::start_as(peer, &of))).await?;
        let (service, millis) = (Self::SERVICE, down_after.as_millis());
        let lines = [
            format!("sentinel monitor {service} {host} {port} {}", sentinels / 2 + 1),
            format!("sentinel down-after-milliseconds {service} {millis}"),
            // After twice that time the sentinels may replace the next primary.
            format!("sentinel failover-timeout {service} {millis}"),
        ];
        let lines: Vec<_> = lines.iter().map(String::as_str).collect();
        let watching = (0..sentinels).map(|_| Server::start_as(kind.with(Role::RedisSentinel), &lines));
        let sentinels = try_join_all(watching).await?;
        // A failover needs all replicas and sentinels.
        for replica in &replicas {
            redis::until(replica, "INFO replication", &["master_link_status:up"]).await?;
        }
        let known = format!("slaves={},sentinels={}\n", replicas.len(), sentinels.len());
        for sentinel in &sentinels {
            redis::until(sentinel, "INFO sentinel", &[&known]).await?;
        }
        let servers = [primary].into_iter().chain(replicas).collect();
        Ok(Self { servers, sentinels })
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
}
