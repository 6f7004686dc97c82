//! How a cluster is reached: by TLS, with which rights, and what is refused.

use lock_core::{DistributedLock, LockError, Released, Renewal};
use lock_redis::{RedisConfig, RedisLock};

use super::TTL;
use crate::server::{Cluster, Server, claim, granted, name, rights, waiting};

async fn refusal(config: RedisConfig) -> String {
    let error = config.connect().await.unwrap_err();
    assert!(matches!(error, LockError::Configuration { .. }), "{error:?}");
    let text = format!("{error} {error:?}");
    assert!(!text.contains("hunter2"), "{text}");
    error.to_string()
}

#[tokio::test]
async fn what_is_no_cluster_is_refused_with_the_address_to_use() {
    let server = Server::start();
    let text = refusal(RedisConfig::cluster([("127.0.0.1", server.port())])).await;
    assert!(
        text.contains("no node of a cluster") && text.contains("redis:"),
        "{text}"
    );
    let sentinel = Server::sentinel("", &[]);
    let text = refusal(RedisConfig::cluster([("127.0.0.1", sentinel.port())])).await;
    let address = format!("redis+sentinel://127.0.0.1:{}", sentinel.port());
    assert!(text.contains(&address), "{text}");
    let cluster = Cluster::with(3, false, &[]).await;
    let error = cluster.seed(1).connect().await.unwrap_err();
    assert!(matches!(error, LockError::Configuration { .. }), "{error:?}");
    let address = format!("redis+cluster://127.0.0.1:{}", cluster.nodes[1].port());
    assert!(error.to_string().contains(&address), "{error}");
    let lock = RedisLock::connect(&address).await.unwrap();
    granted(&lock, &claim("n", TTL)).await;
}

#[tokio::test]
async fn wrong_settings_are_refused_and_nodes_that_do_not_answer_are_named() {
    assert!(refusal(RedisConfig::cluster([("", 0); 0])).await.contains("give one"));
    let with = RedisConfig::cluster([("localhost", 1)]).database(2);
    assert!(refusal(with).await.contains("no database 2"));
    // Nothing listens on these ports.
    let error = RedisLock::connect("redis+cluster://127.0.0.1:1,127.0.0.1:2")
        .await
        .unwrap_err();
    assert!(matches!(error, LockError::Unavailable { .. }), "{error:?}");
    let text = error.to_string();
    assert!(
        text.contains("127.0.0.1:1, 127.0.0.1:2") && text.contains("no node"),
        "{text}"
    );
}

#[tokio::test]
async fn credentials_are_for_all_nodes_and_wrong_ones_are_refused() {
    let cluster = Cluster::with(3, false, &[]).await;
    for node in &cluster.nodes {
        let _: () = node.command("ACL SETUSER joe on >hunter2 ~* &* +@all").await;
    }
    let wrong = cluster.config().credentials("joe", "hunter2x");
    assert!(refusal(wrong).await.contains("password"));
    let lock = cluster.config().credentials("joe", "hunter2").connect().await.unwrap();
    for number in 0..10 {
        granted(&lock, &claim(&number.to_string(), TTL)).await;
    }
}

#[tokio::test]
async fn one_seed_that_answers_is_enough() {
    let cluster = Cluster::with(3, false, &[]).await;
    let seeds = [1, cluster.nodes[2].port()].map(|port| ("127.0.0.1", port));
    let lock = RedisConfig::cluster(seeds).connect().await.unwrap();
    granted(&lock, &claim("n", TTL)).await;
}

#[tokio::test]
async fn the_rights_in_the_documentation_are_enough() {
    let cluster = Cluster::with(3, false, &[]).await;
    for node in &cluster.nodes {
        let _: () = node.command(&format!("ACL SETUSER {}", rights("nodes"))).await;
    }
    let client = async || {
        let config = cluster.config().credentials("nodes", "hunter2");
        config.connect().await.unwrap()
    };
    let lock = client().await;
    let held = granted(&lock, &claim("n", TTL)).await;
    let wait = waiting(&client().await, &claim("n", TTL));
    cluster.until_queued("n", 1).await;
    assert_eq!(lock.renew(&held.lease).await.unwrap(), Renewal::Renewed);
    let slot = cluster.slot("n").await;
    let from = cluster.owner(slot).await;
    let to = (from + 1) % 3;
    cluster.open_slot(slot, from, to).await;
    cluster.move_keys(slot, from, to).await;
    assert_eq!(lock.renew(&held.lease).await.unwrap(), Renewal::Renewed);
    cluster.close_slot(slot, from, to).await;
    assert_eq!(lock.release(&held.claim, None).await.unwrap(), Released::Released);
    let next = wait.await.unwrap();
    lock.force_release(&name("n")).await.unwrap().pop().unwrap();
    assert_eq!(lock.renew(&next.lease).await.unwrap(), Renewal::NotHeld);
    let held = granted(&lock, &claim("n", TTL)).await;
    assert_eq!(lock.reserve(&held.claim, TTL * 2).await.unwrap(), Renewal::Renewed);
    assert_eq!(lock.list("").await.unwrap().len(), 1);
    assert_eq!(lock.server_info().await.unwrap().warnings, [""; 0]);
}

#[cfg(feature = "tls")]
#[tokio::test]
async fn all_nodes_are_reached_by_tls_under_the_names_that_they_announce() {
    let (cluster, certificate) = Cluster::secure().await;
    let (port, ca) = (cluster.tls_port(0), certificate.file());
    let address = format!("rediss+cluster://localhost:{port}?ca={}", ca.display());
    let (one, other) = (
        RedisLock::connect(&address).await.unwrap(),
        RedisLock::connect(&address).await.unwrap(),
    );
    for number in 0..10 {
        let text = number.to_string();
        let held = granted(&one, &claim(&text, TTL)).await;
        let wait = waiting(&other, &claim(&text, TTL));
        cluster.until_queued(&text, 1).await;
        assert_eq!(one.release(&held.claim, None).await.unwrap(), Released::Released);
        assert!(wait.await.unwrap().token > held.token);
    }
    let untrusted = RedisConfig::from_url(&format!("rediss+cluster://localhost:{port}")).unwrap();
    assert!(refusal(untrusted).await.contains("ca=FILE"));
}
