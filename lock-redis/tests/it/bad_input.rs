//! Servers, settings and data that are not as they should be: each its own clear refusal, and nothing harmed.

use std::future::IntoFuture;
use std::time::Duration;

use lock_core::{DistributedLock, LockError, Locks, Released, Renewal, Wait};
use lock_redis::{RedisConfig, RedisLock};
use tokio::io::AsyncWriteExt;

use crate::server::{BEFORE_6, HANG_LIMIT, LONG, Server, answer, busy, claim, granted, name, rights, soon, until};

async fn refused(config: RedisConfig) -> LockError {
    let error = config.connect().await.unwrap_err();
    assert!(!format!("{error} {error:?}").contains("hunter2"), "{error:?}");
    error
}

fn assert_configuration(error: &LockError, word: &str) {
    assert!(matches!(error, LockError::Configuration { .. }), "{error:?}");
    assert!(format!("{error:#}").contains(word), "{error}");
}

#[tokio::test]
async fn wrong_credentials_are_said_to_be_wrong() {
    let server = Server::with(&["--requirepass", "secret"]);
    for config in [
        server.config(),
        server.config().password("hunter2"),
        server.config().credentials("joe", "hunter2"),
    ] {
        assert_configuration(&refused(config).await, "user name or the password");
    }
    let url = format!("redis://default:secret@127.0.0.1:{}", server.port());
    granted(&RedisLock::connect(url).await.unwrap(), &claim("n", LONG)).await;
}

#[tokio::test]
async fn a_password_that_is_wrong_for_a_while_ends_no_wait_of_a_client_that_was_connected() {
    let server = Server::start();
    let _: String = server.command("ACL SETUSER joe on >one ~* &* +@all").await;
    let config = || server.config().credentials("joe", "one");
    let locks = Locks::new(config().connect().await.unwrap());
    locks.lock("a").await.unwrap().release().await.unwrap();
    let _: String = server.command("ACL SETUSER joe resetpass >hunter2").await;
    let _: u32 = server.command("CLIENT KILL USER joe").await;
    let waiting = tokio::spawn(locks.lock("a").wait_for(HANG_LIMIT).into_future());
    loop {
        // The end of the connection may be noticed first.
        let refused = locks.lock("b").no_wait().await.unwrap_err();
        assert!(refused.is_retryable(), "{refused:?}");
        if refused.to_string().contains("the password") {
            break;
        }
    }
    assert_configuration(&refused(config()).await, "user name or the password");
    let _: String = server.command("ACL SETUSER joe resetpass >one").await;
    waiting.await.unwrap().unwrap().release().await.unwrap();
}

#[tokio::test]
async fn what_finds_no_server_leaves_nothing_to_release() {
    let server = Server::start();
    let config = server.config();
    drop(server);
    let locks = Locks::new(config.connect_lazy().unwrap());
    for n in 0..100 {
        let error = locks.lock(n.to_string()).no_wait().await.unwrap_err();
        assert!(matches!(error, LockError::Unavailable { .. }), "{error}");
    }
    let stats = locks.stats();
    assert_eq!((stats.releasing, stats.release_errors), (0, 0));
}

#[tokio::test]
async fn a_database_that_is_not_there_is_refused_and_others_are_apart() {
    let server = Server::start();
    assert_configuration(&refused(server.config().database(99)).await, "database");
    let url = |number| format!("redis://127.0.0.1:{}/{number}", server.port());
    for number in [0, 1, 15] {
        granted(&RedisLock::connect(url(number)).await.unwrap(), &claim("n", LONG)).await;
    }
}

#[tokio::test]
async fn what_is_no_redis_is_said_to_be_none() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        loop {
            let (mut client, _) = listener.accept().await.unwrap();
            client.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await.unwrap();
            // Open until the other side closes, so that the answer is not lost.
            tokio::spawn(async move { tokio::io::copy(&mut client, &mut tokio::io::sink()).await });
        }
    });
    assert_configuration(&refused(RedisConfig::new("127.0.0.1", port)).await, "protocol of Redis");
}

#[tokio::test]
async fn a_server_older_than_6_2_is_refused() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let config = RedisConfig::new("127.0.0.1", listener.local_addr().unwrap().port());
    // 6.0 tells its version when it is asked.
    let info = "redis_version:6.0.16\r\nredis_mode:standalone\r\nrole:master\r\nmaxmemory:0\r\n";
    let info = format!("${}\r\n{info}\r\n", info.len());
    let six = [
        "%2\r\n$6\r\nserver\r\n$5\r\nredis\r\n$5\r\nproto\r\n:3\r\n",
        &format!("{info}*2\r\n$10\r\n1700000000\r\n$1\r\n0\r\n"),
    ];
    for answers in [&[BEFORE_6] as &[&str], &six] {
        let ((), error) = tokio::join!(answer(&listener, answers), refused(config.clone()));
        assert!(format!("{error:#}").contains("6.2"), "{error}");
    }
}

#[tokio::test]
async fn a_server_whose_greeting_is_renamed_is_not_called_old() {
    let server = Server::with(&["--rename-command", "HELLO", ""]);
    let error = refused(server.config()).await;
    assert_configuration(&error, "rename-command");
}

#[tokio::test]
async fn a_sentinel_and_a_node_of_a_cluster_are_told_from_a_server() {
    let sentinel = Server::sentinel("", &[]);
    let node = Server::with(&["--cluster-enabled", "yes"]);
    for database in [0, 3] {
        let error = refused(sentinel.config().database(database)).await;
        assert_configuration(
            &error,
            &format!("redis+sentinel://127.0.0.1:{}/SERVICE", sentinel.port()),
        );
        let error = refused(node.config().database(database)).await;
        assert_configuration(&error, &format!("redis+cluster://127.0.0.1:{}", node.port()));
    }
}

#[tokio::test]
async fn eviction_with_a_limit_is_refused_at_connect_and_after_a_reconnect() {
    let server = Server::start();
    let lock = server.client().await;
    let _: () = server.command("CONFIG SET maxmemory-policy allkeys-lru").await;
    server.client().await;
    let _: () = server.command("CONFIG SET maxmemory 100mb").await;
    let error = refused(server.config()).await;
    assert!(matches!(error, LockError::UnsafeConfiguration { .. }), "{error:?}");
    assert!(format!("{error:#}").contains("noeviction"), "{error}");
    server
        .config()
        .allow_unsafe_configuration(true)
        .connect()
        .await
        .unwrap();
    granted(&lock, &claim("n", LONG)).await;
    let _: () = server.command("CLIENT KILL TYPE pubsub").await;
    until("it is refused", async || {
        match lock.try_acquire(&claim("other", LONG)).await {
            Err(LockError::Unavailable { .. }) | Ok(_) => false,
            Err(error) => matches!(error, LockError::UnsafeConfiguration { .. }) || panic!("{error:?}"),
        }
    })
    .await;
}

#[tokio::test]
async fn a_server_that_becomes_a_replica_is_left() {
    let server = Server::start();
    let lock = server.client().await;
    let grant = granted(&lock, &claim("n", LONG)).await;
    let _: () = server.command("REPLICAOF 127.0.0.1 1").await;
    let first = lock.renew(&grant.lease).await.unwrap_err();
    assert!(matches!(first, LockError::Unavailable { .. }), "{first:?}");
    let then = lock.renew(&grant.lease).await.unwrap_err();
    assert!(matches!(then, LockError::Unavailable { .. }), "{then:?}");
    assert!(
        then.to_string()
            .contains("connecting failed: Redis became a read-only replica"),
        "{then}"
    );
    let _: () = server.command("REPLICAOF NO ONE").await;
    assert_eq!(lock.renew(&grant.lease).await.unwrap(), Renewal::Renewed);
}

#[tokio::test]
async fn a_key_of_another_type_is_neither_touched_nor_passed_by() {
    for kind in ["lock", "fence", "order", "holders"] {
        for foreign in ["RPUSH KEY x", "SET KEY x"] {
            let server = Server::start();
            let lock = server.client().await;
            let key = format!("{{fencelock:n}}:{kind}");
            let _: () = server.command(&foreign.replace("KEY", &key)).await;
            for attempt in [
                lock.try_acquire(&claim("n", LONG)).await,
                lock.acquire(&claim("n", LONG), Wait::until(soon())).await,
            ] {
                assert_configuration(&attempt.unwrap_err(), "did not write");
            }
            let left: Vec<String> = server.command("KEYS *").await;
            assert_eq!(left, [key], "no lock without a token, and nothing deleted");
            // Other names are as free as ever.
            granted(&lock, &claim("other", LONG)).await;
        }
    }
}

/// This key is read by who waits alone.
#[tokio::test]
async fn a_key_of_another_type_leaves_who_would_wait_without_a_place() {
    let server = Server::start();
    let lock = server.client().await;
    let held = claim("n", LONG);
    granted(&lock, &held).await;
    let _: () = server.command("SET {fencelock:n}:waiters x").await;
    let error = lock.acquire(&claim("n", LONG), Wait::until(soon())).await.unwrap_err();
    assert_configuration(&error, "did not write");
    assert_eq!(server.command::<u8>("EXISTS {fencelock:n}:order").await, 0);
    busy(&lock, &claim("n", LONG)).await;
    assert_eq!(lock.release(&held, None).await.unwrap(), Released::Released);
}

#[tokio::test]
async fn locks_of_another_type_or_without_text_are_named_and_hide_no_other_from_a_list() {
    let server = Server::start();
    let lock = server.client().await;
    let foreign = [("foreign", "SET", &b"\xff"[..]), ("list", "RPUSH", b"x")];
    for (name, command, value) in foreign {
        let key = format!("{{fencelock:{name}}}:lock");
        let set = lock_redis::redis::cmd(command).arg(key).arg(value).clone();
        server.ask::<()>(&set).await;
    }
    // The order in which the server lists its keys is by chance, and the foreign one must not be the last.
    let names: Vec<_> = (100..120).map(|number| name(&format!("n{number}"))).collect();
    for name in &names {
        granted(&lock, &claim(name.as_str(), LONG)).await;
    }
    let listed = lock.list("").await.unwrap();
    let listed: Vec<_> = listed.into_iter().filter_map(|holder| holder.name).collect();
    assert_eq!(listed, names);
    for (text, ..) in foreign {
        let key = format!("{{fencelock:{text}}}:lock");
        assert_configuration(&lock.holders(&name(text)).await.unwrap_err(), &key);
        let refused = lock.try_acquire(&claim(text, LONG)).await.unwrap_err();
        assert_configuration(&refused, &format!("{{fencelock:{text}}}:"));
    }
}

#[tokio::test]
async fn what_is_held_can_be_released_past_keys_of_another_type() {
    let server = Server::start();
    let lock = server.client().await;
    let mine = claim("n", LONG);
    granted(&lock, &mine).await;
    let _: () = server.command("DEL {fencelock:n}:fence").await;
    let _: () = server.command("RPUSH {fencelock:n}:fence x").await;
    let _: () = server.command("RPUSH {fencelock:n}:order x").await;
    let _: () = server.command("RPUSH {fencelock:n}:waiters x").await;
    assert_eq!(lock.release(&mine, None).await.unwrap(), Released::Released);
    assert_eq!(server.command::<u8>("EXISTS {fencelock:n}:lock").await, 0);
}

#[tokio::test]
async fn the_rights_in_the_documentation_are_for_one_namespace_and_one_less_is_named() {
    let server = Server::start();
    let _: () = server.command(&format!("ACL SETUSER {}", rights("locks"))).await;
    let config = server.config().credentials("locks", "hunter2");
    // What they are enough for, every case of the suite shows, but for another database.
    config.clone().database(1).connect().await.unwrap();
    // Outside of its namespace the user may do nothing.
    let elsewhere = config.clone().namespace("other").connect().await.unwrap_err();
    assert_configuration(&elsewhere, "lacks a right");
    for right in ["+info", "+subscribe", "+evalsha", "+set", "+time"] {
        let less = format!("{} {}", rights("locks"), right.replace('+', "-"));
        let _: () = server.command(&format!("ACL SETUSER {less}")).await;
        let error = match config.clone().connect().await {
            Ok(lock) => lock.try_acquire(&claim("fresh", LONG)).await.unwrap_err(),
            Err(error) => error,
        };
        assert_configuration(&error, "lacks a right");
        let left: Vec<String> = server.command("KEYS *fresh*:lock").await;
        assert!(left.is_empty());
    }
}

#[cfg(unix)]
#[tokio::test]
async fn a_socket_of_this_machine_works_as_well() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("redis.sock");
    let server = Server::with(&["--unixsocket", path.to_str().unwrap(), "--requirepass", "p&w"]);
    let url = format!("redis+unix:{}?password=p%26w&db=3", path.display());
    let lock = RedisLock::connect(&url).await.unwrap();
    granted(&lock, &claim("n", LONG)).await;
    let over_tcp = server.config().password("p&w").database(3).connect().await.unwrap();
    busy(&over_tcp, &claim("n", LONG)).await;
    let missing = refused(RedisConfig::unix(folder.path().join("none"))).await;
    assert!(matches!(missing, LockError::Unavailable { .. }), "{missing:?}");
}

#[tokio::test]
async fn a_client_of_the_redis_crate_tells_where_its_server_is() {
    let server = Server::with(&["--requirepass", "secret"]);
    let url = format!("redis://:secret@127.0.0.1:{}/2", server.port());
    let client = lock_redis::redis::Client::open(url.as_str()).unwrap();
    let lock = RedisConfig::from_client(&client).unwrap().connect().await.unwrap();
    granted(&lock, &claim("n", LONG)).await;
    busy(&RedisLock::connect(&url).await.unwrap(), &claim("n", LONG)).await;
}

#[cfg(feature = "tls")]
mod tls {
    use super::*;
    use crate::server::{Certificate, until_queued};

    const LIMIT: Duration = Duration::from_secs(1);

    #[tokio::test]
    async fn a_server_is_talked_to_by_tls_if_its_certificate_is_trusted() {
        let (server, certificate, port) = Server::secure();
        let (ca, folder) = (certificate.file(), certificate.folder());
        let url = format!("rediss://localhost:{port}?ca={}", ca.display());
        let lock = RedisLock::connect(&url).await.unwrap();
        granted(&lock, &claim("n", LONG)).await;
        busy(&server.client().await, &claim("n", LONG)).await;
        // Not trusted; not the name in the certificate; no TLS on one side or the other; no such file.
        let strange = refused(RedisConfig::tls("localhost", port)).await;
        assert_configuration(&strange, "ca=FILE");
        let other_name = refused(RedisConfig::tls("127.0.0.1", port).trust(&ca)).await;
        assert_configuration(&other_name, "is not for the host 127.0.0.1, but for");
        let plain = refused(
            RedisConfig::tls("localhost", server.port())
                .trust(&ca)
                .op_timeout(LIMIT),
        )
        .await;
        assert!(format!("{plain:#}").contains("instead of rediss:"), "{plain:#}");
        let no_tls = refused(RedisConfig::new("localhost", port)).await;
        assert!(no_tls.to_string().contains("by a rediss address"), "{no_tls:?}");
        let no_file = refused(RedisConfig::tls("localhost", port).trust(folder.join("none"))).await;
        assert_configuration(&no_file, "none");
        let empty = folder.join("empty.pem");
        std::fs::write(&empty, "").unwrap();
        assert_configuration(
            &refused(RedisConfig::tls("localhost", port).trust(empty)).await,
            "no certificate",
        );
    }

    #[tokio::test]
    async fn a_server_that_wants_certificates_of_clients_gets_one_and_ends_waits_without_any() {
        let (server, certificate, port) = Server::secure();
        let (ca, key) = (certificate.file(), certificate.folder().join("key.pem"));
        let config = || RedisConfig::tls("localhost", port).trust(&ca);
        let locks = Locks::new(config().connect().await.unwrap());
        let _held = Locks::new(server.client().await).lock("n").await.unwrap();
        let waiting = tokio::spawn(locks.lock("n").into_future());
        until_queued(&server, "n", 1).await;
        let _: String = server.command("CONFIG SET tls-auth-clients yes").await;
        let bare = refused(config()).await;
        assert_configuration(&bare, "give one with cert=FILE and key=FILE");
        assert_configuration(&bare, "tls-auth-clients");
        let url = format!(
            "rediss://localhost:{port}?ca={}&cert={}&key={}",
            ca.display(),
            ca.display(),
            key.display()
        );
        granted(&RedisLock::connect(&url).await.unwrap(), &claim("m", LONG)).await;
        let stranger = Certificate::new(&[]);
        let strange = config().client_certificate(stranger.file(), stranger.folder().join("key.pem"));
        assert_configuration(&refused(strange).await, "refused the client's certificate");
        // Only a person can mend it, so a wait without a limit ends.
        let _: u32 = server.command("CLIENT KILL TYPE normal").await;
        let _: u32 = server.command("CLIENT KILL TYPE pubsub").await;
        let ended = tokio::time::timeout(HANG_LIMIT, waiting).await.expect("the wait ends");
        assert_configuration(&ended.unwrap().unwrap_err(), "cert=FILE and key=FILE");
    }
}

#[tokio::test]
async fn what_hangs_up_may_be_another_service() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    // As Postgres does when it is greeted by a client of Redis.
    tokio::spawn(async move { while listener.accept().await.is_ok() {} });
    let error = refused(RedisConfig::new("127.0.0.1", port)).await;
    let said = format!("{error:#}");
    assert!(
        said.contains("see that host and port are those of a Redis server"),
        "{said}"
    );
    assert!(!said.contains("::"), "{said}");
}
