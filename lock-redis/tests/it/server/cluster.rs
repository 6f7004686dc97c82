//! A Redis Cluster of a test's own.

use std::net::TcpListener;

use lock_redis::redis::{self, Cmd, FromRedisValue};
use lock_redis::{RedisConfig, RedisLock};

#[cfg(feature = "tls")]
use super::Certificate;
use super::{HANG_LIMIT, Server, until};

/// For how long a node must be silent before the others take it for failed.
pub(crate) const NODE_TIMEOUT: &str = "1000";

/// Primaries with an equal part of the slots each, and a replica of each behind them.
pub(crate) struct Cluster {
    pub(crate) nodes: Vec<Server>,
    /// How the nodes reach each other.
    ports: Vec<Ports>,
}

#[derive(Clone, Copy)]
struct Ports {
    /// For clients by TLS, if that is how clients and nodes talk.
    tls: Option<u16>,
    bus: u16,
}

impl Cluster {
    /// Three primaries with a replica each, which know each other and serve all slots.
    pub(crate) async fn start() -> Self {
        Self::with(3, true, &[]).await
    }

    /// That many primaries, with a replica each if `replicated`, and further arguments of each node.
    pub(crate) async fn with(primaries: usize, replicated: bool, arguments: &[&str]) -> Self {
        let mut cluster = Self {
            nodes: Vec::new(),
            ports: Vec::new(),
        };
        for _ in 0..primaries * (1 + usize::from(replicated)) {
            cluster.start_node(arguments);
        }
        for other in 1..cluster.nodes.len() {
            cluster.meet(0, other).await;
        }
        for primary in 0..primaries {
            let bound = |part: usize| part * 16384 / primaries;
            let (first, last) = (bound(primary), bound(primary + 1) - 1);
            let _: () = cluster.nodes[primary]
                .command(&format!("CLUSTER ADDSLOTSRANGE {first} {last}"))
                .await;
        }
        cluster.until_known().await;
        for replica in primaries..cluster.nodes.len() {
            cluster.replicate(replica, replica - primaries).await;
        }
        cluster.until_known().await;
        cluster
    }

    /// Three primaries that clients reach by TLS as `localhost`, and their certificate.
    #[cfg(feature = "tls")]
    pub(crate) async fn secure() -> (Self, Certificate) {
        let certificate = Certificate::new(&[]);
        let files = certificate.files();
        let announced = [
            ["--tls-cluster", "yes"],
            ["--cluster-announce-hostname", "localhost"],
            ["--cluster-preferred-endpoint-type", "hostname"],
        ];
        let arguments: Vec<_> = announced
            .concat()
            .into_iter()
            .chain(files.iter().map(String::as_str))
            .collect();
        (Self::with(3, false, &arguments).await, certificate)
    }

    /// The port of a node for clients by TLS.
    #[cfg(feature = "tls")]
    pub(crate) fn tls_port(&self, node: usize) -> u16 {
        self.ports[node].tls.unwrap()
    }

    /// Starts a node that knows no other.
    pub(crate) fn start_node(&mut self, arguments: &[&str]) {
        // Between the look for a free port and the start another process may take it, and then the node does not start.
        let free = || TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let ports = Ports {
            tls: arguments.contains(&"--tls-cluster").then(free),
            bus: free(),
        };
        let (port, tls) = (ports.bus.to_string(), ports.tls.unwrap_or_default().to_string());
        let own = [
            "--cluster-enabled",
            "yes",
            "--cluster-port",
            &port,
            "--cluster-node-timeout",
            NODE_TIMEOUT,
            // A primary that has lost its last slot stays one.
            "--cluster-allow-replica-migration",
            "no",
            // So that a replica is promoted also if it has not been up to date for long.
            "--cluster-replica-validity-factor",
            "0",
            "--repl-diskless-sync-delay",
            "0",
        ];
        let tls: &[&str] = if ports.tls.is_some() {
            &["--tls-port", &tls]
        } else {
            &[]
        };
        self.nodes.push(Server::with(&[&own, tls, arguments].concat()));
        self.ports.push(ports);
    }

    /// Lets a node know of another one.
    pub(crate) async fn meet(&self, node: usize, other: usize) {
        let Ports { tls, bus } = self.ports[other];
        let port = tls.unwrap_or(self.nodes[other].port());
        let _: () = self.nodes[node]
            .command(&format!("CLUSTER MEET 127.0.0.1 {port} {bus}"))
            .await;
    }

    /// Makes a node a replica of a primary, and waits until it is up to date.
    pub(crate) async fn replicate(&self, replica: usize, primary: usize) {
        let id = self.id(primary).await;
        self.until_all_know(&id).await;
        let _: () = self.nodes[replica].command(&format!("CLUSTER REPLICATE {id}")).await;
        self.nodes[replica]
            .until_info("replication", "master_link_status:up")
            .await;
        // The others must know it, too.
        self.nodes[primary].until_info("replication", "state=online").await;
        let (own, of) = (self.id(replica).await, format!("slave {id}"));
        for node in &self.nodes {
            until("a replica is known", async || {
                let nodes: String = node.command("CLUSTER NODES").await;
                nodes.lines().any(|line| line.starts_with(&own) && line.contains(&of))
            })
            .await;
        }
    }

    /// Waits until the replica of a primary has all that was written so far.
    pub(crate) async fn until_replicated(&self, primary: usize) {
        until("the replica has it all", async || {
            let info: String = self.nodes[primary].command("INFO replication").await;
            let field = |name: &str| info.split(['\r', '\n', ',']).find_map(|field| field.strip_prefix(name));
            field("offset=").is_some_and(|offset| Some(offset) == field("master_repl_offset:"))
        })
        .await;
    }

    /// Waits until every node knows all of them, has the same slots, and says that the cluster is up.
    pub(crate) async fn until_known(&self) {
        for node in &self.nodes {
            until("the cluster is up", async || {
                let info: String = node.command("CLUSTER INFO").await;
                let nodes: String = node.command("CLUSTER NODES").await;
                let known = nodes.lines().filter(|line| !line.contains("handshake")).count();
                info.contains("cluster_state:ok")
                    && info.contains("cluster_slots_ok:16384")
                    && known == self.nodes.len()
            })
            .await;
        }
    }

    async fn until_all_know(&self, id: &str) {
        for node in &self.nodes {
            until("a node is known", async || {
                node.command::<String>("CLUSTER NODES").await.contains(id)
            })
            .await;
        }
    }

    pub(crate) async fn id(&self, node: usize) -> String {
        self.nodes[node].command("CLUSTER MYID").await
    }

    /// The slot of a name in the namespace `fencelock`.
    pub(crate) async fn slot(&self, name: &str) -> u16 {
        let key = format!("{{fencelock:{name}}}:lock");
        let mut question = redis::cmd("CLUSTER");
        self.nodes[0].ask(question.arg("KEYSLOT").arg(key)).await
    }

    /// Which node serves the slot, as all nodes say.
    pub(crate) async fn owner(&self, slot: u16) -> usize {
        for (at, node) in self.nodes.iter().enumerate() {
            let own = node.command::<String>("CLUSTER NODES").await;
            let myself = own.lines().find(|line| line.contains("myself")).unwrap_or_default();
            let serves = |range: &str| {
                let (first, last) = range.split_once('-').unwrap_or((range, range));
                let (first, last): (u16, u16) = (first.parse().unwrap_or(u16::MAX), last.parse().unwrap_or(0));
                (first..=last).contains(&slot)
            };
            if myself.contains("master") && myself.split(' ').skip(8).any(serves) {
                return at;
            }
        }
        panic!("no node serves slot {slot}");
    }

    /// The node of a name, by which commands about its keys go.
    pub(crate) async fn node_of(&self, name: &str) -> &Server {
        &self.nodes[self.owner(self.slot(name).await).await]
    }

    /// Begins to move a slot.
    pub(crate) async fn open_slot(&self, slot: u16, from: usize, to: usize) {
        let (source, target) = (self.id(from).await, self.id(to).await);
        let set = |node: usize, state: String| async move {
            let _: () = self.nodes[node]
                .command(&format!("CLUSTER SETSLOT {slot} {state}"))
                .await;
        };
        set(to, format!("IMPORTING {source}")).await;
        set(from, format!("MIGRATING {target}")).await;
    }

    /// Moves the keys in a slot, one after the other, and says how many there were.
    pub(crate) async fn move_keys(&self, slot: u16, from: usize, to: usize) -> usize {
        let mut moved = 0;
        loop {
            let keys: Vec<String> = self.nodes[from]
                .command(&format!("CLUSTER GETKEYSINSLOT {slot} 1"))
                .await;
            let Some(key) = keys.first() else { return moved };
            let mut migrate = redis::cmd("MIGRATE");
            migrate
                .arg("127.0.0.1")
                .arg(self.nodes[to].port())
                .arg(key)
                .arg(0)
                .arg(5000);
            let _: String = self.nodes[from].ask(&migrate).await;
            moved += 1;
        }
    }

    /// Ends the move of a slot, as `redis-cli` does: the target is told first.
    pub(crate) async fn close_slot(&self, slot: u16, from: usize, to: usize) {
        let id = self.id(to).await;
        for node in [to, from] {
            let _: () = self.nodes[node]
                .command(&format!("CLUSTER SETSLOT {slot} NODE {id}"))
                .await;
        }
    }

    /// Moves a slot with its keys.
    pub(crate) async fn move_slot(&self, slot: u16, from: usize, to: usize) {
        self.open_slot(slot, from, to).await;
        self.move_keys(slot, from, to).await;
        self.close_slot(slot, from, to).await;
    }

    /// Waits until that many claims are in the queue of the name.
    pub(crate) async fn until_queued(&self, name: &str, waiters: usize) {
        super::until_queued(self.node_of(name).await, name, waiters).await;
    }

    /// Asks every node.
    pub(crate) async fn each<T: FromRedisValue>(&self, command: &Cmd) -> Vec<T> {
        let mut answers = Vec::new();
        for node in &self.nodes {
            answers.push(node.ask(command).await);
        }
        answers
    }

    /// Knows of one node from the beginning.
    pub(crate) fn config(&self) -> RedisConfig {
        RedisConfig::cluster([("127.0.0.1", self.nodes[0].port())])
    }

    pub(crate) fn seed(&self, node: usize) -> RedisConfig {
        self.nodes[node].config()
    }

    /// A client that goes on asking while the nodes do not agree on who serves a slot, which on a busy machine takes them seconds.
    pub(crate) async fn patient(&self) -> RedisLock {
        self.config().op_timeout(HANG_LIMIT / 2).connect().await.unwrap()
    }

    pub(crate) async fn client(&self) -> RedisLock {
        self.config().connect().await.unwrap()
    }
}
