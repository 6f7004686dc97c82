//! Addresses and servers that are wrong: each its own clear refusal.

use lock_core::LockError;
use lock_redis::RedisLock;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use crate::server::{RedisSentinels, sentinel_of, start, start_sentinel, start_with};

/// Connects to the address, and returns the error. `hunter2` is a secret in all of them.
pub(crate) async fn refused(url: &str) -> LockError {
    let connected = match url.starts_with("redlock") {
        true => RedisLock::connect(url).await.map(drop),
        false => RedisLock::connect(url).await.map(drop),
    };
    let error = connected.expect_err(url);
    assert!(!format!("{error:#} {error:?}").contains("hunter2"), "{error:?}");
    error
}

/// Connects to each address, and looks for words in the error, which `|` separates. A kind of error may stand before them and a colon: that is
/// `Configuration` if there is none, and any if it is empty.
pub(crate) async fn are_refused<const N: usize>(wrong: [(String, &str); N]) {
    for (url, words) in wrong {
        let error = refused(&url).await;
        let (wanted, words) = words.split_once(": ").unwrap_or(("Configuration", words));
        let kind = match &error {
            LockError::Configuration { .. } => "Configuration",
            LockError::UnsafeConfiguration { .. } => "UnsafeConfiguration",
            LockError::Unavailable { .. } => "Unavailable",
            _ => "another",
        };
        assert!(wanted.is_empty() || wanted == kind, "{url}: {kind}: {error:?}");
        for word in words.split('|') {
            assert!(format!("{error:#}").contains(word), "{url}: {word}: {error:#}");
        }
    }
}

/// Listens, and answers the first request of each client with that, or closes the connection at once if it is empty.
async fn listener(says: &'static str) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            tokio::spawn(async move {
                if !says.is_empty() && client.read(&mut [0; 4096]).await.is_ok() {
                    client.write_all(says.as_bytes()).await.unwrap();
                    // Open until the other side closes, so that the answer is not lost.
                    let _ = tokio::io::copy(&mut client, &mut tokio::io::sink()).await;
                }
            });
        }
    });
    address
}

#[tokio::test]
async fn a_server_that_is_not_what_the_address_says_is_refused_with_what_to_do() {
    const SERVICE: &str = RedisSentinels::SERVICE;
    let [server, other] = [start().await, start().await];
    let locked = start_with(&["--requirepass", "secret"]).await;
    let renamed = start_with(&["--rename-command", "HELLO", ""]).await;
    let evicting = start_with(&["--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"]).await;
    let replica = start_with(&["--replicaof", "127.0.0.1", "1"]).await;
    let node = start_with(&["--cluster-enabled", "yes"]).await;
    let sentinel = sentinel_of(&server, &[]).await;
    let guarded = [&*format!("sentinel auth-pass {SERVICE} secret"), "requirepass guard"];
    let guarded = sentinel_of(&locked, &guarded).await;
    let bare = start_sentinel(&[]).await;
    let [old, http, rude] = [
        listener("-ERR unknown command `HELLO`, with args beginning with: `3`, \r\n").await,
        listener("HTTP/1.1 400 Bad Request\r\n\r\n").await,
        // As Postgres does when it is greeted by a client of Redis.
        listener("").await,
    ];
    let [
        server,
        other,
        locked,
        renamed,
        evicting,
        replica,
        node,
        sentinel,
        guarded,
        bare,
    ] = [
        &server, &other, &locked, &renamed, &evicting, &replica, &node, &sentinel, &guarded, &bare,
    ]
    .map(|server| server.authority());
    let same = server.replace("127.0.0.1", "localhost");
    are_refused([
        (format!("redis://{locked}"), "user name or the password"),
        (format!("redis://:hunter2@{locked}"), "user name or the password"),
        (format!("redis://joe:hunter2@{locked}"), "user name or the password"),
        (format!("redis://{server}/99"), "no database"),
        (format!("redis://{old}"), "6.2"),
        (format!("redis://{http}"), "protocol of Redis"),
        (
            format!("redis://{rude}"),
            ": see that host and port are those of a Redis server",
        ),
        (format!("redis://{renamed}"), "rename-command"),
        (format!("redis://{evicting}"), "UnsafeConfiguration: noeviction"),
        (format!("redis://{replica}"), "UnsafeConfiguration: primary"),
        (
            format!("redis://{sentinel}"),
            &format!("redis+sentinel://{sentinel}/{SERVICE}"),
        ),
        (
            format!("redis://{sentinel}/3"),
            &format!("redis+sentinel://{sentinel}/{SERVICE}"),
        ),
        (format!("redis://{bare}"), &format!("redis+sentinel://{bare}/SERVICE")),
        (format!("redis://{node}"), &format!("redis+cluster://{node}")),
        (format!("redis://{node}/3"), &format!("redis+cluster://{node}")),
        ("redis+unix:/none?password=hunter2".to_owned(), "Unavailable: /none"),
        (
            format!("redis+sentinel://{sentinel}/hers"),
            &format!("\"hers\"|{SERVICE}"),
        ),
        (format!("redis+sentinel://{server}/s"), &format!("redis://{server}")),
        (format!("redis+sentinel://{sentinel}/{SERVICE}/99"), "no database"),
        // Those that run count, and those that do not are named.
        (
            "redis+sentinel://127.0.0.1:1,127.0.0.1:2/s".to_owned(),
            "Unavailable: 127.0.0.1:1, 127.0.0.1:2",
        ),
        (
            format!("redis+sentinel://:secret@{guarded}/{SERVICE}"),
            "wants a password|sentinel_password",
        ),
        (
            format!("redis+sentinel://:secret@{guarded}/{SERVICE}?sentinel_password=hunter2"),
            &format!("the sentinel at {guarded}|refused|sentinel_password"),
        ),
        (
            format!("redis+sentinel://{guarded}/{SERVICE}?sentinel_password=guard"),
            &format!("the server at {locked}|refused the user name or the password|USER:PASSWORD@"),
        ),
        (
            format!("redis+sentinel://joe:hunter2@{guarded}/{SERVICE}?sentinel_password=guard"),
            &format!("the server at {locked}|refused the user name or the password|USER:PASSWORD@"),
        ),
        (format!("redis+cluster://{server}"), "no node of a cluster|redis:"),
        (
            format!("redis+cluster://{sentinel}"),
            &format!("redis+sentinel://{sentinel}"),
        ),
        (format!("redis+cluster://joe:hunter2@{node}"), "password"),
        ("redis+cluster://localhost:1/2".to_owned(), "no database 2"),
        (
            "redis+cluster://127.0.0.1:1,127.0.0.1:2".to_owned(),
            "Unavailable: 127.0.0.1:1, 127.0.0.1:2|no node",
        ),
        (format!("redlock://{server},{other}"), "3, 5 or 7"),
        (
            format!("redlock://{server},{other},{server}"),
            "nodes 1 and 3 are the same server",
        ),
        (
            format!("redlock://{server},{other},{same}"),
            "nodes 1 and 3 are the same server",
        ),
        (
            format!("redlock://{server},{locked},{other}"),
            &format!("{locked}|password"),
        ),
        (
            format!("redlock://{server},{evicting},{other}"),
            &format!("UnsafeConfiguration: {evicting}"),
        ),
        (format!("redlock://{server},{old},{other}"), &format!("{old}|6.2")),
        (
            format!("redlock://{server},{sentinel},{other}"),
            &format!("{sentinel}|Sentinel|a server of its own"),
        ),
        (
            format!("redlock://{server},{node},{other}"),
            &format!("{node}|Redis Cluster|a server of its own"),
        ),
        (
            format!("redlock://{server},127.0.0.1:1,127.0.0.1:2"),
            "Unavailable: 2 of 3 nodes failed, and a majority is needed|127.0.0.1:1|127.0.0.1:2",
        ),
    ])
    .await;
}
