//! What is still under way to nodes when a claim ends.

use std::time::Duration;

use lock_core::{Attempt, Claim, DistributedLock, Released, Wait};
use lock_redis::{RedisConfig, RedlockConfig};

use super::{TTL, client, granted, is_busy, nodes, scripts_run};
use crate::server::{self, Proxy, claim, soon};

#[tokio::test]
async fn a_node_does_not_count_for_a_claim_that_a_release_under_way_may_end_there() {
    let mut nodes = nodes(3);
    let proxy = Proxy::to(nodes[0].port()).await;
    let by_proxy = RedisConfig::new("127.0.0.1", proxy.port());
    let locks = RedlockConfig::new([by_proxy, nodes[1].config(), nodes[2].config()]);
    let locks = locks.op_timeout(Duration::from_secs(3)).connect().await.unwrap();
    let claim = claim("n", TTL);
    granted(&locks, &claim).await;
    proxy.hold_requests();
    assert_eq!(locks.release(&claim, None).await.unwrap(), Released::Released);
    nodes[2].kill();
    // The release is under way to the first node: what that granted now would not last.
    let error = locks.try_acquire(&claim).await.unwrap_err();
    assert!(error.to_string().contains("2 of 3 nodes failed"), "{error}");
    assert!(
        format!("{error:?}").contains("an earlier release of this claim"),
        "{error:?}"
    );
    proxy.pass();
    server::until("the node has confirmed", async || {
        matches!(locks.try_acquire(&claim).await, Ok(Attempt::Granted(_)))
    })
    .await;
}

#[tokio::test]
async fn a_claim_is_not_busy_because_a_node_has_yet_to_answer_its_last_release() {
    let nodes = nodes(3);
    let slow = [Proxy::to(nodes[0].port()).await, Proxy::to(nodes[1].port()).await];
    let [by_first, by_second] = [&slow[0], &slow[1]].map(|proxy| RedisConfig::new("127.0.0.1", proxy.port()));
    let other = RedlockConfig::new([by_first, by_second, nodes[2].config()]).op_timeout(TTL);
    let other = other.connect().await.unwrap();
    let silent = Proxy::to(nodes[2].port()).await;
    let by_silent = RedisConfig::new("127.0.0.1", silent.port());
    let locks = RedlockConfig::new([nodes[0].config(), nodes[1].config(), by_silent]).op_timeout(TTL);
    let locks = locks.connect().await.unwrap();
    let (held, claim) = (claim("n", TTL), claim("n", TTL));
    granted(&locks, &held).await;
    server::until("every node has the holder", async || {
        let mut holders = 0;
        for node in &nodes {
            holders += node.command::<u64>("EXISTS {fencelock:n}:lock").await;
        }
        holders == 3
    })
    .await;
    slow[0].hold_answers();
    assert!(is_busy(&other, &claim).await);
    silent.hold_requests();
    assert_eq!(locks.release(&held, None).await.unwrap(), Released::Released);
    slow[1].hold_answers();
    // The first node has the release of the busy claim, the second one grants it, and the third one still has the holder.
    let before = scripts_run(&nodes[2]).await;
    let trying = tokio::spawn(async move {
        let attempt = other.try_acquire(&claim).await;
        (other, attempt)
    });
    server::until("the third node has answered", async || {
        scripts_run(&nodes[2]).await > before
    })
    .await;
    for proxy in &slow {
        proxy.pass();
    }
    let (_other, attempt) = trying.await.unwrap();
    assert!(attempt.unwrap().granted().is_some());
}

#[tokio::test]
async fn what_was_to_be_asked_for_a_claim_is_not_asked_after_its_end() {
    const SHORT: Duration = Duration::from_secs(1);
    let nodes = nodes(3);
    let proxy = Proxy::to(nodes[2].port()).await;
    let by_proxy = RedisConfig::new("127.0.0.1", proxy.port());
    let locks = RedlockConfig::new([nodes[0].config(), nodes[1].config(), by_proxy]);
    let locks = locks.op_timeout(TTL).connect().await.unwrap();
    for is_reserved in [false, true] {
        let [ended, other] = match is_reserved {
            true => ["reserved", "waiting"].map(|name| claim(name, SHORT).with_at_least(SHORT)),
            false => ["released", "other"].map(|name| claim(name, SHORT)),
        };
        for claim in [&ended, &other] {
            granted(&locks, claim).await;
        }
        proxy.hold_requests();
        for claim in [&ended, &other] {
            assert_eq!(locks.release(claim, None).await.unwrap(), Released::Released);
            // The third node does not count until the release has expired, and is asked then.
            assert!(
                locks
                    .acquire(claim, Wait::until(soon()))
                    .await
                    .unwrap()
                    .granted()
                    .is_some()
            );
        }
        proxy.pass();
        let keep = is_reserved.then_some(Duration::from_millis(1));
        assert_eq!(locks.release(&ended, keep).await.unwrap(), Released::Released);
        let asks_for = async |claim: &Claim| {
            let (name, owner) = (claim.name(), claim.owner());
            let holder: Option<String> = nodes[2].command(&format!("GET {{fencelock:{name}}}:lock")).await;
            let waits: bool = nodes[2]
                .command(&format!("HEXISTS {{fencelock:{name}}}:waiters {owner}"))
                .await;
            waits || holder.is_some_and(|holder| holder.contains(&owner.to_string()))
        };
        server::until("the third node is asked", async || asks_for(&other).await).await;
        assert!(!asks_for(&ended).await, "reserved: {is_reserved}");
    }
}

#[tokio::test]
async fn a_release_reaches_every_node() {
    let nodes = nodes(5);
    let locks = client(&nodes).await;
    for _ in 0..10 {
        let grant = granted(&locks, &claim("n", TTL)).await;
        // Each node needs two requests now, and most are not waited for.
        for node in &nodes {
            let _: String = node.command("SCRIPT FLUSH").await;
        }
        locks.release(&grant.claim, None).await.unwrap();
        server::until("no node has the lock", async || {
            let mut locks = 0;
            for node in &nodes {
                locks += node.command::<u64>("EXISTS {fencelock:n}:lock").await;
            }
            locks == 0
        })
        .await;
    }
}
