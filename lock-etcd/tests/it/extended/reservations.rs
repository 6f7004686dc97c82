//! Names that stay taken after their release: what reaches the server late, when they become free, and how changes are pushed.

use std::time::{Duration, Instant};

use conformance_tests::faults::{Direction, Proxy, Then, Traffic};
use lock_core::{DistributedLock, Locks, Released, Renewal};
use lock_etcd::EtcdLock;
use test_servers::Data;

use crate::again::{only, through};
use crate::reservations::{leases, reserving};
use crate::server::{
    LONG, SHORT, claim, clean_up, client, deliver, everything, fails, granted, is_answer, plain, queue, raise_base,
    shared, start, until, until_queued, waited,
};

/// Waits until the name is granted.
async fn free(lock: &EtcdLock, name: &str) -> Instant {
    let wanted = claim(name, LONG);
    waited(lock, &wanted).await;
    let at = Instant::now();
    lock.release(&wanted, None).await.unwrap();
    at
}

#[tokio::test]
async fn a_reservation_that_arrives_after_the_release_of_its_claim_reserves_nothing() {
    let server = start().await;
    let etcd = plain(&server).await;
    raise_base(&etcd).await;
    let proxy = Proxy::start(server.authority()).await.unwrap();
    let (lock, other) = (through(&server, &proxy).await, client(&server).await);
    for is_taken_again in [false, true] {
        let late = reserving("n", LONG);
        granted(&lock, &late).await;
        let held = proxy.hold(late.owner().to_string().as_bytes());
        fails(&proxy, &held, lock.reserve(&late, LONG)).await;
        clean_up(&lock, &late).await;
        let next = reserving("n", LONG);
        if is_taken_again {
            granted(&lock, &next).await;
        }
        let before = everything(&etcd).await;
        deliver(&server, &proxy, held).await;
        assert_eq!(everything(&etcd).await, before);
        if is_taken_again {
            assert_eq!(lock.release(&next, None).await.unwrap(), Released::Released);
        }
        granted(&other, &claim("n", LONG)).await;
        other.force_release(late.name()).await.unwrap().pop().unwrap();
    }
    // That of the claims without a reservation, which is shared.
    assert_eq!(leases(&etcd).await, 1);
}

#[tokio::test]
async fn a_late_request_to_take_a_name_puts_nothing_once_its_reservation_has_ended() {
    let server = start().await;
    let etcd = plain(&server).await;
    raise_base(&etcd).await;
    let proxy = Proxy::start(server.authority()).await.unwrap();
    let lock = through(&server, &proxy).await;
    granted(&lock, &claim("kept", LONG)).await;
    let late = reserving("n", SHORT);
    let held = proxy.hold(late.owner().to_string().as_bytes());
    fails(&proxy, &held, lock.try_acquire(&late)).await;
    let asking = async || {
        let attempt = lock.try_acquire(&late).await;
        attempt.is_ok_and(|attempt| attempt.granted().is_some())
    };
    until(asking).await;
    assert_eq!(lock.reserve(&late, SHORT).await.unwrap(), Renewal::Renewed);
    assert_eq!(lock.release(&late, Some(SHORT)).await.unwrap(), Released::Released);
    until(async || queue(&etcd, "n").await.is_empty()).await;
    deliver(&server, &proxy, held).await;
    assert!(queue(&etcd, "n").await.is_empty());
}

#[tokio::test]
async fn a_reservation_and_a_release_whose_answers_are_lost_are_made_once() {
    let server = start().await;
    let etcd = plain(&server).await;
    raise_base(&etcd).await;
    let proxy = Proxy::start(server.authority()).await.unwrap();
    let (lock, other) = (through(&server, &proxy).await, client(&server).await);
    let held = reserving("n", 2 * SHORT);
    granted(&lock, &held).await;
    let key = held.owner().to_string();
    let trap = proxy.swallow_reply_that(key.as_bytes(), is_answer, Then::Cut);
    assert_eq!(lock.reserve(&held, 2 * SHORT).await.unwrap(), Renewal::Renewed);
    assert!(trap.has_sprung());
    let trap = proxy.swallow_reply_that(key.as_bytes(), is_answer, Then::Cut);
    let began = Instant::now();
    // The key says what the first attempt came to.
    assert_eq!(lock.release(&held, Some(2 * SHORT)).await.unwrap(), Released::Released);
    assert!(trap.has_sprung());
    let found = other.holders(held.name()).await.unwrap().pop().unwrap();
    assert!(found.is_reserved && found.owner == Some(held.owner()), "{found:?}");
    let taken = free(&other, "n").await - began;
    assert!(taken >= 2 * SHORT, "{taken:?}");
}

#[tokio::test]
async fn the_time_counts_from_the_answer_also_if_that_was_slow() {
    const WAY: Duration = Duration::from_millis(900);
    const LENGTH: Duration = Duration::from_secs(3);
    let server = shared().await;
    let proxy = Proxy::start(server.authority()).await.unwrap();
    let (lock, other) = (through(&server, &proxy).await, client(&server).await);
    let held = reserving("n", LENGTH);
    granted(&lock, &held).await;
    // From the lease, which is granted before, to the answer it takes longer than etcd takes to look for expired leases.
    proxy.set(Direction::ToClient, Traffic::Delayed(WAY));
    assert_eq!(lock.reserve(&held, LENGTH).await.unwrap(), Renewal::Renewed);
    let answered = Instant::now();
    proxy.set(Direction::ToClient, Traffic::Flows);
    let rest = LENGTH - answered.elapsed();
    assert_eq!(lock.release(&held, Some(rest)).await.unwrap(), Released::Released);
    let taken = free(&other, "n").await - answered;
    assert!(taken >= LENGTH, "{taken:?}");
}

#[tokio::test]
async fn a_name_stays_reserved_when_the_server_starts_again() {
    const LENGTH: Duration = Duration::from_secs(6);
    let server = start().await;
    let (locks, other) = (Locks::new(client(&server).await), client(&server).await);
    let guard = locks.lock("n").at_least(LENGTH).await.unwrap();
    let granted = Instant::now();
    guard.release().await.unwrap();
    server.restart(Data::Kept).await.unwrap();
    let found = other.holders(&"n".parse().unwrap()).await.unwrap().pop().unwrap();
    assert!(found.is_reserved, "{found:?}");
    let free = free(&other, "n").await;
    assert!(free - granted >= LENGTH, "{:?}", free - granted);
}

#[tokio::test]
async fn a_waiter_that_leaves_the_middle_of_the_queue_lets_no_one_pass_a_reservation() {
    const LENGTH: Duration = Duration::from_secs(4);
    let server = shared().await;
    let etcd = plain(&server).await;
    let locks = Locks::new(client(&server).await);
    let asked = Instant::now();
    let guard = locks.lock("n").ttl(LONG).at_least(LENGTH).await.unwrap();
    let before = guard.token();
    guard.release().await.unwrap();
    let mut waiting = Vec::new();
    for (waiters, announces) in [(1, false), (2, true), (3, false)] {
        let lock = client(&server).await;
        let wanted = if announces {
            reserving("n", SHORT)
        } else {
            claim("n", LONG)
        };
        waiting.push(tokio::spawn(async move {
            let (token, at) = (waited(&lock, &wanted).await.token, Instant::now());
            lock.release(&wanted, None).await.unwrap();
            (at, token)
        }));
        until_queued(&etcd, "n", waiters).await;
    }
    let second = waiting.remove(1);
    second.abort();
    assert!(second.await.unwrap_err().is_cancelled());
    let mut last = before;
    for waiter in waiting {
        let (at, token) = waiter.await.unwrap();
        assert!(
            at - asked >= LENGTH && token > last,
            "{:?}, {token} after {last}",
            at - asked
        );
        last = token;
    }
}

#[tokio::test]
async fn renewals_do_not_shorten_a_reservation_by_the_lease_that_they_move_it_to() {
    const LENGTH: Duration = Duration::from_secs(5);
    let server = shared().await;
    let (lock, etcd) = (client(&server).await, plain(&server).await);
    let held = claim("n", SHORT).with_at_least(LENGTH);
    let grant = granted(&lock, &held).await;
    assert_eq!(lock.reserve(&held, LENGTH).await.unwrap(), Renewal::Renewed);
    let reservation = only(&etcd, "n").await.lease;
    let left = async |lease| etcd.lease_client().time_to_live(lease, None).await.unwrap().ttl();
    until(async || {
        assert_eq!(lock.renew(&grant.lease).await.unwrap(), Renewal::Renewed);
        let kept_by = only(&etcd, "n").await.lease;
        // In this order: what is left of either only falls.
        let (kept, reserved) = (left(kept_by).await, left(reservation).await);
        assert!(kept >= reserved, "{kept} s of {reserved} s are left");
        kept_by != reservation
    })
    .await;
    assert_eq!(lock.release(&held, None).await.unwrap(), Released::Released);
}
