//! The order of those who wait.

use std::time::Duration;

use lock_core::{DistributedLock, Released, Wait};
use lock_redis::{RedisConfig, RedlockConfig};

use super::{TTL, client, granted, nodes};
use crate::server::{Proxy, claim, soon, until_queued};

#[tokio::test]
async fn a_newcomer_comes_after_those_who_wait_although_it_hardly_knows_the_time() {
    let nodes = nodes(3);
    let (holder, earlier) = (client(&nodes).await, client(&nodes).await);
    let mut slow = Vec::new();
    for node in &nodes {
        let proxy = Proxy::to(node.port()).await;
        // Whoever connects then takes the servers' clocks for up to that much slower than they are.
        proxy.delay(Duration::from_secs(1));
        slow.push(proxy);
    }
    let by_proxies = slow.iter().map(|proxy| RedisConfig::new("127.0.0.1", proxy.port()));
    let later = RedlockConfig::new(by_proxies).op_timeout(TTL).connect().await.unwrap();
    for proxy in &slow {
        proxy.delay(Duration::ZERO);
    }
    let held = granted(&holder, &claim("n", TTL)).await;
    let mut waiting = Vec::new();
    for (place, waiter) in [earlier, later].into_iter().enumerate() {
        waiting.push(tokio::spawn(async move {
            let grant = waiter
                .acquire(&claim("n", TTL), Wait::until(soon()))
                .await
                .unwrap()
                .granted();
            (waiter, grant.unwrap())
        }));
        for node in &nodes {
            until_queued(node, "n", place + 1).await;
        }
    }
    let later = waiting.pop().unwrap();
    let earlier = waiting.pop().unwrap();
    assert_eq!(holder.release(&held.claim, None).await.unwrap(), Released::Released);
    let (client, first) = earlier.await.unwrap();
    assert!(!later.is_finished());
    assert_eq!(client.release(&first.claim, None).await.unwrap(), Released::Released);
    let (_, second) = later.await.unwrap();
    assert!(held.token < first.token && first.token < second.token);
}

#[tokio::test]
async fn a_wait_that_fails_can_go_on_at_once_on_the_nodes_that_it_was_giving_back() {
    const SHORT: Duration = Duration::from_secs(3);
    let mut nodes = nodes(3);
    let holder = client(&nodes).await;
    let (slow, silent) = (Proxy::to(nodes[0].port()).await, Proxy::to(nodes[1].port()).await);
    let by_proxies = [&slow, &silent].map(|proxy| RedisConfig::new("127.0.0.1", proxy.port()));
    let [first, second] = by_proxies;
    let waiter = RedlockConfig::new([first, second, nodes[2].config()]).op_timeout(SHORT / 3);
    let waiter = waiter.connect().await.unwrap();
    granted(&waiter, &claim("other", SHORT)).await;
    nodes[2].kill();
    for round in 0..4 {
        let (held, claim) = (claim("n", TTL), claim("n", SHORT));
        granted(&holder, &held).await;
        // Longer than it takes a waiter with too few nodes to give them back.
        slow.delay(Duration::from_millis(60));
        let waiting = tokio::spawn({
            let (waiter, claim) = (waiter.clone(), claim.clone());
            async move { waiter.acquire(&claim, Wait::until(soon())).await }
        });
        for node in &nodes[..2] {
            until_queued(node, "n", 1).await;
        }
        silent.hold_answers();
        assert_eq!(holder.release(&held, None).await.unwrap(), Released::Released);
        let error = waiting.await.unwrap().unwrap_err();
        assert!(error.is_retryable(), "{error}");
        silent.pass();
        let attempt = waiter.acquire(&claim, Wait::until(soon())).await;
        assert!(attempt.is_ok(), "round {round}: {attempt:?}");
        assert!(attempt.unwrap().granted().is_some());
        assert_eq!(waiter.release(&claim, None).await.unwrap(), Released::Released);
        slow.delay(Duration::ZERO);
    }
}
