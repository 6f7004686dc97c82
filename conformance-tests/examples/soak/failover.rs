//! Failovers of a Redis that sentinels watch, and of the nodes of a Redis Cluster.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use conformance_tests::servers::{Data, Kind, RedisCluster, RedisSentinels, ServerError};
use conformance_tests::torture;
use fencelock::redis::redis;

use crate::command::{ask, until};

/// After what time without an answer a server is replaced.
pub(crate) const DOWN_AFTER: Duration = Duration::from_millis(800);

/// Longer than a planned failover takes.
const LONGEST_FAILOVER: Duration = Duration::from_secs(10);

const PAUSE: &str = "pause of a primary";
const RESTART: &str = "kill, restart of a primary";
const FAILOVER: &str = "planned failover";
const REPLICA: &str = "pause of a replica";
const SENTINEL: &str = "kill, restart of a sentinel";
const SLOT: &str = "move of slots";

/// What is under way, and what has been done.
#[derive(Debug, Default)]
struct State {
    /// The number of the server that has a fault.
    befallen: usize,
    /// Slots that are being moved: the slot, from which node, and to which.
    moving: Vec<(u16, usize, usize)>,
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A primary, its replicas, and the sentinels that watch them.
pub(crate) struct Sentinels {
    pub(crate) group: RedisSentinels,
    state: Mutex<State>,
    failovers: AtomicUsize,
}

impl Sentinels {
    pub(crate) async fn start(kind: &'static Kind) -> Result<Self, ServerError> {
        let arguments = ["--repl-diskless-sync-delay", "0"];
        Ok(Self {
            group: RedisSentinels::start(kind, 2, 3, DOWN_AFTER, &arguments).await?,
            state: Mutex::default(),
            failovers: AtomicUsize::new(0),
        })
    }

    pub(crate) fn failovers(&self) -> usize {
        self.failovers.load(Ordering::Relaxed)
    }

    /// The primary by the word of most sentinels, by its number.
    async fn primary(&self) -> io::Result<usize> {
        let question = format!("SENTINEL GET-MASTER-ADDR-BY-NAME {}", RedisSentinels::SERVICE);
        let mut votes = vec![0; self.group.servers().len()];
        for sentinel in self.group.sentinels() {
            let Ok((host, port)) = ask::<(String, u16)>(sentinel, &question).await else {
                continue;
            };
            let authority = format!("{host}:{port}");
            let named = self.group.servers().iter().position(|it| it.authority() == authority);
            named.into_iter().for_each(|server| votes[server] += 1);
        }
        let most = (0..votes.len()).max_by_key(|server| votes[*server]);
        most.filter(|server| votes[*server] > self.group.sentinels().len() / 2)
            .ok_or_else(|| io::Error::other("the sentinels disagree"))
    }

    /// Waits until the primary that the sentinels name is one, and has a replica.
    async fn until_whole(&self) -> io::Result<()> {
        until("there is a primary with a replica", || async {
            let primary = &self.group.servers()[self.primary().await?];
            let info: String = ask(primary, "INFO replication").await?;
            Ok(info.contains("role:master") && info.contains("state=online"))
        })
        .await
    }
}

#[async_trait]
impl torture::Server for Sentinels {
    fn faults(&self) -> Vec<(&'static str, bool)> {
        // What a replica lacks is lost.
        vec![
            (PAUSE, true),
            (RESTART, true),
            (FAILOVER, true),
            (REPLICA, false),
            (SENTINEL, false),
        ]
    }

    async fn begin(&self, fault: &str) -> io::Result<()> {
        self.until_whole().await?;
        let primary = self.primary().await?;
        let servers = self.group.servers();
        let sentinels = self.group.sentinels();
        let befallen = match fault {
            REPLICA => (primary + 1) % servers.len(),
            SENTINEL => fastrand::usize(..sentinels.len()),
            _ => primary,
        };
        lock(&self.state).befallen = befallen;
        match fault {
            PAUSE | REPLICA => servers[befallen].pause().await.map_err(io::Error::other)?,
            RESTART => servers[befallen].kill().await.map_err(io::Error::other)?,
            SENTINEL => sentinels[befallen].kill().await.map_err(io::Error::other)?,
            _ => {
                let order = format!("SENTINEL FAILOVER {}", RedisSentinels::SERVICE);
                // Refused if one is under way.
                let _: Result<redis::Value, _> = ask(&sentinels[0], &order).await;
            }
        }
        Ok(())
    }

    async fn end(&self, fault: &str) -> io::Result<()> {
        let befallen = lock(&self.state).befallen;
        let servers = self.group.servers();
        match fault {
            PAUSE | REPLICA => servers[befallen].resume().await.map_err(io::Error::other)?,
            RESTART => servers[befallen].restart(Data::Kept).await.map_err(io::Error::other)?,
            SENTINEL => {
                let sentinel = &self.group.sentinels()[befallen];
                sentinel.restart(Data::Kept).await.map_err(io::Error::other)?;
            }
            // It begins some time after the order. One that was refused does not.
            FAILOVER => {
                let changed = async || self.primary().await.is_ok_and(|primary| primary != befallen);
                let _ = tokio::time::timeout(LONGEST_FAILOVER, async {
                    while !changed().await {
                        tokio::time::sleep(Duration::from_millis(20)).await;
                    }
                })
                .await;
            }
            _ => {}
        }
        self.until_whole().await?;
        if !matches!(fault, REPLICA | SENTINEL) && self.primary().await? != befallen {
            self.failovers.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }
}

/// The nodes of a Redis Cluster.
pub(crate) struct Cluster {
    pub(crate) group: RedisCluster,
    state: Mutex<State>,
    failovers: AtomicUsize,
    moves: AtomicUsize,
}

impl Cluster {
    pub(crate) async fn start(kind: &'static Kind) -> Result<Self, ServerError> {
        Ok(Self {
            group: RedisCluster::start_replicated(kind, 3, DOWN_AFTER, &[]).await?,
            state: Mutex::default(),
            failovers: AtomicUsize::new(0),
            moves: AtomicUsize::new(0),
        })
    }

    pub(crate) fn failovers(&self) -> usize {
        self.failovers.load(Ordering::Relaxed)
    }

    /// How many slots that had keys were moved.
    pub(crate) fn moves(&self) -> usize {
        self.moves.load(Ordering::Relaxed)
    }

    /// The numbers of the nodes that are primaries with slots, by their own word.
    async fn primaries(&self) -> Vec<usize> {
        let mut primaries = Vec::new();
        for (at, node) in self.group.nodes().iter().enumerate() {
            let nodes = ask::<String>(node, "CLUSTER NODES").await.unwrap_or_default();
            let own = nodes.lines().find(|line| line.contains("myself")).unwrap_or_default();
            if own.contains("master") && own.split(' ').nth(8).is_some() {
                primaries.push(at);
            }
        }
        primaries
    }

    async fn id(&self, node: usize) -> io::Result<String> {
        ask(&self.group.nodes()[node], "CLUSTER MYID").await
    }

    /// The number of a replica of that node.
    async fn replica_of(&self, primary: usize) -> io::Result<usize> {
        let id = self.id(primary).await?;
        for (at, node) in self.group.nodes().iter().enumerate() {
            let nodes: String = ask(node, "CLUSTER NODES").await?;
            let own = nodes.lines().find(|line| line.contains("myself")).unwrap_or_default();
            if own.contains("slave") && own.contains(&id) {
                return Ok(at);
            }
        }
        Err(io::Error::other(format!("node {primary} has no replica")))
    }

    /// Waits until all slots are served, by as many primaries as there were, each with a replica.
    async fn until_whole(&self) -> io::Result<()> {
        until("every primary has a replica, and all nodes agree", || async {
            let primaries = self.primaries().await;
            let mut slots = Vec::new();
            for (at, node) in self.group.nodes().iter().enumerate() {
                let info: String = ask(node, "CLUSTER INFO").await?;
                if !info.contains("cluster_state:ok") || !info.contains("cluster_slots_ok:16384") {
                    return Ok(false);
                }
                let info: String = ask(node, "INFO replication").await?;
                let wanted = match primaries.contains(&at) {
                    true => "state=online",
                    false => "master_link_status:up",
                };
                if !info.contains(wanted) {
                    return Ok(false);
                }
                slots.push(self.owners(at).await?);
            }
            Ok(slots.windows(2).all(|pair| pair[0] == pair[1]) && primaries.len() * 2 == slots.len())
        })
        .await
    }

    /// Who serves what, as a node sees it.
    async fn owners(&self, node: usize) -> io::Result<Vec<String>> {
        let nodes: String = ask(&self.group.nodes()[node], "CLUSTER NODES").await?;
        let mut owners = Vec::new();
        for line in nodes.lines() {
            let words: Vec<_> = line.split(' ').collect();
            if words.len() > 8 && words[2].contains("master") {
                owners.push([&words[..1], &words[8..]].concat().join(" "));
            }
        }
        owners.sort();
        Ok(owners)
    }

    /// Begins to move the slots of one primary that have keys to another one, and moves half of the keys.
    async fn open_slots(&self) -> io::Result<()> {
        let primaries = self.primaries().await;
        let from = fastrand::usize(..primaries.len());
        let (from, to) = (primaries[from], primaries[(from + 1) % primaries.len()]);
        let (source, target) = (self.id(from).await?, self.id(to).await?);
        let [source_node, target_node] = [from, to].map(|node| &self.group.nodes()[node]);
        let keys: Vec<String> = ask(source_node, "KEYS *:fence").await?;
        for key in keys {
            let slot: u16 = ask(source_node, &format!("CLUSTER KEYSLOT {key}")).await?;
            if lock(&self.state).moving.iter().any(|(moving, ..)| *moving == slot) {
                continue;
            }
            let _: redis::Value = ask(target_node, &format!("CLUSTER SETSLOT {slot} IMPORTING {source}")).await?;
            let _: redis::Value = ask(source_node, &format!("CLUSTER SETSLOT {slot} MIGRATING {target}")).await?;
            lock(&self.state).moving.push((slot, from, to));
            self.move_keys(slot, from, to, 2).await?;
        }
        Ok(())
    }

    async fn move_keys(&self, slot: u16, from: usize, to: usize, most: usize) -> io::Result<()> {
        let source = &self.group.nodes()[from];
        let place = self.group.nodes()[to].authority().replacen(':', " ", 1);
        for _ in 0..most {
            let keys: Vec<String> = ask(source, &format!("CLUSTER GETKEYSINSLOT {slot} 1")).await?;
            let Some(key) = keys.first() else { break };
            let _: redis::Value = ask(source, &format!("MIGRATE {place} {key} 0 5000")).await?;
        }
        Ok(())
    }

    async fn close_slots(&self) -> io::Result<()> {
        let moving = std::mem::take(&mut lock(&self.state).moving);
        for (slot, from, to) in moving {
            self.move_keys(slot, from, to, usize::MAX).await?;
            let target = self.id(to).await?;
            for node in [to, from] {
                let order = format!("CLUSTER SETSLOT {slot} NODE {target}");
                let _: redis::Value = ask(&self.group.nodes()[node], &order).await?;
            }
            self.moves.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }
}

#[async_trait]
impl torture::Server for Cluster {
    fn faults(&self) -> Vec<(&'static str, bool)> {
        // What a replica lacks is lost, except if the primary waits for it first.
        vec![(PAUSE, true), (RESTART, true), (FAILOVER, false), (SLOT, false)]
    }

    async fn begin(&self, fault: &str) -> io::Result<()> {
        self.until_whole().await?;
        if fault == SLOT {
            return self.open_slots().await;
        }
        let primaries = self.primaries().await;
        let befallen = primaries[fastrand::usize(..primaries.len())];
        lock(&self.state).befallen = befallen;
        let node = &self.group.nodes()[befallen];
        match fault {
            PAUSE => node.pause().await.map_err(io::Error::other),
            RESTART => node.kill().await.map_err(io::Error::other),
            _ => {
                let replica = self.replica_of(befallen).await?;
                ask::<redis::Value>(&self.group.nodes()[replica], "CLUSTER FAILOVER").await?;
                Ok(())
            }
        }
    }

    async fn end(&self, fault: &str) -> io::Result<()> {
        let befallen = lock(&self.state).befallen;
        let node = &self.group.nodes()[befallen];
        match fault {
            PAUSE => node.resume().await.map_err(io::Error::other)?,
            RESTART => node.restart(Data::Kept).await.map_err(io::Error::other)?,
            SLOT => self.close_slots().await?,
            _ => {}
        }
        self.until_whole().await?;
        if fault != SLOT && !self.primaries().await.contains(&befallen) {
            self.failovers.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }
}
