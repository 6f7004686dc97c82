//! Names that stay taken after their release: what is left on the server.

use std::time::Duration;

use lock_core::{Claim, DistributedLock, Locks, Released, Renewal};
use lock_etcd::etcd_client::Client;

use crate::server::{
    LONG, SHORT, claim, client, everything, granted, plain, queue, shared, start, until, until_queued, waiting,
};

/// A claim that announces a reservation.
pub(crate) fn reserving(name: &str, length: Duration) -> Claim {
    claim(name, LONG).with_at_least(length)
}

/// The leases that there are.
pub(crate) async fn leases(etcd: &Client) -> usize {
    etcd.lease_client().leases().await.unwrap().leases().len()
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
    // Those of `LONG`: the others may be over by now.
    assert!(leases(&etcd).await >= forced.len(), "there are reservations");
    for (name, guard) in forced {
        let ended = other
            .force_release(&name.parse().unwrap())
            .await
            .unwrap()
            .pop()
            .unwrap();
        assert_eq!(ended.is_reserved, guard.is_none());
    }
    locks.shutdown().await.unwrap();
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
        assert_eq!(releasing.release(&held, None).await.unwrap(), Released::Released);
        assert!(queue(&etcd, "n").await.is_empty());
        // That of the claim "kept".
        assert_eq!(leases(&etcd).await, 1);
    }
    // It ends as soon as its time is over within the client, also if the server would keep it for longer.
    let locks = Locks::new(lock);
    let guard = locks.lock("n").at_least(Duration::from_millis(1)).await.unwrap();
    let next = tokio::spawn(locks.lock("n").ttl(LONG).into_future());
    until(async || locks.stats().waiting > 0).await;
    let token = guard.token();
    // Until its time is over.
    tokio::time::sleep(Duration::from_millis(2)).await;
    guard.release().await.unwrap();
    let left = queue(&etcd, "n").await;
    assert!(
        left.iter().all(|kv| !kv.value_str().unwrap().contains(" r ")),
        "{left:?}"
    );
    let next = next.await.unwrap().unwrap();
    assert!(next.token() > token);
    assert_eq!(queue(&etcd, "n").await.len(), 1);
    next.release().await.unwrap();
}

#[tokio::test]
async fn a_waiter_whose_key_is_deleted_by_hand_comes_again_and_can_reserve() {
    let server = shared().await;
    let (holder, waiter, etcd) = (client(&server).await, client(&server).await, plain(&server).await);
    let (held, wanted) = (claim("n", LONG), reserving("n", SHORT));
    granted(&holder, &held).await;
    let waiting = waiting(&waiter, &wanted);
    until_queued(&etcd, "n", 1).await;
    let mine = queue(&etcd, "n").await.remove(1);
    etcd.kv_client().delete(mine.key(), None).await.unwrap();
    until(async || {
        let queued = queue(&etcd, "n").await;
        queued.len() == 2 && queued[1].create_revision() > mine.create_revision()
    })
    .await;
    holder.release(&held, None).await.unwrap();
    waiting.await.unwrap();
    assert_eq!(waiter.reserve(&wanted, SHORT).await.unwrap(), Renewal::Renewed);
    assert_eq!(waiter.release(&wanted, None).await.unwrap(), Released::Released);
    assert!(queue(&etcd, "n").await.is_empty());
}
