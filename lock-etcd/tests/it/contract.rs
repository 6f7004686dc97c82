//! What the backend owes to the core, on a real server, where the suite does not look.

use std::time::Duration;

use crate::server::{
    HANG_LIMIT, LONG, Plain, SHORT, UNRENEWED, busy, claim, client, config_behind, everything, granted, lost, plain,
    queue, shared, start, until, until_queued, waiting,
};
use conformance_tests::faults::{Direction, Proxy, Traffic};
use futures_util::StreamExt as _;
use lock_core::{Attempt, Claim, DistributedLock, LockError, Locks, LossReason, Released, Wait};
use lock_etcd::EtcdLock;
use lock_etcd::etcd_client::{Txn, TxnOp};
use tokio::task::JoinHandle;

/// A wait that ends without the lock.
fn ending(lock: &EtcdLock, wanted: &Claim) -> JoinHandle<Result<Attempt, LockError>> {
    let (lock, wanted) = (lock.clone(), wanted.clone());
    tokio::spawn(async move { lock.acquire(&wanted, Wait::until(None)).await })
}

#[tokio::test]
async fn closing_leaves_nothing_but_the_base_of_tokens() {
    let server = start().await;
    let (lock, etcd) = (client(&server).await, plain(&server).await);
    granted(&lock, &claim("a", LONG)).await;
    granted(&lock, &claim("b", SHORT).with_own_lease()).await;
    let other = client(&server).await;
    let held = claim("c", LONG);
    granted(&other, &held).await;
    let waiting = ending(&lock, &claim("c", LONG));
    until_queued(&etcd, "c", 1).await;
    assert_eq!(etcd.lease_client().leases().await.unwrap().leases().len(), 3);
    lock.close().await.unwrap();
    assert!(matches!(waiting.await.unwrap(), Err(LockError::Closed { .. })));
    assert!(matches!(
        lock.try_acquire(&claim("a", LONG)).await,
        Err(LockError::Closed { .. })
    ));
    other.close().await.unwrap();
    assert_eq!(everything(&etcd).await, ["fencelock:base"]);
    assert!(etcd.lease_client().leases().await.unwrap().leases().is_empty());
}

/// A waiter that is looking at the queue: the look has not reached the server when this returns, nor does what is sent now, until the
/// proxy is healed.
async fn looking(
    lock: &EtcdLock,
    proxy: &Proxy,
    etcd: &Plain,
    wanted: &Claim,
) -> JoinHandle<Result<Attempt, LockError>> {
    const DELAY: Duration = Duration::from_millis(60);
    proxy.set(Direction::ToClient, Traffic::Delayed(DELAY));
    let wait = ending(lock, wanted);
    until_queued(etcd, wanted.name().as_str(), 1).await;
    // A write before the watch begins has the waiter look at its key once more.
    etcd.kv_client().put("foreign", "", None).await.unwrap();
    tokio::time::sleep(DELAY * 3 / 2).await;
    proxy.set(Direction::ToServer, Traffic::Stalled);
    tokio::time::sleep(DELAY).await;
    wait
}

/// Lets what `request` sends reach the server together with what waits before it.
async fn together<T>(proxy: &Proxy, request: impl Future<Output = T>) -> T {
    let healing = async {
        tokio::time::sleep(Duration::from_millis(30)).await;
        proxy.heal().await;
    };
    tokio::join!(request, healing).0
}

#[tokio::test]
async fn releasing_a_claim_ends_its_wait() {
    let server = shared().await;
    let proxy = Proxy::start(server.authority()).await.unwrap();
    let lock = config_behind(&server, &proxy).connect().await.unwrap();
    let etcd = plain(&server).await;
    for round in 0..12 {
        // A name of its own: what was waited for a moment ago is watched already.
        let name = format!("n{round}");
        granted(&lock, &claim(&name, LONG)).await;
        let wanted = claim(&name, LONG);
        let wait = looking(&lock, &proxy, &etcd, &wanted).await;
        let released = together(&proxy, lock.release(&wanted, None)).await;
        assert_eq!(released.unwrap(), Released::NotHeld);
        let ended = tokio::time::timeout(HANG_LIMIT, wait).await;
        assert!(ended.expect("the wait ends").unwrap().unwrap().granted().is_none());
        until_queued(&etcd, &name, 0).await;
    }
}

#[tokio::test]
async fn closing_under_a_waiter_that_looks_leaves_no_lease() {
    let server = start().await;
    let proxy = Proxy::start(server.authority()).await.unwrap();
    let etcd = plain(&server).await;
    for _ in 0..12 {
        let lock = config_behind(&server, &proxy).connect().await.unwrap();
        granted(&lock, &claim("n", LONG)).await;
        let wait = looking(&lock, &proxy, &etcd, &claim("n", LONG)).await;
        together(&proxy, lock.close()).await.unwrap();
        let ended = tokio::time::timeout(HANG_LIMIT, wait).await;
        let ended = ended.expect("the wait ends").unwrap();
        assert!(matches!(ended, Err(LockError::Closed { .. })), "{ended:?}");
        assert!(etcd.lease_client().leases().await.unwrap().leases().is_empty());
    }
}

#[tokio::test]
async fn holders_learn_of_a_revoked_lease_by_a_renewal_and_waiters_move_to_another() {
    let server = shared().await;
    let (locks, other, etcd) = (
        Locks::new(client(&server).await),
        Locks::new(client(&server).await),
        plain(&server).await,
    );
    let held = [
        locks.lock("a").ttl(UNRENEWED).await.unwrap(),
        locks.lock("b").ttl(UNRENEWED).await.unwrap(),
    ];
    let in_the_way = other.lock("c").ttl(LONG).await.unwrap();
    let waiting = tokio::spawn(locks.lock("c").ttl(UNRENEWED).into_future());
    until_queued(&etcd, "c", 1).await;
    let lease = queue(&etcd, "a").await[0].lease();
    assert_eq!(queue(&etcd, "c").await[1].lease(), lease);
    etcd.lease_client().revoke(lease).await.unwrap();
    for guard in &held {
        let _ = guard.renew_now().await;
        assert_eq!(lost(guard).await, LossReason::Revoked);
        assert!(!guard.is_held());
    }
    until(async || queue(&etcd, "c").await.get(1).is_some_and(|kv| kv.lease() != lease)).await;
    in_the_way.release().await.unwrap();
    assert!(waiting.await.unwrap().unwrap().is_held());
}

#[tokio::test]
async fn a_forced_release_spares_the_other_locks_of_the_same_lease() {
    let server = shared().await;
    let (locks, other) = (Locks::new(client(&server).await), client(&server).await);
    let (victim, spared) = (
        locks.lock("victim").ttl(UNRENEWED).await.unwrap(),
        locks.lock("spared").ttl(UNRENEWED).await.unwrap(),
    );
    let ended = other.force_release(victim.name()).await.unwrap().pop().unwrap();
    assert_eq!(ended.token, Some(victim.token()));
    // The renewal of either lock checks both.
    spared.renew_now().await.unwrap();
    assert_eq!(lost(&victim).await, LossReason::NotHeld);
    spared.renew_now().await.unwrap();
    assert!(spared.is_held());
}

#[tokio::test]
async fn the_compares_of_a_guard_hold_for_as_long_as_its_lock() {
    let server = shared().await;
    let (lock, etcd) = (client(&server).await, plain(&server).await);
    let locks = Locks::new(lock.clone());
    let guard = locks.lock("n").ttl(LONG).await.unwrap();
    let write = async |held| {
        let txn = Txn::new().when(held).and_then([TxnOp::put("data", "1", None)]);
        etcd.kv_client().txn(txn).await.unwrap().succeeded()
    };
    let held = lock.compares(&guard).unwrap();
    assert!(write(held.clone()).await);
    let stranger = client(&server).await;
    assert!(stranger.compares(&guard).is_none());
    stranger.force_release(guard.name()).await.unwrap();
    assert!(!write(held).await);
    guard.release().await.unwrap();
    let next = locks.lock("n").ttl(LONG).await.unwrap();
    assert!(write(lock.compares(&next).unwrap()).await);
}

#[tokio::test]
async fn names_of_many_holders_are_listed_page_by_page() {
    const LOCKS: usize = 1200;
    let server = shared().await;
    let (lock, etcd) = (client(&server).await, plain(&server).await);
    let taking = futures_util::stream::iter(0..LOCKS).for_each_concurrent(64, |i| {
        let lock = &lock;
        async move { drop(granted(lock, &claim(&format!("n/{i:04}"), LONG)).await) }
    });
    taking.await;
    // Who waits is no holder.
    let wait = waiting(&client(&server).await, &claim("n/0007", LONG));
    until_queued(&etcd, "n%2F0007", 1).await;
    let listed = lock.list("n/").await.unwrap();
    let names: Vec<_> = listed
        .iter()
        .map(|holder| holder.name.clone().unwrap().to_string())
        .collect();
    let expected: Vec<_> = (0..LOCKS).map(|i| format!("n/{i:04}")).collect();
    assert_eq!(names, expected);
    assert!(
        listed
            .iter()
            .all(|holder| holder.remaining.is_some_and(|left| left <= LONG))
    );
    assert_eq!(lock.list("n/000").await.unwrap().len(), 10);
    wait.abort();
}

#[tokio::test]
async fn asking_again_after_a_lost_answer_finds_the_same_token() {
    let server = shared().await;
    let (lock, etcd) = (client(&server).await, plain(&server).await);
    let wanted = claim("n", LONG);
    let first = granted(&lock, &wanted).await;
    // Another session raises the base: the token of what is held stays what it was.
    let other = client(&server).await;
    granted(&other, &claim("m", LONG)).await;
    let again = granted(&lock, &wanted).await;
    assert_eq!(again.token, first.token);
    let seen = other.holders(wanted.name()).await.unwrap().pop().unwrap();
    assert_eq!(seen.token, Some(first.token));
    assert_eq!(queue(&etcd, "n").await.len(), 1);
}

#[tokio::test]
async fn a_client_that_connects_lazily_connects_at_the_first_request() {
    let server = shared().await;
    let proxy = Proxy::start(server.authority()).await.unwrap();
    proxy.refuse().await;
    let lock = config_behind(&server, &proxy).connect_lazy().unwrap();
    let refused = lock.try_acquire(&claim("n", LONG)).await.unwrap_err();
    assert!(matches!(refused, LockError::Unavailable { .. }), "{refused}");
    proxy.heal().await;
    granted(&lock, &claim("n", LONG)).await;
    busy(&lock, &claim("n", LONG)).await;
}

#[tokio::test]
async fn a_wait_that_was_put_off_keeps_its_place() {
    let server = shared().await;
    let (holder, etcd) = (client(&server).await, plain(&server).await);
    let locks = Locks::new(client(&server).await);
    let held = claim("n", LONG);
    granted(&holder, &held).await;
    let waiting = |wait| tokio::spawn(locks.lock("n").ttl(LONG).wait_for(wait).into_future());
    let first = waiting(SHORT);
    until_queued(&etcd, "n", 1).await;
    let place = queue(&etcd, "n").await[1].create_revision();
    let second = waiting(HANG_LIMIT);
    first.await.unwrap().unwrap_err();
    holder.release(&held, None).await.unwrap();
    let guard = second.await.unwrap().unwrap();
    assert_eq!(queue(&etcd, "n").await[0].create_revision(), place);
    guard.release().await.unwrap();
}
