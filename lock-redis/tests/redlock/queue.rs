//! The order of those who wait.

use std::time::Duration;

use lock_core::{DistributedLock, Released};
use lock_redis::{RedisConfig, RedlockConfig};

use crate::server::{Proxy, claim, soon, until_queued};
use crate::{TTL, client, granted, nodes};

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
            let grant = waiter.acquire(&claim("n", TTL), soon()).await.unwrap().granted();
            (waiter, grant.unwrap())
        }));
        for node in &nodes {
            until_queued(node, "n", place + 1).await;
        }
    }
    let later = waiting.pop().unwrap();
    let earlier = waiting.pop().unwrap();
    assert_eq!(holder.release(&held.claim).await.unwrap(), Released::Released);
    let (client, first) = earlier.await.unwrap();
    assert!(!later.is_finished());
    assert_eq!(client.release(&first.claim).await.unwrap(), Released::Released);
    let (_, second) = later.await.unwrap();
    assert!(held.token < first.token && first.token < second.token);
}
