//! A Redis Cluster.

use std::time::Duration;

use anyhow::{Context as _, Result};
use futures_util::future::try_join_all;

use crate::kind::{Kind, Role};
use crate::machine::{Data, free_port};
use crate::redis::{eventually, until};
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
    ports: Vec<Ports>,
}

/// How the other nodes reach a node.
#[derive(Clone, Copy, Debug)]
struct Ports {
    bus: u16,
    /// Where it listens for TLS, if that is how the nodes talk to each other.
    tls: Option<u16>,
}

impl RedisCluster {
    /// Starts that many nodes of that kind, with further arguments for each, and waits until all slots are served. A node stays a
    /// primary however long it does not answer. With `--tls-cluster`, each has a [port for TLS](Self::tls_port), too.
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
        let has_tls = arguments.contains(&"--tls-cluster");
        let ports = |_| -> Result<Ports> {
            Ok(Ports {
                bus: free_port()?,
                tls: if has_tls { Some(free_port()?) } else { None },
            })
        };
        let ports: Vec<_> = (0..nodes).map(ports).collect::<Result<_>>()?;
        let node_timeout = &node_timeout.as_millis().to_string();
        let starting = ports.iter().map(async |ports| {
            let (bus, tls) = (ports.bus.to_string(), ports.tls.unwrap_or_default().to_string());
            let own = [
                ["--cluster-enabled", "yes"],
                ["--cluster-port", &bus],
                ["--cluster-node-timeout", node_timeout],
                // Each primary keeps its replica.
                ["--cluster-allow-replica-migration", "no"],
                // A replica may take the place of its primary however long it has not heard from it.
                ["--cluster-replica-validity-factor", "0"],
                ["--repl-diskless-sync-delay", "0"],
                ["--tls-port", &tls],
            ];
            // A server that was built without TLS does not know that port.
            let own = if has_tls { &own[..] } else { &own[..own.len() - 1] };
            Server::start_as(kind.with(Role::RedisPeer), &[&own.concat(), arguments].concat()).await
        });
        let nodes = try_join_all(starting).await?;
        let cluster = Self {
            nodes,
            primaries,
            ports,
        };
        cluster.form().await?;
        Ok(cluster)
    }

    /// The nodes.
    #[must_use]
    pub fn nodes(&self) -> &[Server] {
        &self.nodes
    }

    /// Where a node listens for TLS, 0 if it does not.
    #[must_use]
    pub fn tls_port(&self, node: usize) -> u16 {
        self.ports[node].tls.unwrap_or_default()
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
            node.redis(&format!("CLUSTER ADDSLOTSRANGE {first} {last}")).await?;
            // Before they meet, so that they need not settle which is which.
            node.redis(&format!("CLUSTER SET-CONFIG-EPOCH {}", at + 1)).await?;
        }
        for (node, ports) in self.nodes.iter().zip(&self.ports).skip(1) {
            let (host, port) = node.authority().split_once(':').unwrap_or_default();
            let port = ports.tls.map_or(port.to_owned(), |port| port.to_string());
            let meet = format!("CLUSTER MEET {host} {port} {}", ports.bus);
            self.nodes[0].redis(&meet).await?;
        }
        self.until_served().await?;
        for (primary, replica) in primaries.iter().zip(replicas) {
            let id = primary.redis("CLUSTER MYID").await?;
            until(replica, "CLUSTER NODES", &[&id]).await?;
            replica.redis(&format!("CLUSTER REPLICATE {id}")).await?;
            until(primary, "INFO replication", &["state=online"]).await?;
        }
        for (primary, replica) in primaries.iter().zip(replicas) {
            // All others must know it, too.
            let (of, own) = (
                primary.redis("CLUSTER MYID").await?,
                replica.redis("CLUSTER MYID").await?,
            );
            for node in &self.nodes {
                eventually("a replica is known", || async {
                    let nodes = node.redis("CLUSTER NODES").await?;
                    let is_known = |line: &str| line.starts_with(&own) && line.contains(&format!("slave {of}"));
                    Ok(nodes.lines().any(is_known))
                })
                .await?;
            }
        }
        Ok(())
    }

    /// Waits until every node says that all slots are served.
    ///
    /// # Errors
    ///
    /// If that takes too long.
    pub async fn until_served(&self) -> Result<()> {
        let known = format!("cluster_known_nodes:{}", self.nodes.len());
        let served = format!("cluster_slots_ok:{SLOTS}");
        for node in &self.nodes {
            until(node, "CLUSTER INFO", &["cluster_state:ok", &known, &served]).await?;
        }
        Ok(())
    }

    /// The numbers of the nodes that say they are primaries with slots.
    ///
    /// # Errors
    ///
    /// If none does.
    pub async fn primaries(&self) -> Result<Vec<usize>> {
        let mut primaries = Vec::new();
        for (number, node) in self.nodes.iter().enumerate() {
            let own = own_line(node).await.unwrap_or_default();
            let has_slots = own.split(' ').nth(8).is_some();
            primaries.extend((own.contains("master") && has_slots).then_some(number));
        }
        primaries.first().context("no node serves slots")?;
        Ok(primaries)
    }

    /// The slot of a key, and the number of the node that says it serves that.
    ///
    /// # Errors
    ///
    /// If none does.
    pub async fn place(&self, key: &str) -> Result<(u16, usize)> {
        let slot: u16 = self.nodes[0].redis(&format!("CLUSTER KEYSLOT {key}")).await?.parse()?;
        for at in self.primaries().await? {
            let own = own_line(&self.nodes[at]).await?;
            let serves = |range: &str| {
                let (first, last) = range.split_once('-').unwrap_or((range, range));
                let (first, last): (u16, u16) = (first.parse().unwrap_or(u16::MAX), last.parse().unwrap_or(0));
                (first..=last).contains(&slot)
            };
            if own.split(' ').skip(8).any(serves) {
                return Ok((slot, at));
            }
        }
        Err(anyhow::anyhow!("no node serves slot {slot}"))
    }

    /// Begins to move a slot.
    ///
    /// # Errors
    ///
    /// If a node refuses.
    pub async fn open_slot(&self, slot: u16, from: usize, to: usize) -> Result<()> {
        let (from, to) = (&self.nodes[from], &self.nodes[to]);
        let (source, target) = (from.redis("CLUSTER MYID").await?, to.redis("CLUSTER MYID").await?);
        to.redis(&format!("CLUSTER SETSLOT {slot} IMPORTING {source}")).await?;
        from.redis(&format!("CLUSTER SETSLOT {slot} MIGRATING {target}"))
            .await?;
        Ok(())
    }

    /// Moves the keys in a slot, one after the other with that pause between them, and returns how many there were.
    ///
    /// # Errors
    ///
    /// If a node refuses.
    pub async fn move_keys(&self, slot: u16, from: usize, to: usize, pause: Duration) -> Result<usize> {
        let (from, to) = (&self.nodes[from], self.nodes[to].authority().replacen(':', " ", 1));
        for moved in 0.. {
            let key = from.redis(&format!("CLUSTER GETKEYSINSLOT {slot} 1")).await?;
            if key.is_empty() {
                return Ok(moved);
            }
            from.redis(&format!("MIGRATE {to} {key} 0 5000")).await?;
            tokio::time::sleep(pause).await;
        }
        Ok(0)
    }

    /// Tells a node that a slot belongs to another one from now on. The one that the slot has moved to is told first.
    ///
    /// # Errors
    ///
    /// If the node refuses.
    pub async fn give_slot(&self, slot: u16, told: usize, to: usize) -> Result<()> {
        let id = self.nodes[to].redis("CLUSTER MYID").await?;
        let give = format!("CLUSTER SETSLOT {slot} NODE {id}");
        self.nodes[told].redis(&give).await.map(drop)
    }

    /// Moves a slot with its keys, with that pause between the steps.
    ///
    /// # Errors
    ///
    /// If a node refuses.
    pub async fn move_slot(&self, slot: u16, from: usize, to: usize, pause: Duration) -> Result<()> {
        self.open_slot(slot, from, to).await?;
        tokio::time::sleep(pause).await;
        self.move_keys(slot, from, to, pause).await?;
        self.give_slot(slot, to, to).await?;
        self.give_slot(slot, from, to).await
    }

    /// Has the replica of a primary take its place.
    ///
    /// # Errors
    ///
    /// If it has none that can.
    pub async fn fail_over(&self, primary: usize) -> Result<()> {
        let id = self.nodes[primary].redis("CLUSTER MYID").await?;
        for node in &self.nodes {
            if own_line(node).await?.contains(&format!("slave {id}")) {
                return node.redis("CLUSTER FAILOVER").await.map(drop);
            }
        }
        Err(anyhow::anyhow!("the primary has no replica"))
    }
}

/// What a node says of itself.
async fn own_line(node: &Server) -> Result<String> {
    let nodes = node.redis("CLUSTER NODES").await?;
    let own = nodes.lines().find(|line| line.contains("myself"));
    Ok(own.unwrap_or_default().to_owned())
}
