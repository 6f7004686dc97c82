//! Primaries that sentinels know: failovers, and sentinels that are down, hang or disagree. That a holder and a waiter outlast the death of a
//! primary is shown by `conformance-tests`, in `redis_failover`.

use std::future::IntoFuture;
use std::time::Duration;

use lock_core::{DistributedLock, LockError, Locks, Renewal};
use lock_redis::{RedisConfig, RedisLock};

use crate::server::{
    Ask, Data, FakeSentinel, HANG_LIMIT, Kind, LONG, RedisSentinels, Server, claim, granted, pair, start, start_with,
    until, until_renewed,
};

/// After what time without an answer the sentinels take a server for down.
const DOWN_AFTER: Duration = Duration::from_secs(1);

/// A primary, two replicas and three sentinels.
async fn service() -> RedisSentinels {
    let service = RedisSentinels::start(&Kind::LOCAL_REDIS, 2, 3, DOWN_AFTER, &[]);
    service.await.unwrap()
}

async fn client(service: &RedisSentinels) -> RedisLock {
    RedisLock::connect(service.url()).await.unwrap()
}

/// Waits until one of those sentinels names another primary, and returns its number.
async fn until_switched(service: &RedisSentinels, from: usize, sentinels: &[usize]) -> usize {
    let mut now = from;
    until("the sentinels name another primary", async || {
        for sentinel in sentinels {
            now = service.primary_by(&[*sentinel]).await.unwrap_or(from);
            if now != from {
                return true;
            }
        }
        false
    })
    .await;
    now
}

/// How many of the library's connections to that server listen to messages.
async fn subscribed(server: &Server) -> usize {
    let clients: String = server.command("CLIENT LIST TYPE pubsub").await;
    clients.lines().filter(|client| client.contains("resp=3")).count()
}

#[tokio::test]
async fn connections_to_an_old_primary_that_still_answers_are_closed_at_once() {
    let service = service().await;
    let old = service.primary().await.unwrap();
    let (holder, locks) = (client(&service).await, Locks::new(client(&service).await));
    let grant = granted(&holder, &claim("n", LONG)).await;
    let waiting = tokio::spawn(locks.lock("n").ttl(LONG).wait_for(HANG_LIMIT).into_future());
    for server in service.servers() {
        server.until_queued("n", 1).await;
    }
    service.fail_over().await.unwrap();
    let new = until_switched(&service, old, &[0, 1, 2]).await;
    // Each client subscribes to its channel.
    let old = &service.servers()[old];
    until("the clients have left", async || subscribed(old).await == 0).await;
    let role: String = old.command("INFO replication").await;
    assert!(
        role.contains("role:master"),
        "it was demoted before the clients had left it"
    );
    service.servers()[new].until_queued("n", 1).await;
    assert_eq!(holder.renew(&grant.lease).await.unwrap(), Renewal::Renewed);
    holder.release(&grant.claim, None).await.unwrap();
    assert!(waiting.await.unwrap().unwrap().token() > grant.token);
}

#[tokio::test]
async fn tokens_rise_across_failovers_that_lose_locks_and_counters() {
    let service = service().await;
    for sentinel in service.sentinels() {
        // They look at the servers, and tell an old primary of its demotion, much sooner than usual.
        let hurry = "SENTINEL DEBUG info-period 500 publish-period 250";
        let _: () = sentinel.command(hurry).await;
    }
    let locks = client(&service).await;
    let mut last = granted(&locks, &claim("n", LONG)).await.token;
    for failover in 0..3 {
        let old = service.primary().await.unwrap();
        // None of the replicas has what is granted from now on, nor the counter.
        for (number, server) in service.servers().iter().enumerate() {
            if number != old {
                let _: () = server.command("CONFIG SET replica-read-only no").await;
                let _: () = server.command("FLUSHALL").await;
            }
        }
        service.fail_over().await.unwrap();
        until_switched(&service, old, &[0, 1, 2]).await;
        let next = claim("n", LONG);
        let mut token = None;
        until("the lock is granted", async || {
            let attempt = locks.try_acquire(&next).await.ok();
            token = attempt.and_then(|attempt| attempt.granted()).map(|grant| grant.token);
            token.is_some()
        })
        .await;
        assert!(
            token.unwrap() > last,
            "after failover {failover}: {token:?} after {last}"
        );
        last = token.unwrap();
        service.until_whole().await.unwrap();
    }
}

#[tokio::test]
async fn sentinels_that_are_down_or_hang_hold_nothing_up() {
    let service = service().await;
    let old = service.primary().await.unwrap();
    let guard = Locks::new(client(&service).await).lock("n").ttl(LONG).await.unwrap();
    for server in service.servers() {
        server.until_locked("n", true).await;
    }
    let [first, second, _] = service.sentinels() else {
        panic!("three sentinels");
    };
    first.pause().await.unwrap();
    granted(&client(&service).await, &claim("other", LONG)).await;
    // The two others are enough for a failover. A paused primary keeps its connections.
    service.servers()[old].pause().await.unwrap();
    until_switched(&service, old, &[1, 2]).await;
    until_renewed(&guard).await;
    // The one that led the failover may be the only one to know of it so far.
    let new = until_switched(&service, old, &[2]).await;
    // This one still names the old primary.
    first.resume().await.unwrap();
    second.kill().await.unwrap();
    granted(&client(&service).await, &claim("third", LONG)).await;
    service.servers()[new].until_locked("third", true).await;
    // Demoted, it takes the data of the new primary.
    service.servers()[old].resume().await.unwrap();
    service.servers()[old].until_info("replication", "role:slave").await;
    until_renewed(&guard).await;
    second.restart(Data::Kept).await.unwrap();
}

#[tokio::test]
async fn a_named_server_that_is_a_replica_is_not_used() {
    let (_primary, replica) = pair().await;
    let sentinel = [FakeSentinel::naming("127.0.0.1", replica.port(), 0).unwrap()];
    let config = || RedisConfig::from_url(&FakeSentinel::url(&sentinel)).unwrap();
    for allow in [false, true] {
        let config = config()
            .op_timeout(Duration::from_secs(1))
            .allow_unsafe_configuration(allow);
        let error = config.connect().await.unwrap_err();
        assert!(matches!(error, LockError::Unavailable { .. }), "{error:?}");
        assert!(error.to_string().contains("failover"), "{error}");
    }
    // It is promoted while the client asks again and again.
    let connecting = tokio::spawn(config().op_timeout(LONG).connect());
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(!connecting.is_finished());
    replica.follow(None).await;
    granted(&connecting.await.unwrap().unwrap(), &claim("n", LONG)).await;
}

#[tokio::test]
async fn a_sentinel_that_has_missed_a_failover_is_not_believed() {
    let (old, new) = (start().await, start().await);
    let named = [(2, &old), (3, &new), (2, &old)];
    let sentinels = named.map(|(known, server)| FakeSentinel::naming("127.0.0.1", server.port(), known).unwrap());
    let config = RedisConfig::from_url(&FakeSentinel::url(&sentinels)).unwrap();
    let lock = config.op_timeout(Duration::from_secs(2)).connect().await.unwrap();
    let held = granted(&lock, &claim("n", LONG)).await;
    new.until_locked("n", true).await;
    // One of them alone remains.
    for sentinel in &sentinels[..2] {
        sentinel.set_down(true);
    }
    let _: usize = new.command("CLIENT KILL TYPE pubsub").await;
    until("the connection is noticed to have ended", async || {
        lock.renew(&held.lease).await.is_err()
    })
    .await;
    let error = lock.renew(&held.lease).await.unwrap_err();
    assert!(matches!(error, LockError::Unavailable { .. }), "{error:?}");
    assert!(error.to_string().contains("failover"), "{error}");
    sentinels[1].set_down(false);
    assert_eq!(lock.renew(&held.lease).await.unwrap(), Renewal::Renewed);
    // If most of them say so, they were told of another primary.
    sentinels[0].set_down(false);
    sentinels[1].set_down(true);
    let _: usize = new.command("CLIENT KILL TYPE pubsub").await;
    until("the client has moved", async || {
        lock.try_acquire(&claim("m", LONG)).await.is_ok()
    })
    .await;
    old.until_locked("m", true).await;
}

#[tokio::test]
async fn names_and_ipv6_addresses_that_sentinels_tell_are_used() {
    let server = start_with(&["--bind", "127.0.0.1", "::1"]).await;
    for (number, host) in ["localhost", "::1"].into_iter().enumerate() {
        let sentinel = FakeSentinel::naming(host, server.port(), 0).unwrap();
        let lock = RedisLock::connect(FakeSentinel::url(&[sentinel])).await.unwrap();
        granted(&lock, &claim(&format!("n{number}"), LONG)).await;
    }
}
