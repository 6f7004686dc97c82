//! Locks on a Redis Cluster: every operation, slots that move, nodes that fail, come and go, and what is refused.

mod access;
mod failing;
mod moving;

use std::collections::BTreeSet;
use std::num::NonZeroU32;
use std::time::Duration;

use lock_core::{DistributedLock, FencingToken, Grant, Released, Renewal};
use lock_redis::{RedisLock, redis};
use tokio::task::JoinHandle;

use crate::server::{Cluster, LONG, busy, claim, granted, name, waiting};

/// Much longer than what is done within it, so that nothing happens by a refresh.
const TTL: Duration = LONG;

/// Clients that have come to wait for the name, in this order.
async fn queue(cluster: &Cluster, of: &str, length: usize) -> Vec<(RedisLock, JoinHandle<Grant>)> {
    let mut queue = Vec::new();
    for place in 1..=length {
        let lock = cluster.patient().await;
        let wait = waiting(&lock, &claim(of, TTL));
        queue.push((lock, wait));
        cluster.until_queued(of, place).await;
    }
    queue
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
async fn every_operation_works_on_names_of_every_node() {
    let cluster = Cluster::with(3, false, &[]).await;
    let (one, other) = (cluster.client().await, cluster.client().await);
    let mut names: Vec<_> = (0..30).map(|number| format!("shop/{number}")).collect();
    names.extend(
        [
            "{shop/a}",
            "shop/{b}",
            "shop}",
            "}shop",
            "shop/{}",
            "{",
            "shop/{c}:lock",
        ]
        .map(str::to_owned),
    );
    let (mut nodes, mut held) = (BTreeSet::new(), Vec::new());
    for text in &names {
        nodes.insert(cluster.node_of(text).await.port());
        let grant = granted(&one, &claim(text, TTL)).await;
        busy(&other, &claim(text, TTL)).await;
        assert_eq!(one.renew(&grant.lease).await.unwrap(), Renewal::Renewed);
        let holder = other.holders(&name(text)).await.unwrap().pop().unwrap();
        assert_eq!(
            (holder.owner, holder.token),
            (Some(grant.claim.owner()), Some(grant.token))
        );
        held.push(grant);
    }
    assert_eq!(nodes.len(), 3, "the names are on all nodes");
    let listed = other.list("").await.unwrap();
    let listed: Vec<_> = listed
        .into_iter()
        .map(|holder| holder.name.unwrap().to_string())
        .collect();
    let mut sorted = names.clone();
    sorted.sort();
    assert_eq!(listed, sorted);
    assert_eq!(other.list("shop/1").await.unwrap().len(), 11);
    for grant in held {
        let next = claim(grant.claim.name().as_str(), TTL);
        assert_eq!(one.release(&grant.claim, None).await.unwrap(), Released::Released);
        let next = granted(&one, &next).await;
        assert!(next.token > grant.token);
        assert_eq!(one.reserve(&next.claim, LONG * 2).await.unwrap(), Renewal::Renewed);
        assert_eq!(one.release(&next.claim, Some(LONG)).await.unwrap(), Released::Released);
        assert!(
            other
                .holders(next.claim.name())
                .await
                .unwrap()
                .pop()
                .unwrap()
                .is_reserved
        );
        let forced = other.force_release(next.claim.name()).await.unwrap().pop().unwrap();
        assert_eq!(forced.token, Some(next.token));
        let block = claim(next.claim.name().as_str(), TTL).with_tokens_wanted(NonZeroU32::MAX);
        let last = granted(&other, &block).await;
        assert!(last.first_token() > next.token && last.token > last.first_token());
        assert_eq!(other.release(&last.claim, None).await.unwrap(), Released::Released);
        assert_eq!(other.release(&last.claim, None).await.unwrap(), Released::NotHeld);
        assert_eq!(other.renew(&last.lease).await.unwrap(), Renewal::NotHeld);
    }
    for node in &cluster.nodes {
        assert_eq!(node.leftovers().await, [""; 0]);
    }
    assert_eq!(one.server_info().await.unwrap().warnings, [""; 0]);
    let version = one.server_info().await.unwrap().to_string();
    assert!(version.starts_with("Redis Cluster of 3 primaries: "), "{version}");
}

#[tokio::test]
async fn waiters_are_served_in_order_by_messages() {
    let cluster = Cluster::with(3, false, &[]).await;
    for of in ["a", "{b}", "c}d{e"] {
        let first = cluster.client().await;
        let mut last = granted(&first, &claim(of, TTL)).await;
        let mut before = first;
        for (lock, wait) in queue(&cluster, of, 4).await {
            assert_eq!(before.release(&last.claim, None).await.unwrap(), Released::Released);
            // No refresh comes for a third of the ttl.
            let next = wait.await.unwrap();
            assert!(next.token > last.token);
            (before, last) = (lock, next);
        }
        assert_eq!(before.release(&last.claim, None).await.unwrap(), Released::Released);
    }
}

/// How many messages of a kind the nodes have sent each other, in all.
async fn sent(cluster: &Cluster, kind: &str) -> u64 {
    let infos: Vec<String> = cluster.each(redis::cmd("CLUSTER").arg("INFO")).await;
    let field = format!("cluster_stats_messages_{kind}_sent:");
    let of = |info: &String| {
        info.lines()
            .find_map(|line| line.trim_end().strip_prefix(&*field)?.parse::<u64>().ok())
    };
    infos.iter().filter_map(of).sum::<u64>()
}

#[tokio::test]
async fn a_hand_over_costs_one_message_to_each_other_node() {
    const ROUNDS: u64 = 20;
    let cluster = Cluster::with(3, false, &[]).await;
    let clients = [cluster.client().await, cluster.client().await];
    let mut held = granted(&clients[0], &claim("n", TTL)).await;
    let before = sent(&cluster, "publish").await;
    for round in 1..=usize::try_from(ROUNDS).unwrap() {
        let wait = waiting(&clients[round % 2], &claim("n", TTL));
        cluster.until_queued("n", 1).await;
        clients[(round + 1) % 2].release(&held.claim, None).await.unwrap();
        held = wait.await.unwrap();
    }
    assert_eq!(sent(&cluster, "publish").await - before, ROUNDS * 2);
}
