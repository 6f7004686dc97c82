//! What is still under way to nodes when an attempt or a claim ends.

use lock_core::{DistributedLock, Released};
use lock_redis::RedlockConfig;
use lock_redis::redis;

use super::{TTL, client, granted, nodes};
use crate::server::{self, Direction, Server, Traffic, claim};

const PRELUDE: &str = include_str!("../../../../src/scripts/prelude.lua");
const NODE: &str = include_str!("../../../../src/scripts/redlock.lua");

/// Does `what` for the name "n" as a request that the network held back.
async fn late(node: &Server, what: &str, owner: &str, arguments: &[&str]) -> String {
    let process = super::info(node, "server", "run_id").await.unwrap();
    let mut eval = redis::cmd("EVAL");
    eval.arg([PRELUDE, NODE].concat()).arg(5);
    for key in ["lock", "fence", "order", "waiters"] {
        eval.arg(format!("{{fencelock:n}}:{key}"));
    }
    eval.arg("{fencelock:}:born")
        .arg("fencelock:client:")
        .arg(600_000)
        .arg(owner)
        .arg(what)
        .arg(arguments)
        .arg("3")
        .arg(process)
        .arg("60000");
    let answer: Vec<redis::Value> = node.ask(&eval).await;
    redis::from_redis_value(answer[0].clone()).unwrap()
}

#[tokio::test]
async fn a_request_that_arrives_late_changes_nothing_of_what_the_claim_was_granted_since() {
    let nodes = nodes(3);
    let locks = client(&nodes).await;
    let (claim, node) = (claim("n", TTL), &nodes[0]);
    granted(&locks, &claim).await;
    assert_eq!(locks.release(&claim, None).await.unwrap(), Released::Released);
    granted(&locks, &claim).await;
    let stored = async || node.command::<Option<String>>("GET {fencelock:n}:lock").await;
    server::until("the node has the second grant", async || {
        stored().await.is_some_and(|value| value.contains("#2 "))
    })
    .await;
    let value = stored().await.unwrap();
    let (owner, by) = (claim.owner().to_string(), value.split([' ', '#']).nth(4).unwrap());
    assert_eq!(late(node, "release", &owner, &[by, "1"]).await, "lost");
    let acquire = ["30000", "9999999999999", by, "1", "7 host", "0"];
    assert_eq!(late(node, "acquire", &owner, &acquire).await, "granted");
    assert_eq!(stored().await, Some(value.clone()));
    // One of another client, which does not know of attempts, is none of an earlier attempt.
    assert_eq!(late(node, "release", &owner, &["another", "0"]).await, "released");
    assert_eq!(stored().await, None);
}

#[tokio::test]
async fn what_was_to_be_asked_for_a_claim_is_not_asked_after_its_end() {
    let nodes = nodes(3);
    // It lets the nodes grant.
    client(&nodes).await;
    let proxy = server::proxy(&nodes[2]).await;
    let by_proxy = server::config_by(&proxy);
    let locks = RedlockConfig::new([nodes[0].config(), nodes[1].config(), by_proxy]).op_timeout(TTL);
    let locks = locks.connect_lazy().unwrap();
    // There is no connection to the third node before this passes.
    proxy.set(Direction::ToServer, Traffic::Stalled);
    let (ended, held) = (claim("ended", TTL), claim("held", TTL));
    for claim in [&ended, &held] {
        granted(&locks, claim).await;
    }
    assert_eq!(locks.release(&ended, None).await.unwrap(), Released::Released);
    proxy.set(Direction::Both, Traffic::Flows);
    let knows = async |name: &str| {
        nodes[2]
            .command::<bool>(&format!("EXISTS {{fencelock:{name}}}:fence"))
            .await
    };
    server::until("the third node is asked", async || knows("held").await).await;
    assert!(!knows("ended").await);
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
