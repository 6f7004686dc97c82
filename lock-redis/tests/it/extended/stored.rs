//! What lies on the server from before, and ends.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use lock_core::OwnerId;

use crate::server::{LONG, Server, busy, claim, granted, until, waited};

#[tokio::test]
async fn a_lease_goes_on_while_the_server_is_down() {
    let mut server = Server::with(&["--appendonly", "yes"]);
    let lock = server.client().await;
    let ttl = Duration::from_millis(500);
    granted(&lock, &claim("n", ttl)).await;
    server.until_written().await;
    server.kill();
    tokio::time::sleep(ttl).await;
    server.revive();
    granted(&server.client().await, &claim("n", LONG)).await;
}

/// The first version kept its waiters in one hash, `:queue`, and its counters for a day.
#[tokio::test]
async fn what_an_older_version_left_is_respected_and_ends() {
    let server = Server::start();
    let lock = server.client().await;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let (holder, waiter) = (OwnerId::random(), OwnerId::random());
    let (token, millis) = (now.as_micros() + 3_600_000_000, now.as_millis());
    for words in [
        format!(
            "SET {{fencelock:n}}:lock 1|{holder}|{token}|{}|client|7|host PX 5000",
            now.as_micros()
        ),
        format!("SET {{fencelock:n}}:fence {token} PX 90000000"),
        format!(
            "HSET {{fencelock:n}}:queue head 1 tail 1 1 {waiter} {waiter} 1|1|{}|7000|7|7000|client|7|host",
            millis + 7000
        ),
        "PEXPIRE {fencelock:n}:queue 7000".to_owned(),
    ] {
        let mut command = lock_redis::redis::Cmd::new();
        words.split(' ').for_each(|word| {
            command.arg(word.replace('|', " "));
        });
        let _: lock_redis::redis::Value = server.ask(&command).await;
    }
    let found = busy(&lock, &claim("n", LONG)).await.holder.unwrap();
    assert_eq!((found.owner, found.pid), (Some(holder), Some(7)));
    // Nobody refreshes the older waiter: it is not in the way.
    let grant = waited(&lock, &claim("n", LONG)).await;
    assert!(u128::from(grant.token.get()) > token);
    until("the older queue has ended", async || {
        !server.command::<bool>("EXISTS {fencelock:n}:queue").await
    })
    .await;
}
