//! How sentinels are named, logged in to and reached by TLS, and what is said of a wrong configuration.

use lock_core::LockError;
use lock_redis::{RedisConfig, RedlockConfig};
use tokio::io::copy_bidirectional;

use crate::server::{self, FakeSentinel, LONG, SERVICE, Server, claim, granted};

async fn refused(config: RedisConfig) -> LockError {
    let error = config.connect().await.unwrap_err();
    assert!(!format!("{error} {error:#} {error:?}").contains("hunter2"), "{error:?}");
    error
}

fn assert_configuration(error: &LockError, words: &[&str]) {
    assert!(matches!(error, LockError::Configuration { .. }), "{error:?}");
    for word in words {
        assert!(error.to_string().contains(word), "{word}: {error}");
    }
}

#[tokio::test]
async fn names_and_ipv6_addresses_that_sentinels_tell_are_used() {
    let named = Server::start();
    let of = "sentinel resolve-hostnames yes\nsentinel announce-hostnames yes";
    let configuration = format!("{of}\nsentinel monitor {SERVICE} localhost {} 1\n", named.port());
    let sentinel = Server::sentinel(&configuration, &[]);
    let told: Vec<String> = sentinel
        .command(&format!("SENTINEL GET-MASTER-ADDR-BY-NAME {SERVICE}"))
        .await;
    assert_eq!(told[0], "localhost");
    let lock = server::sentinels_config(&[&sentinel]).connect().await.unwrap();
    granted(&lock, &claim("n", LONG)).await;
    named.until_locked("n", true).await;

    let listener = tokio::net::TcpListener::bind("[::1]:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let target = named.port();
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let mut server = tokio::net::TcpStream::connect(("127.0.0.1", target)).await.unwrap();
            tokio::spawn(async move { copy_bidirectional(&mut client, &mut server).await });
        }
    });
    let sentinel = FakeSentinel::naming("::1", port);
    let config = RedisConfig::sentinel([("127.0.0.1", sentinel.port())], SERVICE);
    granted(&config.connect().await.unwrap(), &claim("six", LONG)).await;
    named.until_locked("six", true).await;
}

#[tokio::test]
async fn a_wrong_service_and_what_is_no_sentinel_are_told_with_what_to_use() {
    let server = Server::start();
    let sentinels = [0, 1].map(|_| server::sentinel(server.port(), ""));
    let port = |server: &Server| server.port();
    let at =
        |ports: &[u16], service: &str| RedisConfig::sentinel(ports.iter().map(|port| ("127.0.0.1", *port)), service);
    let ports: Vec<_> = sentinels.iter().map(port).collect();
    let error = refused(at(&ports, "hers")).await;
    assert_configuration(&error, &["\"hers\"", SERVICE]);
    let error = refused(at(&[server.port()], SERVICE)).await;
    assert_configuration(&error, &[&format!("redis://127.0.0.1:{}", server.port())]);
    let error = refused(sentinels[0].config()).await;
    assert_configuration(&error, &[&format!("redis+sentinel://127.0.0.1:{}/{SERVICE}", ports[0])]);
    let error = refused(at(&[], SERVICE)).await;
    assert_configuration(&error, &["sentinel"]);
    // A database that the servers lack is as wrong as without sentinels.
    let error = refused(at(&ports, SERVICE).database(99)).await;
    assert_configuration(&error, &["no database"]);
    // Those that run count, and those that do not are named.
    let error = refused(at(&[1, 2], SERVICE)).await;
    assert!(matches!(error, LockError::Unavailable { .. }), "{error:?}");
    assert!(error.to_string().contains("127.0.0.1:1, 127.0.0.1:2"), "{error}");
    let error = RedlockConfig::new((0..3).map(|_| at(&ports, SERVICE)))
        .connect_lazy()
        .unwrap_err();
    assert_configuration(&error, &["each server"]);
}

#[tokio::test]
async fn each_wrong_password_is_told_apart() {
    let server = Server::with(&["--requirepass", "secret"]);
    let of = format!(
        "requirepass guard\nsentinel monitor {SERVICE} 127.0.0.1 {} 1\nsentinel auth-pass {SERVICE} secret\n",
        server.port()
    );
    let sentinel = Server::sentinel(&of, &[]);
    let url = |login: &str, parameters: &str| {
        let url = format!(
            "redis+sentinel://{login}127.0.0.1:{}/{SERVICE}?{parameters}",
            sentinel.port()
        );
        RedisConfig::from_url(&url).unwrap()
    };
    let right = url(":secret@", "sentinel_password=guard");
    granted(&right.connect().await.unwrap(), &claim("n", LONG)).await;
    let error = refused(url(":secret@", "")).await;
    assert_configuration(&error, &["wants a password", "sentinel_password"]);
    for wrong in [
        "sentinel_password=hunter2",
        "sentinel_user=joe&sentinel_password=hunter2",
    ] {
        let error = refused(url(":secret@", wrong)).await;
        assert_configuration(&error, &["the sentinel at 127.0.0.1", "refused", "sentinel_password"]);
    }
    for wrong in ["", ":hunter2@", "joe:hunter2@"] {
        let error = refused(url(wrong, "sentinel_password=guard")).await;
        let place = format!("the server at 127.0.0.1:{}", server.port());
        assert_configuration(
            &error,
            &["refused the user name or the password", &place, "USER:PASSWORD@"],
        );
    }
}

/// The rights of a sentinel's user, as `docs/redis.md` lists them.
fn least_rights() -> String {
    let page = include_str!("../../../../docs/redis.md");
    let (_, rule) = page.split_once("user watcher ").unwrap();
    let (rule, _) = rule.split_once("```").unwrap();
    let words: Vec<_> = rule.split_whitespace().collect();
    format!("user watcher {}", words.join(" ").replace("PASSWORD", "guard"))
}

#[tokio::test]
async fn the_rights_in_the_documentation_are_enough_for_sentinels_and_one_less_is_named() {
    let server = Server::start();
    for less in [
        "",
        " -sentinel|get-master-addr-by-name",
        " -subscribe",
        " resetchannels",
    ] {
        let of = format!(
            "{}{less}\nsentinel monitor {SERVICE} 127.0.0.1 {} 1\n",
            least_rights(),
            server.port()
        );
        let sentinel = Server::sentinel(&of, &[]);
        let config = server::sentinels_config(&[&sentinel]).sentinel_credentials("watcher", "guard");
        if less.is_empty() {
            granted(&config.clone().connect().await.unwrap(), &claim("n", LONG)).await;
        } else {
            assert_configuration(&refused(config).await, &["lacks a right", "docs/redis.md"]);
        }
    }
}

#[cfg(feature = "tls")]
mod tls {
    use std::time::Duration;

    use crate::server::until;
    use lock_core::{DistributedLock, Released};
    use lock_redis::RedisLock;

    use super::*;

    #[tokio::test]
    async fn sentinels_and_servers_are_talked_to_by_tls_also_after_a_failover() {
        let certificate = server::Certificate::new(&["127.0.0.1"]);
        let (primary, first) = certificate.arguments();
        let (replica, second) = certificate.arguments();
        let (sentinel, port) = certificate.arguments();
        fn words(arguments: &[String]) -> Vec<&str> {
            arguments.iter().map(String::as_str).collect()
        }
        let at = first.to_string();
        let primary = Server::with(&[&["--repl-diskless-sync-delay", "0"], &*words(&primary)].concat());
        let replica = Server::with(&[&["--replicaof", "127.0.0.1", &at], &*words(&replica)].concat());
        primary.until_info("replication", "state=online").await;
        let watches = format!("sentinel monitor {SERVICE} 127.0.0.1 {first} 1\n");
        let sentinel = Server::sentinel(&watches, &words(&sentinel));
        server::until_following(&sentinel, 1).await;
        let ca = certificate.file();
        let url = format!("rediss+sentinel://localhost:{port}/{SERVICE}?ca={}", ca.display());
        let lock = RedisLock::connect(&url).await.unwrap();
        let held = claim("n", LONG);
        let grant = granted(&lock, &held).await;
        replica.until_locked("n", true).await;
        server::fail_over(&sentinel).await;
        until("the sentinel names the replica", async || {
            let named: Vec<String> = sentinel
                .command(&format!("SENTINEL GET-MASTER-ADDR-BY-NAME {SERVICE}"))
                .await;
            named[1] == second.to_string()
        })
        .await;
        until("the lock is renewed", async || lock.renew(&grant.lease).await.is_ok()).await;
        assert_eq!(lock.release(&held, None).await.unwrap(), Released::Released);
        replica.until_locked("n", false).await;
        let untrusted = RedisConfig::sentinel_tls([("localhost", port)], SERVICE);
        assert_configuration(&refused(untrusted).await, &["ca=FILE"]);
        let plain = RedisConfig::sentinel([("localhost", port)], SERVICE).op_timeout(Duration::from_secs(2));
        let error = refused(plain).await;
        assert!(format!("{error:#}").contains("rediss"), "{error:#}");
        drop(primary);
    }
}
