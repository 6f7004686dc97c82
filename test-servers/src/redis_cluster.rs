//! A Redis Cluster.

use std::time::Duration;

use anyhow::Result;
use futures_util::future::try_join_all;

use crate::kind::{Kind, Role};
use crate::machine::{Data, free_port};
use crate::redis::{command, until};
use crate::server::Server;

const SLOTS: usize = 16384;

/// Primaries of a Redis Cluster with an equal part of the slots each, and a replica for each if that is wanted, on the loopback of this
/// machine. They end, with their data, when this is dropped.
///
/// Each node is a [`Server`] as others are, except that its container, if it is in one, shares the network of this machine.
#[derive(Debug)]
pub struct RedisCluster {
    /// The primaries, then their replicas in the same order, as they were started.
    nodes: Vec<Server>,
    primaries: usize,
    /// The ports on which the nodes talk to each other.
    bus: Vec<u16>,
}

impl RedisCluster {
    /// Starts that many nodes of that kind, with further arguments for each, and waits until all slots are served. A node stays a
    /// primary however long it does not answer.
    ///
    /// # Errors
    ///
    /// Those of [`Server::start_own`], or if they do not agree on who serves what.
    pub async fn start(kind: &'static Kind, primaries: usize, arguments: &[&str]) -> Result<Self> {
        // A node that is stopped for a while must not be taken for failed: nothing is there to take its place.
        Self::start_nodes(*kind, primaries, primaries, Duration::from_secs(600), arguments).await
    }

    /// The same with a replica for each primary, which takes its place when it has not answered for `node_timeout`.
    ///
    /// # Errors
    ///
    /// As [`start`](Self::start).
    pub async fn start_replicated(
        kind: &'static Kind,
        primaries: usize,
        node_timeout: Duration,
        arguments: &[&str],
    ) -> Result<Self> {
        Self::start_nodes(*kind, primaries, 2 * primaries, node_timeout, arguments).await
    }

    async fn start_nodes(
        kind: Kind,
        primaries: usize,
        nodes: usize,
        node_timeout: Duration,
        arguments: &[&str],
    ) -> Result<Self> {
        let bus: Vec<_> = (0..nodes).map(|_| free_port()).collect::<Result<_>>()?;
        let node_timeout = &node_timeout.as_millis().to_string();
        let starting = bus.iter().map(async |bus| {
            let bus = bus.to_string();
            let own = [
                ["--cluster-enabled", "yes"],
                ["--cluster-port", &bus],
                ["--cluster-node-timeout", node_timeout],
                // Each primary keeps its replica.
                ["--cluster-allow-replica-migration", "no"],
                // A replica may take the place of its primary however long it has not heard from it.
                ["--cluster-replica-validity-factor", "0"],
                ["--repl-diskless-sync-delay", "0"],
            ];
            Server::start_as(kind.with(Role::RedisPeer), &[&own.concat(), arguments].concat()).await
        });
        let nodes = try_join_all(starting).await?;
        let cluster = Self { nodes, primaries, bus };
        cluster.form().await?;
        Ok(cluster)
    }

    /// The nodes.
    #[must_use]
    pub fn nodes(&self) -> &[Server] {
        &self.nodes
    }

    /// Ends all nodes at once, and starts them again with that data.
    ///
    /// # Errors
    ///
    /// Those of [`Server::restart`], or if they do not agree on who serves what.
    pub async fn restart(&self, data: Data) -> Result<()> {
        try_join_all(self.nodes.iter().map(|node| node.restart(data))).await?;
        match data {
            Data::Lost => self.form().await,
            Data::Kept | Data::Copied => self.until_served().await,
        }
    }

    /// Makes a cluster of nodes that do not know each other.
    async fn form(&self) -> Result<()> {
        let (primaries, replicas) = self.nodes.split_at(self.primaries);
        for (at, node) in primaries.iter().enumerate() {
            let bound = |part: usize| part * SLOTS / primaries.len();
            let (first, last) = (bound(at), bound(at + 1) - 1);
            command(node, &format!("CLUSTER ADDSLOTSRANGE {first} {last}")).await?;
            // Before they meet, so that they need not settle which is which.
            command(node, &format!("CLUSTER SET-CONFIG-EPOCH {}", at + 1)).await?;
        }
        for (node, bus) in self.nodes.iter().zip(&self.bus).skip(1) {
            let place = node.authority().replacen(':', " ", 1);
            command(&self.nodes[0], &format!("CLUSTER MEET {place} {bus}")).await?;
        }
        self.until_served().await?;
        for (primary, replica) in primaries.iter().zip(replicas) {
            let id = command(primary, "CLUSTER MYID").await?;
            let id = id.trim_end();
            until(replica, "CLUSTER NODES", &[id]).await?;
            command(replica, &format!("CLUSTER REPLICATE {id}")).await?;
            until(primary, "INFO replication", &["state=online"]).await?;
        }
        Ok(())
    }

    /// Waits until every node says that all slots are served.
    async fn until_served(&self) -> Result<()> {
        let known = format!("cluster_known_nodes:{}", self.nodes.len());
        let served = format!("cluster_slots_ok:{SLOTS}");
        for node in &self.nodes {
            until(node, "CLUSTER INFO", &["cluster_state:ok", &known, &served]).await?;
        }
        Ok(())
    }
}
