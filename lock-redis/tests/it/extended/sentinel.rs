//! Primaries that sentinels know: failovers, and sentinels that are down, hang or disagree.

use std::time::{Duration, Instant};

use lock_core::{DistributedLock, LockError, Locks, Renewal};
use lock_redis::{RedisConfig, RedisLock};
use rustix::process::Signal;

use crate::server::{
    self, FakeSentinel, HANG_LIMIT, LONG, SERVICE, Server, Service, claim, granted, until, until_queued, until_renewed,
};

async fn refused(config: RedisConfig) -> LockError {
    let error = config.connect().await.unwrap_err();
    assert!(!format!("{error} {error:#} {error:?}").contains("hunter2"), "{error:?}");
    error
}

/// Waits until the lock of that name is on both replicas of the primary.
async fn until_replicated(service: &Service, name: &str) {
    for server in &service.servers {
        server.until_locked(name, true).await;
    }
}

#[tokio::test]
async fn the_primary_is_found_whichever_sentinels_are_named_and_one_is_enough() {
    let service = Service::start().await;
    let primary = service.primary().await;
    let url = |sentinels: &[&Server]| {
        let hosts: Vec<_> = sentinels.iter().map(|s| format!("127.0.0.1:{}", s.port())).collect();
        format!("redis+sentinel://{}/{SERVICE}", hosts.join(","))
    };
    let [a, b, c] = &service.sentinels[..] else {
        panic!("three sentinels")
    };
    for (number, sentinels) in [&[a, b, c][..], &[c], &[b, a]].into_iter().enumerate() {
        let lock = RedisLock::connect(url(sentinels)).await.unwrap();
        let name = format!("n{number}");
        granted(&lock, &claim(&name, LONG)).await;
        service.servers[primary].until_locked(&name, true).await;
    }
}

#[tokio::test]
async fn a_waiter_is_granted_soon_after_the_sentinels_have_replaced_a_killed_primary() {
    let mut service = Service::start().await;
    let old = service.primary().await;
    let (holder, locks) = (
        service.config().connect().await.unwrap(),
        Locks::new(service.config().connect().await.unwrap()),
    );
    let held = claim("n", LONG);
    granted(&holder, &held).await;
    let waiting = locks.lock("n").ttl(LONG).wait_for(HANG_LIMIT);
    let waiting = tokio::spawn(async move { (waiting.await.unwrap(), Instant::now()) });
    for server in &service.servers {
        until_queued(server, "n", 1).await;
    }
    // The waiter believes in a lease of its full length, and does not look again before that: nor before its deadline.
    let _: () = service.servers[old].command("PEXPIRE {fencelock:n}:lock 200").await;
    let killed = Instant::now();
    service.servers[old].kill();
    let (new, switched) = service.until_switched(old, &[0, 1, 2]).await;
    let (guard, at) = waiting.await.unwrap();
    let detected = switched.duration_since(killed);
    let after = at.saturating_duration_since(switched);
    println!("the sentinels replaced the primary in {detected:?}; the waiter was granted {after:?} after that");
    assert!(guard.is_held());
    service.servers[new].until_locked("n", true).await;
}

#[tokio::test]
async fn connections_to_an_old_primary_that_still_answers_are_closed_at_once() {
    let service = Service::start().await;
    let old = service.primary().await;
    let config = service.config();
    let (holder, locks) = (
        config.clone().connect().await.unwrap(),
        Locks::new(config.connect().await.unwrap()),
    );
    let held = claim("n", LONG);
    let grant = granted(&holder, &held).await;
    let waiting = tokio::spawn(locks.lock("n").ttl(LONG).wait_for(HANG_LIMIT).into_future());
    until_queued(&service.servers[old], "n", 1).await;
    service.fail_over().await;
    let (new, switched) = service.until_switched(old, &[0, 1, 2]).await;
    // Each client subscribes to its channel.
    until("the clients have left", async || service.subscribed(old).await == 0).await;
    let left = switched.elapsed();
    let role: String = service.servers[old].command("INFO replication").await;
    assert!(
        role.contains("role:master"),
        "the old primary was demoted before the clients had left it"
    );
    until_queued(&service.servers[new], "n", 1).await;
    assert_eq!(holder.renew(&grant.lease).await.unwrap(), Renewal::Renewed);
    println!("all connections to the old primary were closed {left:?} after the switch");
    holder.release(&held, None).await.unwrap();
    let guard = waiting.await.unwrap().unwrap();
    assert!(guard.token() > grant.token);
}

#[tokio::test]
async fn holders_and_waiters_move_over_from_a_primary_that_was_paused() {
    let service = Service::start().await;
    let old = service.primary().await;
    let (locks, other) = (
        Locks::new(service.config().connect().await.unwrap()),
        Locks::new(service.config().connect().await.unwrap()),
    );
    let guard = locks.lock("n").ttl(LONG).await.unwrap();
    let token = guard.token();
    let waiting = tokio::spawn(other.lock("n").ttl(LONG).wait_for(HANG_LIMIT).into_future());
    until_replicated(&service, "n").await;
    for server in &service.servers {
        until_queued(server, "n", 1).await;
    }
    service.servers[old].signal(Signal::STOP);
    let (new, _) = service.until_switched(old, &[0, 1, 2]).await;
    until_renewed(&guard).await;
    service.servers[old].signal(Signal::CONT);
    assert!(guard.is_held() && guard.token() == token);
    guard.release().await.unwrap();
    let next = waiting.await.unwrap().unwrap();
    assert!(next.token() > token);
    service.servers[new].until_locked("n", true).await;
    // Demoted, it takes the data of the new primary, whatever it wrote meanwhile.
    service.servers[old].until_info("replication", "role:slave").await;
    service.servers[old]
        .until_info("replication", "master_link_status:up")
        .await;
    assert!(next.is_held());
    until_renewed(&next).await;
}

#[tokio::test]
async fn tokens_rise_across_failovers_that_lose_locks_and_counters() {
    let service = Service::start().await;
    service.hurry().await;
    let locks = service.config().connect().await.unwrap();
    let mut last = granted(&locks, &claim("n", LONG)).await.token;
    for failover in 0..5 {
        let old = service.primary().await;
        // None of the replicas has what is granted from now on, nor the counter.
        for (number, server) in service.servers.iter().enumerate() {
            if number != old {
                let _: () = server.command("CONFIG SET replica-read-only no").await;
                let _: () = server.command("FLUSHALL").await;
            }
        }
        service.fail_over().await;
        service.until_switched(old, &[0, 1, 2]).await;
        let next = claim("n", LONG);
        let mut token = None;
        until("the lock is granted", async || {
            if let Ok(attempt) = locks.try_acquire(&next).await {
                token = attempt.granted().map(|grant| grant.token);
            }
            token.is_some()
        })
        .await;
        assert!(
            token.unwrap() > last,
            "after failover {failover}: {token:?} after {last}"
        );
        last = token.unwrap();
        service.until_ready().await;
    }
}

#[tokio::test]
async fn sentinels_that_are_down_or_hang_hold_nothing_up() {
    let mut service = Service::start().await;
    let old = service.primary().await;
    let locks = Locks::new(service.config().connect().await.unwrap());
    let guard = locks.lock("n").ttl(LONG).await.unwrap();
    until_replicated(&service, "n").await;
    service.sentinels[0].signal(Signal::STOP);
    let began = Instant::now();
    granted(&service.config().connect().await.unwrap(), &claim("other", LONG)).await;
    println!("connected with one of three sentinels stopped in {:?}", began.elapsed());
    // The two others are enough for a failover.
    service.servers[old].kill();
    let (new, _) = service.until_switched(old, &[1, 2]).await;
    until_renewed(&guard).await;
    // The one that led the failover may be the only one to know of it so far.
    service.until_switched(old, &[2]).await;
    // This one still names the old primary.
    service.sentinels[0].signal(Signal::CONT);
    service.sentinels[1].kill();
    let began = Instant::now();
    let lock = service.config().connect().await.unwrap();
    println!("connected with one down and one just back in {:?}", began.elapsed());
    granted(&lock, &claim("third", LONG)).await;
    service.servers[new].until_locked("third", true).await;
    assert!(guard.is_held());
}

#[tokio::test]
async fn sentinels_that_are_told_of_another_primary_are_followed_although_they_count_from_0() {
    let service = Service::start().await;
    let old = service.primary().await;
    service.fail_over().await;
    let (failed, _) = service.until_switched(old, &[0, 1, 2]).await;
    assert_eq!(service.primary().await, failed);
    let (holder, locks) = (
        service.config().connect().await.unwrap(),
        Locks::new(service.config().connect().await.unwrap()),
    );
    let grant = granted(&holder, &claim("n", LONG)).await;
    let waiting = tokio::spawn(locks.lock("n").ttl(LONG).wait_for(HANG_LIMIT).into_future());
    let new = (0..3).find(|server| ![old, failed].contains(server)).unwrap();
    for server in [failed, new] {
        until_queued(&service.servers[server], "n", 1).await;
    }
    let of = service.servers[new].port();
    for sentinel in &service.sentinels {
        let _: () = sentinel.command(&format!("SENTINEL REMOVE {SERVICE}")).await;
    }
    service.servers[new].replicate(None).await;
    for sentinel in &service.sentinels {
        let _: () = sentinel
            .command(&format!("SENTINEL MONITOR {SERVICE} 127.0.0.1 {of} 2"))
            .await;
    }
    until("the clients have left", async || service.subscribed(failed).await == 0).await;
    until("a renewal succeeds", async || holder.renew(&grant.lease).await.is_ok()).await;
    holder.release(&grant.claim, None).await.unwrap();
    let guard = waiting.await.unwrap().unwrap();
    assert!(guard.token() > grant.token);
    service.servers[new].until_locked("n", true).await;
}

#[tokio::test]
async fn a_sentinel_that_answers_and_closes_is_not_asked_again_and_again() {
    let server = Server::start();
    let sentinel = FakeSentinel::closing("127.0.0.1", server.port());
    let config = RedisConfig::sentinel([("127.0.0.1", sentinel.port())], SERVICE);
    let lock = config.connect().await.unwrap();
    granted(&lock, &claim("n", LONG)).await;
    let (before, began) = (sentinel.connections(), Instant::now());
    until("it is asked again", async || sentinel.connections() > before + 2).await;
    // Five times a second.
    let (more, took) = (sentinel.connections() - before, began.elapsed());
    println!("{more} connections in {took:?}");
    assert!(
        took > Duration::from_millis(100) * more.saturating_sub(1),
        "{more} connections in {took:?}"
    );
    assert_eq!(
        lock.renew(&granted(&lock, &claim("m", LONG)).await.lease)
            .await
            .unwrap(),
        Renewal::Renewed
    );
}

#[tokio::test]
async fn a_named_server_that_is_a_replica_is_not_used() {
    let (primary, replica) = server::pair().await;
    let sentinel = FakeSentinel::naming("127.0.0.1", replica.port());
    let config = || RedisConfig::sentinel([("127.0.0.1", sentinel.port())], SERVICE);
    for allow in [false, true] {
        let config = config()
            .op_timeout(Duration::from_secs(1))
            .allow_unsafe_configuration(allow);
        let error = refused(config).await;
        assert!(matches!(error, LockError::Unavailable { .. }), "{error:?}");
        assert!(error.to_string().contains("failover"), "{error}");
    }
    // It is promoted while the client asks again and again.
    let connecting = tokio::spawn(config().op_timeout(LONG).connect());
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(!connecting.is_finished());
    replica.replicate(None).await;
    granted(&connecting.await.unwrap().unwrap(), &claim("n", LONG)).await;
    drop(primary);
}

#[tokio::test]
async fn a_sentinel_that_has_missed_a_failover_is_not_believed() {
    let (old, new) = (Server::start(), Server::start());
    let sentinels = [(2, &old), (3, &new), (2, &old)].map(|(epoch, server)| FakeSentinel::since(epoch, server.port()));
    let config = RedisConfig::sentinel(sentinels.iter().map(|sentinel| ("127.0.0.1", sentinel.port())), SERVICE);
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
