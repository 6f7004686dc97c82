//! Names that stay taken after their release: what reaches the server late, what is left on it, and how changes are pushed.

use std::time::{Duration, Instant};

use crate::server::{
    Etcd, GIVEN_UP, HANG_LIMIT, LONG, SHORT, busy, claim, clean_up, client, config_behind, deliver, everything, fails,
    granted, is_answer, leases_granted, plain, queue, raise_base, shared, soon, start, transactions, until,
    until_queued, watchers,
};
use conformance_tests::faults::{Direction, Proxy, Then, Traffic};
use conformance_tests::servers::Data;
use lock_core::{Changes, Claim, DistributedLock, Locks, Released, Renewal};
use lock_etcd::EtcdLock;
use lock_etcd::etcd_client::Client;

/// A claim that announces a reservation.
fn reserving(name: &str, length: Duration) -> Claim {
    claim(name, LONG).with_at_least(length)
}

/// The leases that there are.
async fn leases(etcd: &Client) -> usize {
    etcd.lease_client().leases().await.unwrap().leases().len()
}

/// Waits until the name is granted.
async fn free(lock: &EtcdLock, name: &str) -> Instant {
    let wanted = claim(name, LONG);
    lock.acquire(&wanted, soon()).await.unwrap().granted().unwrap();
    let at = Instant::now();
    lock.release(&wanted).await.unwrap();
    at
}

async fn through(server: &Etcd, proxy: &Proxy) -> EtcdLock {
    let config = config_behind(server, proxy);
    config.op_timeout(GIVEN_UP).connect().await.unwrap()
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
        let held = proxy.hold(format!("reserved.{}", late.owner()).as_bytes());
        fails(&proxy, &held, lock.reserve(&late, LONG)).await;
        clean_up(&lock, &late).await;
        let next = reserving("n", LONG);
        if is_taken_again {
            // Under the same key, if that can be.
            granted(&lock, &next).await;
        }
        let before = everything(&etcd).await;
        deliver(&server, &proxy, held).await;
        assert_eq!(everything(&etcd).await, before);
        if is_taken_again {
            assert_eq!(lock.release(&next).await.unwrap(), Released::Released);
        }
        granted(&other, &claim("n", LONG)).await;
        other.force_release(late.name()).await.unwrap().unwrap();
    }
    // Those of the holds, which are shared.
    assert_eq!(leases(&etcd).await, 2);
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
    assert_eq!(lock.release_reserved(&late, SHORT).await.unwrap(), Released::Released);
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
    let key = format!("reserved.{}", held.owner());
    let trap = proxy.swallow_reply_that(key.as_bytes(), is_answer, Then::Cut);
    assert_eq!(lock.reserve(&held, 2 * SHORT).await.unwrap(), Renewal::Renewed);
    assert!(trap.has_sprung());
    let trap = proxy.swallow_reply_that(key.as_bytes(), is_answer, Then::Cut);
    let began = Instant::now();
    // The claim was granted over another connection than the one of the first attempt, so what that came to is not known.
    assert!(lock.release_reserved(&held, 2 * SHORT).await.is_err());
    assert!(trap.has_sprung());
    let found = other.holder(held.name()).await.unwrap().unwrap();
    assert!(found.is_reserved && found.owner == Some(held.owner()), "{found:?}");
    let taken = free(&other, "n").await - began;
    assert!(taken >= 2 * SHORT, "{taken:?}");

    let held = reserving("n", SHORT);
    granted(&lock, &held).await;
    assert_eq!(lock.reserve(&held, SHORT).await.unwrap(), Renewal::Renewed);
    let key = format!("reserved.{}", held.owner());
    let trap = proxy.swallow_reply_that(key.as_bytes(), is_answer, Then::Cut);
    assert_eq!(lock.release_reserved(&held, SHORT).await.unwrap(), Released::Released);
    assert!(trap.has_sprung());
    busy(&other, &claim("n", LONG)).await;
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
    assert_eq!(lock.release_reserved(&held, rest).await.unwrap(), Released::Released);
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
    let found = other.holder(&"n".parse().unwrap()).await.unwrap().unwrap();
    assert!(found.is_reserved, "{found:?}");
    let free = free(&other, "n").await;
    assert!(free - granted >= LENGTH, "{:?}", free - granted);
}

#[tokio::test]
async fn nothing_is_left_of_reservations_that_have_ended() {
    const NAMES: usize = 30;
    let server = start().await;
    let etcd = plain(&server).await;
    let other = client(&server).await;
    let locks = Locks::new(client(&server).await);
    let mut forced = Vec::new();
    for number in 0..NAMES {
        let name = format!("{number}");
        let length = if number % 5 < 2 { LONG } else { SHORT };
        let mut request = locks.lock(&name).ttl(LONG).at_least(length);
        if number % 2 == 0 {
            request = request.renew(lock_core::Renew::Never);
        }
        let guard = request.await.unwrap();
        match number % 5 {
            // Both while it is held and while it is only reserved.
            0 => forced.push((name, None)),
            1 => forced.push((name, Some(guard))),
            2 => drop(guard),
            3 => guard.release().await.map(drop).unwrap(),
            // Held until the client is shut down.
            _ => std::mem::forget(guard),
        }
    }
    locks.drain().await;
    for (name, guard) in forced {
        let ended = other.force_release(&name.parse().unwrap()).await.unwrap().unwrap();
        assert_eq!(ended.is_reserved, guard.is_none());
    }
    locks.shutdown().await.unwrap();
    assert!(leases(&etcd).await >= NAMES / 5, "there are reservations");
    until(async || leases(&etcd).await == 0).await;
    assert_eq!(everything(&etcd).await, ["fencelock:base"]);
}

#[tokio::test]
async fn a_release_at_the_end_of_a_reservation_or_of_a_claim_without_a_guard_leaves_no_lease() {
    let server = start().await;
    let (lock, other, etcd) = (client(&server).await, client(&server).await, plain(&server).await);
    granted(&other, &claim("kept", LONG)).await;
    for releasing in [&lock, &other] {
        let held = reserving("n", LONG);
        granted(&lock, &held).await;
        assert_eq!(lock.reserve(&held, LONG).await.unwrap(), Renewal::Renewed);
        assert_eq!(releasing.release(&held).await.unwrap(), Released::Released);
        assert!(queue(&etcd, "n").await.is_empty());
        // Of each client that which its holds share.
        assert_eq!(leases(&etcd).await, 2);
    }
    // Handed over within the client as soon as its time is over, also if the server would keep it for longer.
    let locks = Locks::new(lock);
    let guard = locks.lock("n").at_least(Duration::from_millis(1)).await.unwrap();
    let next = tokio::spawn(locks.lock("n").ttl(LONG).into_future());
    until(async || locks.stats().waiting > 0).await;
    let token = guard.token();
    guard.release().await.unwrap();
    let next = next.await.unwrap().unwrap();
    assert!(next.token() > token);
    assert_eq!(locks.stats().handed_over, 1);
    assert_eq!(queue(&etcd, "n").await.len(), 1);
    next.release().await.unwrap();
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
        let keys = waiters + usize::from(waiters > 1);
        waiting.push(tokio::spawn(async move {
            let attempt = lock.acquire(&wanted, soon()).await.unwrap();
            let (at, token) = (Instant::now(), attempt.granted().unwrap().token);
            lock.release(&wanted).await.unwrap();
            (at, token)
        }));
        until_queued(&etcd, "n", keys).await;
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
async fn a_waiter_whose_key_is_deleted_by_hand_comes_again_and_can_reserve() {
    let server = shared().await;
    let (holder, waiter, etcd) = (client(&server).await, client(&server).await, plain(&server).await);
    let (held, wanted) = (claim("n", LONG), reserving("n", SHORT));
    granted(&holder, &held).await;
    let waiting = tokio::spawn({
        let (waiter, wanted) = (waiter.clone(), wanted.clone());
        async move { waiter.acquire(&wanted, soon()).await }
    });
    until_queued(&etcd, "n", 2).await;
    let is_claim = |key: &str| !key.contains("/reserved.");
    let queued = queue(&etcd, "n").await;
    let mine = queued[1..].iter().find(|kv| is_claim(kv.key_str().unwrap())).unwrap();
    etcd.kv_client().delete(mine.key(), None).await.unwrap();
    until(async || {
        let queued = queue(&etcd, "n").await;
        queued.len() == 3 && queued[1].create_revision() > mine.create_revision()
    })
    .await;
    holder.release(&held).await.unwrap();
    waiting.await.unwrap().unwrap().granted().unwrap();
    assert_eq!(waiter.reserve(&wanted, SHORT).await.unwrap(), Renewal::Renewed);
    assert_eq!(waiter.release(&wanted).await.unwrap(), Released::Released);
    assert!(queue(&etcd, "n").await.is_empty());
}

#[tokio::test]
async fn a_reservation_is_a_lease_and_a_transaction_and_the_rest_of_it_is_another() {
    const ROUNDS: u64 = 5;
    let server = start().await;
    let locks = Locks::new(client(&server).await);
    locks.lock("n").ttl(LONG).await.unwrap().release().await.unwrap();
    let before = (transactions(&server).await, leases_granted(&server).await);
    for round in 0..ROUNDS {
        let request = locks.lock(format!("{round}")).ttl(LONG).at_least(LONG);
        request.await.unwrap().release().await.unwrap();
    }
    let after = (transactions(&server).await, leases_granted(&server).await);
    // A lock with a reservation has a lease of its own, which is one more of each.
    assert_eq!((after.0 - before.0, after.1 - before.1), (4 * ROUNDS, 3 * ROUNDS));
}

/// Waits for a change.
async fn told(changes: &mut Changes) {
    let change = tokio::time::timeout(HANG_LIMIT, changes.next()).await;
    assert_eq!(change, Ok(Some(())), "a change is pushed");
}

#[tokio::test]
async fn two_thousand_listeners_of_one_name_share_a_watch_and_go_on_over_the_next_connection() {
    const LISTENERS: usize = 2000;
    let server = start().await;
    let proxy = Proxy::start(server.authority()).await.unwrap();
    let (lock, holder) = (through(&server, &proxy).await, client(&server).await);
    let name = "n".parse().unwrap();
    let mut listening = Vec::new();
    for _ in 0..LISTENERS {
        listening.push(lock.changes(&name).await.unwrap().unwrap());
    }
    assert_eq!((watchers(&server).await, proxy.counts().connections), (1, 1));
    let held = claim("n", LONG);
    for _ in 0..2 {
        granted(&holder, &held).await;
        for changes in &mut listening {
            told(changes).await;
        }
        holder.release(&held).await.unwrap();
        for changes in &mut listening {
            told(changes).await;
        }
        proxy.cut();
        for changes in &mut listening {
            told(changes).await;
        }
    }
    // What waits, and what is done under another name, is none.
    let other = claim("n/other", LONG);
    granted(&holder, &other).await;
    let quiet = tokio::time::timeout(Duration::from_millis(100), listening[0].next()).await;
    assert!(quiet.is_err(), "{quiet:?}");
    holder.release(&other).await.unwrap();
    drop(listening);
    // That of the lease of the holder is left.
    until(async || watchers(&server).await == 1).await;
    let mut changes = lock.changes(&name).await.unwrap().unwrap();
    lock.close().await.unwrap();
    let end = tokio::time::timeout(HANG_LIMIT, changes.next()).await;
    assert_eq!(end, Ok(None), "a client that is closed listens no more");
}
