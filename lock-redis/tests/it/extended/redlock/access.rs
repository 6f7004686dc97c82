//! How nodes are reached: by TLS, with which rights, and what is refused.

use lock_core::{DistributedLock, LockError, Released, Renewal, Wait};
use lock_redis::{RedisConfig, RedlockConfig, RedlockLock};

use super::{TTL, config, granted, nodes};
use crate::server::{BEFORE_6, LONG, Server, answer, claim, name, rights, soon};

async fn refusal(config: RedlockConfig) -> String {
    let error = config.connect().await.unwrap_err();
    assert!(matches!(error, LockError::Configuration { .. }), "{error:?}");
    let text = format!("{error} {error:?}");
    assert!(!text.contains("hunter2"), "{text}");
    error.to_string()
}

#[tokio::test]
async fn a_number_of_nodes_that_cannot_have_a_clear_majority_is_refused() {
    let refused = |count: u16| RedlockConfig::new((1..=count).map(|port| RedisConfig::new("localhost", port)));
    for count in [0, 1, 2, 4, 6, 9] {
        assert!(refusal(refused(count)).await.contains("3, 5 or 7"), "{count}");
    }
}

#[tokio::test]
async fn two_nodes_that_are_the_same_server_are_refused() {
    let nodes = nodes(2);
    let (a, b) = (nodes[0].port(), nodes[1].port());
    let twice = RedlockConfig::from_url(&format!("redlock://127.0.0.1:{a},127.0.0.1:{b},127.0.0.1:{a}")).unwrap();
    assert!(refusal(twice).await.contains("nodes 1 and 3 are the same server"));
    let by_name = RedlockConfig::from_url(&format!("redlock://127.0.0.1:{a},127.0.0.1:{b},localhost:{a}")).unwrap();
    assert!(refusal(by_name).await.contains("nodes 1 and 3 are the same server"));
    let by_database = RedlockConfig::new([
        nodes[0].config(),
        nodes[1].config(),
        RedisConfig::new("localhost", a).database(1),
    ]);
    assert!(refusal(by_database).await.contains("the same server"));
}

#[tokio::test]
async fn a_server_that_is_two_of_the_nodes_is_no_majority_however_late_that_is_found_out() {
    let mut nodes = nodes(2);
    let (a, b) = (nodes[0].port(), nodes[1].port());
    let url = format!("redlock://127.0.0.1:{a},127.0.0.1:{b},localhost:{a}");
    let locks = RedlockConfig::from_url(&url).unwrap().connect_lazy().unwrap();
    nodes[1].kill();
    let error = locks.try_acquire(&claim("n", TTL)).await.unwrap_err();
    assert!(error.to_string().contains("are the same server"), "{error}");
}

#[tokio::test]
async fn a_majority_that_cannot_be_reached_is_named() {
    let mut nodes = nodes(3);
    nodes[0].kill();
    nodes[2].kill();
    let error = config(&nodes).connect().await.unwrap_err();
    assert!(matches!(error, LockError::Unavailable { .. }), "{error:?}");
    let text = error.to_string();
    assert!(text.contains("2 of 3 nodes failed, and a majority is needed"), "{text}");
    for down in [0, 2] {
        assert_eq!(text.matches(&format!(":{}", nodes[down].port())).count(), 1, "{text}");
    }
    assert!(!text.contains(&nodes[1].port().to_string()), "{text}");
    assert!(error.is_retryable());
}

#[tokio::test]
async fn clients_that_disagree_about_the_nodes_are_refused() {
    let nodes = nodes(5);
    let locks = config(&nodes).connect().await.unwrap();
    granted(&locks, &claim("n", TTL)).await;
    let fewer = RedlockConfig::new(nodes[..3].iter().map(Server::config));
    assert!(refusal(fewer.clone()).await.contains("use 5 nodes"));
    let other = fewer.connect_lazy().unwrap();
    let error = other.try_acquire(&claim("m", TTL)).await.unwrap_err();
    assert!(error.to_string().contains("use 5 nodes"), "{error}");
    let longer = config(&nodes).max_ttl(LONG);
    assert!(refusal(longer).await.contains("max_ttl of 60s"));
    locks
        .release(&granted(&locks, &claim("m", TTL)).await.claim, None)
        .await
        .unwrap();
}

#[tokio::test]
async fn one_node_that_is_set_up_wrongly_is_named() {
    let right = nodes(2);
    let with = |node: RedisConfig| RedlockConfig::new([right[0].config(), node, right[1].config()]);
    let locked = Server::with(&["--requirepass", "hunter2"]);
    let text = refusal(with(locked.config())).await;
    assert!(
        text.contains(&locked.port().to_string()) && text.contains("password"),
        "{text}"
    );
    let poor = Server::start();
    let _: String = poor.command("ACL SETUSER joe on >hunter2 ~* &* +@all -subscribe").await;
    let text = refusal(with(poor.config().credentials("joe", "hunter2"))).await;
    assert!(
        text.contains(&poor.port().to_string()) && text.contains("right"),
        "{text}"
    );
    let evicting = Server::with(&["--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"]);
    let error = with(evicting.config()).connect().await.unwrap_err();
    assert!(matches!(error, LockError::UnsafeConfiguration { .. }), "{error:?}");
    assert!(error.to_string().contains(&evicting.port().to_string()), "{error}");
    let old = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = old.local_addr().unwrap().port();
    let refused = refusal(with(RedisConfig::new("127.0.0.1", port)));
    let ((), text) = tokio::join!(answer(&old, &[BEFORE_6]), refused);
    assert!(text.contains(&port.to_string()) && text.contains("6.2"), "{text}");
    let sentinel = Server::sentinel("", &[]);
    let clustered = Server::with(&["--cluster-enabled", "yes"]);
    for (server, kind) in [(sentinel, "Sentinel"), (clustered, "Redis Cluster")] {
        let text = refusal(with(server.config())).await;
        assert!(
            text.contains(&server.port().to_string()) && text.contains(kind) && text.contains("a server of its own"),
            "{text}"
        );
    }
}

#[tokio::test]
async fn every_node_can_have_credentials_of_its_own() {
    let first = Server::with(&["--requirepass", "one"]);
    let second = Server::with(&["--requirepass", "two"]);
    let third = Server::with(&["--requirepass", "one"]);
    let (a, b, c) = (first.port(), second.port(), third.port());
    for url in [
        format!("redlock://:one@127.0.0.1:{a},:two@127.0.0.1:{b},127.0.0.1:{c}"),
        format!("redlock://:one@127.0.0.1:{a},127.0.0.1:{b},127.0.0.1:{c}?node2.password=two"),
    ] {
        let locks = RedlockLock::connect(&url).await.unwrap();
        let grant = granted(&locks, &claim("n", TTL)).await;
        locks.release(&grant.claim, None).await.unwrap();
    }
}

#[tokio::test]
async fn the_rights_in_the_documentation_are_enough_and_one_who_may_only_look_can_look() {
    let nodes = nodes(3);
    for node in &nodes {
        for user in ["locks", "look"] {
            let _: () = node.command(&format!("ACL SETUSER {}", rights(user))).await;
        }
    }
    let as_user = async |user: &str| config(&nodes).credentials(user, "hunter2").connect().await.unwrap();
    // The first client of new nodes is one that may not open them.
    let look = as_user("look").await;
    assert_eq!(look.holders(&name("n")).await.unwrap().pop().map(|_| ()), None);
    let (one, other) = (as_user("locks").await, as_user("locks").await);
    let grant = granted(&one, &claim("n", TTL)).await;
    assert_eq!(one.renew(&grant.lease).await.unwrap(), Renewal::Renewed);
    let wanted = claim("n", TTL);
    let waiting = tokio::spawn({
        let wanted = wanted.clone();
        async move { other.acquire(&wanted, Wait::until(soon())).await.unwrap().granted() }
    });
    assert_eq!(
        look.holders(&name("n"))
            .await
            .unwrap()
            .pop()
            .and_then(|holder| holder.token),
        Some(grant.token)
    );
    assert_eq!(look.list("").await.unwrap().len(), 1);
    assert_eq!(one.release(&grant.claim, None).await.unwrap(), Released::Released);
    let next = waiting.await.unwrap().unwrap();
    assert!(next.token > grant.token);
    let error = look.try_acquire(&claim("m", TTL)).await.unwrap_err();
    assert!(matches!(error, LockError::Configuration { .. }), "{error:?}");
    assert!(error.to_string().contains("lacks a right"), "{error}");
    assert!(one.force_release(&name("n")).await.unwrap().pop().is_some());
}

#[cfg(feature = "tls")]
#[tokio::test]
async fn nodes_are_talked_to_by_tls_if_their_certificates_are_trusted() {
    let secure = super::at_once(3, Server::secure);
    let hosts: Vec<_> = secure.iter().map(|(_, _, port)| format!("localhost:{port}")).collect();
    let ca = |node: usize| secure[node].1.file().display().to_string();
    let own = format!("node2.ca={}&node3.ca={}", ca(1), ca(2));
    let url = format!("redlocks://{}?ca={}&{own}", hosts.join(","), ca(0));
    let locks = RedlockLock::connect(&url).await.unwrap();
    granted(&locks, &claim("n", LONG)).await;
    // One node whose certificate is not trusted is named, although the others would do.
    let url = format!("redlocks://{}?ca={}&node2.ca={}", hosts.join(","), ca(0), ca(1));
    let text = refusal(RedlockConfig::from_url(&url).unwrap()).await;
    assert!(
        text.contains("is of no authority that is trusted") && text.contains(&hosts[2]),
        "{text}"
    );
    let plain = format!("redlock://{}", hosts.join(","));
    let error = RedlockLock::connect(&plain).await.unwrap_err();
    assert!(error.to_string().contains("by a rediss address (redlocks"), "{error}");
}
