//! A Redis Cluster: slots that move, nodes that fail, and what a hand-over costs. Each operation on each node is shown by the suite.

use std::time::Duration;

use lock_core::{DistributedLock, FencingToken, Grant, LockError, Mode, Released, Renewal};
use lock_redis::{RedisConfig, RedisLock};
use tokio::task::JoinHandle;

use crate::server::{
    Ask, Data, HANG_LIMIT, Kind, LONG, RedisCluster, Server, busy, claim, granted, name, rights, until, waiting,
};

/// Much longer than what is done within it, so that nothing happens by a refresh.
const TTL: Duration = LONG;

/// For how long a node must be silent before the others take it for failed.
const NODE_TIMEOUT: Duration = Duration::from_secs(1);

/// A cluster, and where the name `n` is.
struct Cluster {
    group: RedisCluster,
    slot: u16,
    /// The node that serves it, and another one: the next primary, or its replica.
    from: usize,
    to: usize,
}

impl Cluster {
    /// Three primaries.
    async fn start(arguments: &[&str]) -> Self {
        let group = RedisCluster::start(&Kind::LOCAL_REDIS, 3, arguments).await.unwrap();
        let (slot, from) = group.place("{fencelock:n}:lock").await.unwrap();
        let to = (from + 1) % 3;
        Self { group, slot, from, to }
    }

    /// The same with a replica of each, which keeps no data over a restart.
    async fn replicated() -> Self {
        let keeps_nothing = ["--appendonly", "no"];
        let starting = RedisCluster::start_replicated(&Kind::LOCAL_REDIS, 3, NODE_TIMEOUT, &keeps_nothing);
        let group = starting.await.unwrap();
        let (slot, from) = group.place("{fencelock:n}:lock").await.unwrap();
        let to = from + 3;
        Self { group, slot, from, to }
    }

    /// Knows of one node from the beginning, and goes on asking while the nodes do not agree on who serves a slot, which on a busy machine takes
    /// them seconds.
    fn config(&self) -> RedisConfig {
        RedisConfig::cluster([("127.0.0.1", self.node(0).port())]).op_timeout(HANG_LIMIT / 2)
    }

    async fn client(&self) -> RedisLock {
        self.config().connect().await.unwrap()
    }

    fn node(&self, number: usize) -> &Server {
        &self.group.nodes()[number]
    }

    async fn open_slot(&self) {
        self.group.open_slot(self.slot, self.from, self.to).await.unwrap();
    }

    async fn move_keys(&self) -> usize {
        let moving = self.group.move_keys(self.slot, self.from, self.to, Duration::ZERO);
        moving.await.unwrap()
    }

    /// Tells that node that the slot has moved.
    async fn tell(&self, node: usize) {
        self.group.give_slot(self.slot, node, self.to).await.unwrap();
    }

    /// Clients that have come to wait for `n` at that node, in this order.
    async fn queue(&self, node: usize, length: usize) -> Vec<(RedisLock, JoinHandle<Grant>)> {
        let mut queue = Vec::new();
        for place in 1..=length {
            let lock = self.client().await;
            let wait = waiting(&lock, &claim("n", TTL));
            queue.push((lock, wait));
            self.node(node).until_queued("n", place).await;
        }
        queue
    }

    /// Waits until the replica of the node has all that was written so far.
    async fn until_replicated(&self, node: usize) {
        until("the replica has it all", async || {
            let info: String = self.node(node).command("INFO replication").await;
            let field = |name: &str| info.split(['\r', '\n', ',']).find_map(|field| field.strip_prefix(name));
            field("offset=").is_some_and(|offset| Some(offset) == field("master_repl_offset:"))
        })
        .await;
    }
}

/// Waits until each is granted the name, and releases it: one after the other, with tokens that rise.
async fn served(queue: Vec<(RedisLock, JoinHandle<Grant>)>, mut last: FencingToken) {
    for (lock, wait) in queue {
        let next = wait.await.unwrap();
        assert!(next.token > last, "{} after {last}", next.token);
        lock.release(&next.claim, None).await.unwrap();
        last = next.token;
    }
}

#[tokio::test]
async fn a_hand_over_costs_one_message_to_each_other_node() {
    const ROUNDS: u64 = 20;
    let cluster = Cluster::start(&[]).await;
    let sent = async || {
        let mut sent = 0;
        for node in cluster.group.nodes() {
            let info: String = node.command("CLUSTER INFO").await;
            let field = |line: &str| {
                line.trim_end()
                    .strip_prefix("cluster_stats_messages_publish_sent:")?
                    .parse::<u64>()
                    .ok()
            };
            sent += info.lines().find_map(field).unwrap_or(0);
        }
        sent
    };
    let clients = [cluster.client().await, cluster.client().await];
    let mut held = granted(&clients[0], &claim("n", TTL)).await;
    let before = sent().await;
    for round in 1..=usize::try_from(ROUNDS).unwrap() {
        let wait = waiting(&clients[round % 2], &claim("n", TTL));
        cluster.node(cluster.from).until_queued("n", 1).await;
        clients[(round + 1) % 2].release(&held.claim, None).await.unwrap();
        held = wait.await.unwrap();
    }
    assert_eq!(sent().await - before, ROUNDS * 2);
}

#[tokio::test]
async fn a_moved_name_keeps_its_holder_and_its_waiters_in_their_order() {
    let cluster = Cluster::start(&[]).await;
    let mut at = cluster.from;
    let first = cluster.client().await;
    let mut last = granted(&first, &claim("n", TTL)).await;
    let queue = cluster.queue(at, 4).await;
    let mut before = first;
    for (served, (lock, wait)) in queue.into_iter().enumerate() {
        // Twice to the next node, and then back and forth, while it is held and waited for.
        for _ in 0..3 {
            let to = (at + 1 + served % 2) % 3;
            let moving = cluster.group.move_slot(cluster.slot, at, to, Duration::ZERO);
            moving.await.unwrap();
            at = to;
            assert_eq!(before.renew(&last.lease).await.unwrap(), Renewal::Renewed);
        }
        // At once: those that wait may not have found the new node yet.
        assert_eq!(before.release(&last.claim, None).await.unwrap(), Released::Released);
        let next = wait.await.unwrap();
        assert!(next.token > last.token, "{} after {}", next.token, last.token);
        (before, last) = (lock, next);
    }
    assert_eq!(before.release(&last.claim, None).await.unwrap(), Released::Released);
    for node in cluster.group.nodes() {
        assert_eq!(node.leftovers().await, [""; 0]);
    }
}

/// As the user with the rights that the documentation lists.
#[tokio::test]
async fn while_a_slot_is_moved_its_locks_are_renewed_and_all_else_waits_and_no_waiter_is_lost() {
    let mut cluster = Cluster::start(&[]).await;
    for node in cluster.group.nodes() {
        let _: () = node.command(&rights("ACL SETUSER nodes")).await;
    }
    for mode in [Mode::Exclusive, Mode::Shared] {
        let config = || cluster.config().credentials("nodes", "hunter2");
        let (one, other) = (config().connect().await.unwrap(), config().connect().await.unwrap());
        let held = granted(&one, &claim("n", TTL).with_mode(mode)).await;
        // All keys of the name are stored then, so the node would serve a script that needs no other.
        let queue = cluster.queue(cluster.from, 2).await;
        // Its keys stay where they are, and are then moved; the slot stays open in both cases.
        for moved in [false, true] {
            match moved {
                true => assert!(cluster.move_keys().await > 3),
                false => cluster.open_slot().await,
            }
            assert_eq!(one.renew(&held.lease).await.unwrap(), Renewal::Renewed);
            let holder = other.holders(&name("n")).await.unwrap().pop().unwrap();
            assert_eq!(holder.token, Some(held.token));
            assert_eq!(other.list("").await.unwrap().len(), 1);
            let short = config().op_timeout(Duration::from_millis(300)).connect().await.unwrap();
            let error = short.try_acquire(&claim("n", TTL)).await.unwrap_err();
            assert!(matches!(error, LockError::Unavailable { .. }), "{error:?}");
            assert!(error.to_string().contains("is being moved"), "{error}");
        }
        let claim = held.claim.clone();
        let releasing = tokio::spawn(async move { one.release(&claim, None).await });
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert!(!releasing.is_finished());
        // Between these each of the two nodes says that the other one serves the slot.
        cluster.tell(cluster.from).await;
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert!(!releasing.is_finished());
        cluster.tell(cluster.to).await;
        assert_eq!(releasing.await.unwrap().unwrap(), Released::Released);
        served(queue, held.token).await;
        cluster.group.until_served().await.unwrap();
        (cluster.from, cluster.to) = (cluster.to, cluster.from);
    }
}

#[tokio::test]
async fn requests_outlast_a_failover_and_waiters_are_served_by_the_replica() {
    let cluster = Cluster::replicated().await;
    for is_killed in [true, false] {
        let place = cluster.group.place("{fencelock:n}:lock").await.unwrap().1;
        let one = cluster.client().await;
        let held = granted(&one, &claim("n", TTL)).await;
        // Waiters whose connections fall silent notice that at their next refresh.
        let queue = cluster.queue(place, if is_killed { 2 } else { 0 }).await;
        cluster.until_replicated(place).await;
        // Each of the requests begins while no node serves the slot.
        let node = cluster.node(place);
        match is_killed {
            true => node.kill().await.unwrap(),
            false => node.pause().await.unwrap(),
        }
        assert_eq!(one.renew(&held.lease).await.unwrap(), Renewal::Renewed);
        busy(&cluster.client().await, &claim("n", TTL)).await;
        assert_eq!(one.release(&held.claim, None).await.unwrap(), Released::Released);
        served(queue, held.token).await;
        // It learns that it is a replica now.
        match is_killed {
            true => node.restart(Data::Kept).await.unwrap(),
            false => node.resume().await.unwrap(),
        }
        node.until_info("replication", "master_link_status:up").await;
        cluster.group.until_served().await.unwrap();
    }
}

#[tokio::test]
async fn a_lock_that_a_promoted_replica_lacks_was_not_released_and_later_tokens_are_higher() {
    for releases in [true, false] {
        let cluster = Cluster::replicated().await;
        let (one, other) = (cluster.client().await, cluster.client().await);
        let held = granted(&one, &claim("n", TTL)).await;
        let (primary, replica) = (cluster.node(cluster.from), cluster.node(cluster.to));
        primary.pause().await.unwrap();
        replica.restart(Data::Kept).await.unwrap();
        match releases {
            // The first request goes to the silent node, and might be carried out there.
            true => {
                let told = one.release(&held.claim, None).await;
                assert!(!matches!(told, Ok(Released::Released)), "{told:?}");
            }
            false => assert_eq!(one.renew(&held.lease).await.unwrap(), Renewal::NotHeld),
        }
        let next = granted(&other, &claim("n", TTL)).await;
        assert!(next.token > held.token);
        primary.resume().await.unwrap();
        assert_eq!(other.renew(&next.lease).await.unwrap(), Renewal::Renewed);
    }
}

#[tokio::test]
async fn a_slot_that_no_node_serves_is_an_error_that_says_so() {
    let cluster = Cluster::start(&["--cluster-require-full-coverage", "no"]).await;
    let (slot, other) = (cluster.slot, cluster.slot + 1);
    for node in cluster.group.nodes() {
        let _: () = node.command(&format!("CLUSTER DELSLOTS {slot}")).await;
    }
    // One seed that answers is enough.
    let seeds = [1, cluster.node(2).port()].map(|port| ("127.0.0.1", port));
    let config = RedisConfig::cluster(seeds).op_timeout(Duration::from_secs(2));
    let one = config.connect().await.unwrap();
    let error = one.try_acquire(&claim("n", TTL)).await.unwrap_err();
    assert!(matches!(error, LockError::Unavailable { .. }), "{error:?}");
    let text = error.to_string();
    assert!(
        text.contains(&format!("slot {slot}")) && text.contains("1 of 16384"),
        "{text}"
    );
    // A list of the others would look whole.
    let error = one.list("").await.unwrap_err();
    assert!(error.to_string().contains("1 of 16384"), "{error}");
    let warnings = one.server_info().await.unwrap().warnings;
    assert!(warnings[0].contains("1 of 16384"), "{warnings:?}");
    // All others are served, unless all must be.
    granted(&one, &claim("m", TTL)).await;
    for node in cluster.group.nodes() {
        let _: () = node.command("CONFIG SET cluster-require-full-coverage yes").await;
        let _: () = node.command(&format!("CLUSTER DELSLOTS {other}")).await;
        until("the cluster is down", async || {
            node.command::<String>("CLUSTER INFO")
                .await
                .contains("cluster_state:fail")
        })
        .await;
    }
    let error = one.try_acquire(&claim("m2", TTL)).await.unwrap_err();
    assert!(error.to_string().contains("cluster-require-full-coverage"), "{error}");
    let give = format!("CLUSTER ADDSLOTS {slot} {other}");
    let _: () = cluster.node(cluster.from).command(&give).await;
    cluster.group.until_served().await.unwrap();
    granted(&one, &claim("n", TTL)).await;
}
