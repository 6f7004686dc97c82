//! What is still under way to nodes when an attempt or a claim ends.

use lock_core::{Claim, DistributedLock, Mode, Released};
use lock_redis::RedlockConfig;
use lock_redis::redis;

use super::{TTL, client, granted, nodes};
use crate::server::{self, Direction, Server, Traffic, claim};

/// What a node runs.
fn script() -> String {
    const PRELUDE: &str = include_str!("../../../../src/scripts/prelude.lua");
    const SHARES: &str = include_str!("../../../../src/scripts/shares.lua");
    const NODE: &str = include_str!("../../../../src/scripts/redlock.lua");
    PRELUDE.to_owned() + &NODE.replace("-- include shares.lua\n", SHARES)
}

/// Does `what` for the name "n" as a request that the network held back.
async fn late(node: &Server, what: &str, owner: &str, arguments: &[&str]) -> String {
    let process = super::info(node, "server", "run_id").await.unwrap();
    let mut eval = redis::cmd("EVAL");
    eval.arg(script()).arg(7);
    for key in ["lock", "fence", "order", "waiters", "holders", "records"] {
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

/// What the node has of a claim that holds the name "n".
async fn stored(node: &Server, claim: &Claim) -> Option<String> {
    let command = match claim.mode() {
        Mode::Shared => format!("HGET {{fencelock:n}}:records {}", claim.owner()),
        _ => "GET {fencelock:n}:lock".to_owned(),
    };
    node.command(&command).await
}

/// The client and the attempt by which the node has granted the claim, once that is a later one.
async fn granted_by(node: &Server, claim: &Claim, later_than: u64) -> (String, u64) {
    let mut by = None;
    server::until("the node has the grant", async || {
        by = stored(node, claim).await.and_then(|value| {
            let (client, attempt) = value.split(' ').nth(4)?.split_once('#')?;
            Some((client.to_owned(), attempt.parse().unwrap()))
        });
        by.as_ref().is_some_and(|(_, attempt)| *attempt > later_than)
    })
    .await;
    by.unwrap()
}

#[tokio::test]
async fn a_request_that_arrives_late_changes_nothing_of_what_the_claim_was_granted_since() {
    let nodes = nodes(3);
    let locks = client(&nodes).await;
    let node = &nodes[0];
    for (mode, called) in [(Mode::Exclusive, "x"), (Mode::Shared, "s")] {
        let claim = claim("n", TTL).with_mode(mode);
        let owner = claim.owner().to_string();
        granted(&locks, &claim).await;
        let (client, first) = granted_by(node, &claim, 0).await;
        assert_eq!(locks.release(&claim, None).await.unwrap(), Released::Released);
        granted(&locks, &claim).await;
        granted_by(node, &claim, first).await;
        let (value, first) = (stored(node, &claim).await, first.to_string());
        assert_eq!(late(node, "release", &owner, &[&client, &first, "0"]).await, "lost");
        let acquire = [
            "30000",
            "9999999999999",
            &client,
            &first,
            "7 host",
            "0",
            called,
            "0",
            "0",
        ];
        assert_eq!(late(node, "acquire", &owner, &acquire).await, "granted");
        assert_eq!(stored(node, &claim).await, value);
        // One of another client, which does not know of attempts, is none of an earlier attempt.
        assert_eq!(late(node, "release", &owner, &["another", "0", "0"]).await, "released");
        assert_eq!(stored(node, &claim).await, None);
        locks.release(&claim, None).await.unwrap();
    }
}

#[tokio::test]
async fn a_node_confirms_no_token_that_it_has_drawn_for_another_shared_claim() {
    let nodes = nodes(3);
    // It lets the nodes grant.
    client(&nodes).await;
    let node = &nodes[0];
    let claims = [(); 2].map(|()| claim("n", TTL).with_mode(Mode::Shared));
    let mut tokens = Vec::new();
    for claim in &claims {
        let acquire = ["30000", "9999999999999", "client", "1", "7 host", "0", "s", "0", "0"];
        assert_eq!(
            late(node, "acquire", &claim.owner().to_string(), &acquire).await,
            "granted"
        );
        let value = stored(node, claim).await.unwrap();
        tokens.push(value.split(' ').nth(2).unwrap().to_owned());
    }
    let first = claims[0].owner().to_string();
    for (is_agreed, answer, has) in [("0", "passed", 0), ("1", "confirmed", 1)] {
        let confirm = [&*tokens[0], &tokens[1], is_agreed];
        assert_eq!(late(node, "confirm", &first, &confirm).await, answer);
        assert!(stored(node, &claims[0]).await.unwrap().contains(&tokens[has]));
    }
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
