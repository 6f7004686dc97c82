//! The rights that `docs/redis.md` lists: what they are enough for, the suite shows with each case.

use lock_core::{DistributedLock, LockError};
use lock_redis::RedisConfig;

use crate::server::{Ask, LONG, RedisSentinels, claim, granted, rights, sentinel_of, start};

fn assert_lacks(error: &LockError) {
    assert!(matches!(error, LockError::Configuration { .. }), "{error:?}");
    assert!(format!("{error:#}").contains("lacks a right"), "{error}");
}

#[tokio::test]
async fn a_user_has_one_namespace_and_a_right_that_lacks_is_named() {
    let server = start().await;
    let rights = rights("ACL SETUSER locks");
    let _: () = server.command(&rights).await;
    let config = server.config().credentials("locks", "hunter2");
    // The suite uses no other database.
    config.clone().database(1).connect().await.unwrap();
    let elsewhere = config.clone().namespace("other").connect().await.unwrap_err();
    assert_lacks(&elsewhere);
    for right in ["+info", "+subscribe", "+evalsha", "+set", "+time"] {
        let less = format!("{rights} {}", right.replace('+', "-"));
        let _: () = server.command(&less).await;
        let error = match config.clone().connect().await {
            Ok(lock) => lock.try_acquire(&claim("fresh", LONG)).await.unwrap_err(),
            Err(error) => error,
        };
        assert_lacks(&error);
        assert_eq!(server.leftovers().await, [""; 0]);
    }
}

#[tokio::test]
async fn a_user_of_sentinels_needs_no_more_than_is_listed_and_one_less_is_named() {
    let server = start().await;
    let rights = rights("user watcher");
    for less in ["", "-sentinel|get-master-addr-by-name", "-subscribe", "resetchannels"] {
        let sentinel = sentinel_of(&server, &[format!("{rights} {less}").trim()]).await;
        let address = format!("redis+sentinel://{}/{}", sentinel.authority(), RedisSentinels::SERVICE);
        let config = RedisConfig::from_url(&address).unwrap();
        let connected = config.sentinel_credentials("watcher", "hunter2").connect().await;
        match less.is_empty() {
            true => drop(granted(&connected.unwrap(), &claim("n", LONG)).await),
            false => assert_lacks(&connected.unwrap_err()),
        }
    }
}
