//! Failovers of a Redis 8 that sentinels watch, as a user of the facade meets them.

use std::time::{Duration, Instant};

use test_servers::{Data, Kind, RedisSentinels};

/// After what time without an answer sentinels take a server for down.
const DOWN_AFTER: Duration = Duration::from_secs(1);

/// Longer than any failover.
const LONG: Duration = Duration::from_secs(120);

async fn until(what: &str, mut is_so: impl AsyncFnMut() -> bool) {
    let end = Instant::now() + LONG;
    while !is_so().await {
        assert!(Instant::now() < end, "waited in vain until {what}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test]
async fn a_holder_keeps_its_lock_and_a_waiter_its_place_when_the_primary_is_killed() {
    let service = RedisSentinels::start(&Kind::REDIS, 2, 3, DOWN_AFTER, &[])
        .await
        .unwrap();
    let (locks, others) = (
        fencelock::connect(service.url()).await.unwrap(),
        fencelock::connect(service.url()).await.unwrap(),
    );
    let held = locks.lock("n").ttl(LONG).await.unwrap();
    let waiting = tokio::spawn(others.lock("n").ttl(LONG).wait_for(LONG).into_future());
    // On the replicas, too, one of which is promoted.
    for server in service.servers() {
        until("the waiter waits", async || {
            server.redis("ZCARD {fencelock:n}:order").await.unwrap() == "1"
        })
        .await;
    }
    let old = service.primary().await.unwrap();
    let killed = Instant::now();
    service.servers()[old].kill().await.unwrap();
    until("the sentinels name another primary", async || {
        service.primary().await.unwrap() != old
    })
    .await;
    let replaced = killed.elapsed();
    until("the lock is renewed", async || held.renew_now().await.is_ok()).await;
    println!("replaced after {replaced:?}, renewed after {:?}", killed.elapsed());
    assert!(held.is_held());
    let token = held.token();
    held.release().await.unwrap();
    let next = waiting.await.unwrap().unwrap();
    assert!(next.token() > token);
    // The killed server comes back as a primary, and is demoted; the holder stays where it is.
    service.servers()[old].restart(Data::Kept).await.unwrap();
    until("the lock is renewed", async || next.renew_now().await.is_ok()).await;
    assert!(next.is_held());
    assert!(locks.try_lock("n").await.unwrap().is_none());
}

#[tokio::test]
async fn the_facade_refuses_what_is_wrong_in_an_address_of_sentinels_and_repeats_no_secret() {
    let service = RedisSentinels::start(&Kind::REDIS, 0, 1, LONG, &[]).await.unwrap();
    let [sentinel, server] = [&service.sentinels()[0], &service.servers()[0]].map(|it| it.authority().to_owned());
    for (url, word) in [
        (format!("redis://:hunter2@{sentinel}"), service.url()),
        (
            format!("redis+sentinel://{sentinel}/hers"),
            RedisSentinels::SERVICE.to_owned(),
        ),
        (
            format!("redis+sentinel://{server}/s?sentinel_password=hunter2"),
            format!("redis://{server}"),
        ),
        (
            format!("redis+sentinel://joe:hunter2@{sentinel}/s/hunter2"),
            "not a number".to_owned(),
        ),
    ] {
        let error = fencelock::connect(&url).await.unwrap_err();
        assert!(!format!("{error:#} {error:?}").contains("hunter2"), "{error:?}");
        assert!(error.to_string().contains(&word), "{error}");
    }
}
