//! What becomes of locks when the server is restarted, restored, full, or slow to elect a leader.

use std::time::{Duration, Instant};

use crate::server::{
    LONG, busy, claim, client, config, config_behind, granted, is_answer, lost, plain, queue, shared, start,
    start_with, until_queued, waited, waiting,
};
use conformance_tests::faults::{Direction, Proxy, Then, Traffic};
use lock_core::{DistributedLock, Locks, LossReason};
use lock_etcd::etcd_client::{AlarmAction, AlarmType};
use lock_etcd::{EtcdConfig, EtcdLock};
use test_servers::Data;

#[tokio::test]
async fn a_lock_is_kept_across_a_restart_with_its_token_and_lets_nobody_else_in() {
    // With its disk, as in real life.
    let server = start_with(&[]).await;
    let locks = Locks::new(client(&server).await);
    let guard = locks.lock("n").ttl(LONG).await.unwrap();
    let before = queue(&plain(&server).await, "n").await;
    for _ in 0..2 {
        server.restart(Data::Kept).await.unwrap();
        let other = client(&server).await;
        let seen = busy(&other, &claim("n", LONG)).await;
        assert_eq!(seen.holder.unwrap().token, Some(guard.token()));
        // It is renewed by the same client, over a new connection.
        guard.renew_now().await.unwrap();
        assert!(guard.is_held());
    }
    let after = queue(&plain(&server).await, "n").await;
    assert_eq!(after[0].create_revision(), before[0].create_revision());
    assert_eq!(after[0].key(), before[0].key());
    guard.release().await.unwrap();
    let next = granted(&client(&server).await, &claim("n", LONG)).await;
    assert!(next.token.get() > seen_token(&before[0]));
}

fn seen_token(kv: &lock_etcd::etcd_client::KeyValue) -> u64 {
    let base: u64 = kv.value_str().unwrap().split(' ').nth(3).unwrap().parse().unwrap();
    base + 16 * u64::try_from(kv.create_revision()).unwrap()
}

#[tokio::test]
async fn of_held_locks_a_restore_brings_back_those_of_the_copy_and_ends_the_later_ones() {
    const TTL: Duration = Duration::from_secs(30);
    let server = start().await;
    let locks = Locks::new(client(&server).await);
    let kept = locks.lock("kept").ttl(TTL).await.unwrap();
    // The lease that both share is in the copy, too.
    server.copy().await.unwrap();
    let later = locks.lock("later").ttl(TTL).await.unwrap();
    let released = locks.lock("kept too").ttl(TTL).await.unwrap();
    let last = released.token();
    released.release().await.unwrap();
    server.restart(Data::Copied).await.unwrap();
    assert_eq!(lost(&later).await, LossReason::NotHeld);
    assert!(kept.is_held());
    let other = client(&server).await;
    assert_eq!(
        busy(&other, &claim("kept", LONG)).await.holder.unwrap().token,
        Some(kept.token())
    );
    let next = granted(&other, &claim("later", LONG)).await.token;
    assert!(next > last && next > later.token(), "{next} after {last}");
    kept.release().await.unwrap();
}

#[tokio::test]
async fn a_full_server_grants_to_who_is_in_the_queue_and_to_nobody_else() {
    let server = start().await;
    let (holder, waiter, etcd) = (client(&server).await, client(&server).await, plain(&server).await);
    let held = claim("n", LONG);
    let first = granted(&holder, &held).await.token;
    let wanted = claim("n", LONG);
    let waiting = waiting(&waiter, &wanted);
    until_queued(&etcd, "n", 1).await;
    let alarm = async |action| {
        let mut member = etcd.maintenance_client();
        member.alarm(action, AlarmType::Nospace, None).await.unwrap();
    };
    alarm(AlarmAction::Activate).await;
    holder.release(&held, None).await.unwrap();
    let second = waiting.await.unwrap().token;
    assert!(second > first);
    let refused = holder.try_acquire(&claim("m", LONG)).await.unwrap_err();
    assert!(format!("{refused:#}").contains("etcd is full"), "{refused}");
    waiter.release(&wanted, None).await.unwrap();
    alarm(AlarmAction::Deactivate).await;
}

/// A client that is to look for what it should warn of: half of its limit is for each endpoint, and the rest for all else.
async fn looking(config: EtcdConfig) -> EtcdLock {
    config.op_timeout(Duration::from_secs(12)).connect().await.unwrap()
}

#[tokio::test]
async fn an_etcd_that_keeps_leases_for_longer_than_asked_for_is_warned_of() {
    const ELECTION: [&str; 4] = ["--heartbeat-interval", "500", "--election-timeout", "4000"];
    let usual = start().await;
    assert_eq!(
        looking(config(&usual)).await.server_info().await.unwrap().warnings,
        Vec::<String>::new()
    );
    let server = start_with(&[&["--unsafe-no-fsync"][..], &ELECTION].concat()).await;
    let lock = looking(config(&server)).await;
    let warnings = lock.server_info().await.unwrap().warnings;
    assert!(
        warnings.len() == 1 && warnings[0].contains("less than 6 s"),
        "{warnings:?}"
    );
    // The lock is believed in for as long as it was asked for, or until it is renewed for as long as it is kept.
    let leases = plain(&server).await.lease_client().leases().await.unwrap();
    assert!(leases.leases().is_empty(), "a look at the settings leaves nothing");
}

#[tokio::test]
async fn a_renewal_is_answered_over_a_connection_that_takes_more_than_a_tenth_of_the_ttl() {
    /// A member that has not answered for a fifth of it is left.
    const TTL: Duration = Duration::from_secs(60);
    const ROUND_TRIP: Duration = Duration::from_millis(6300);
    let server = start().await;
    let proxy = Proxy::start(server.authority()).await.unwrap();
    let config = config_behind(&server, &proxy).op_timeout(TTL);
    let locks = Locks::new(config.connect().await.unwrap());
    let guard = locks.lock("n").ttl(TTL).await.unwrap();
    proxy.set(Direction::Both, Traffic::Delayed(ROUND_TRIP / 2));
    let began = Instant::now();
    let renewed = guard.renew_now().await;
    println!(
        "{renewed:?} after {:?} with round trips of {ROUND_TRIP:?}",
        began.elapsed()
    );
    renewed.unwrap();
    assert!(guard.is_held());
    assert_eq!(proxy.counts().connections, 1);
    proxy.set(Direction::Both, Traffic::Flows);
    guard.release().await.unwrap();
}

#[tokio::test]
async fn a_client_that_cannot_revoke_its_leases_says_that_the_member_does_not_answer() {
    const LIMIT: Duration = Duration::from_secs(4);
    let server = start().await;
    let proxy = Proxy::start(server.authority()).await.unwrap();
    let lock = config_behind(&server, &proxy)
        .op_timeout(LIMIT)
        .connect()
        .await
        .unwrap();
    granted(&lock, &claim("n", LONG)).await;
    proxy.set(Direction::Both, Traffic::Lost);
    let error = lock.close().await.unwrap_err().to_string();
    assert!(error.contains("does not answer"), "{error}");
}

#[tokio::test]
async fn a_release_that_failed_is_done_by_a_client_that_only_waits() {
    const TTL: Duration = Duration::from_secs(4);
    let server = shared().await;
    let proxy = Proxy::start(server.authority()).await.unwrap();
    let config = config_behind(&server, &proxy).op_timeout(Duration::from_secs(1));
    let (lock, other, etcd) = (
        config.connect().await.unwrap(),
        client(&server).await,
        plain(&server).await,
    );
    granted(&other, &claim("waited for", LONG)).await;
    let left = claim("n", TTL);
    granted(&lock, &left).await;
    let locks = Locks::new(lock.clone());
    let waiting = tokio::spawn(locks.lock("waited for").ttl(TTL).into_future());
    until_queued(&etcd, "waited for", 1).await;
    proxy.refuse().await;
    proxy.cut();
    lock.release(&left, None).await.unwrap_err();
    proxy.heal().await;
    // The waiter keeps the lease of both.
    let next = claim("n", LONG);
    waited(&other, &next).await;
    assert!(!waiting.is_finished());
    waiting.abort();
}

#[tokio::test]
async fn a_waiter_comes_again_ever_more_slowly_to_what_ends_each_connection_on_which_it_watches() {
    const TIMES: u32 = 9;
    let server = shared().await;
    let proxy = Proxy::start(server.authority()).await.unwrap();
    let lock = config_behind(&server, &proxy).connect().await.unwrap();
    let (holder, held, etcd) = (client(&server).await, claim("n", LONG), plain(&server).await);
    granted(&holder, &held).await;
    // Of what the waiter sends only its watch names the holder's key.
    let key = queue(&etcd, "n").await.remove(0);
    let ending = |_| proxy.swallow_reply_that(key.key(), is_answer, Then::Cut);
    let endings: Vec<_> = (0..TIMES).map(ending).collect();
    let waiting = waiting(&lock, &claim("n", LONG));
    let began = Instant::now();
    for ending in endings {
        ending.sprung().await;
    }
    let took = began.elapsed();
    // The rests are 40 ms to 1 s, and half as long at the least.
    assert!(took > Duration::from_secs(2), "{TIMES} connections in {took:?}");
    holder.release(&held, None).await.unwrap();
    waiting.await.unwrap();
}
