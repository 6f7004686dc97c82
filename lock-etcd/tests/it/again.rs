//! Keys that are used again: by which claims, and what is left of those before.

use std::collections::BTreeMap;

use crate::server::{
    Etcd, GIVEN_UP, LONG, Plain, busy, claim, clean_up, client, config_behind, deliver, fails, granted, plain, queue,
    raise_base, shared, start, until_queued, waited, waiting,
};
use conformance_tests::faults::Proxy;
use lock_core::{DistributedLock, Locks, Released};
use lock_etcd::EtcdLock;
use lock_etcd::etcd_client::{EventType, KeyValue, WatchOptions};

/// The keys that there were under a name since the server was started, and how often each was created.
async fn history(etcd: &Plain, name: &str) -> BTreeMap<String, usize> {
    let prefix = etcd.prefix(name);
    let end = format!("{prefix}end");
    etcd.kv_client().put(&*end, "", None).await.unwrap();
    let all = WatchOptions::new().with_prefix().with_start_revision(1);
    let mut events = etcd.watch_client().watch(prefix, Some(all)).await.unwrap();
    let mut keys = BTreeMap::new();
    loop {
        let response = events.message().await.unwrap().unwrap();
        for event in response.events() {
            let key = event.kv().unwrap().key_str().unwrap().to_owned();
            if key == end {
                return keys;
            }
            if event.event_type() == EventType::Put {
                *keys.entry(key).or_default() += 1;
            }
        }
    }
}

/// A key from one put to its deletion.
#[derive(Debug, PartialEq)]
pub(crate) struct Put {
    pub(crate) key: String,
    created: i64,
    value: String,
    pub(crate) lease: i64,
}

/// What there is under a name, the oldest first.
pub(crate) async fn line(etcd: &Plain, name: &str) -> Vec<Put> {
    let read = |kv: &KeyValue| Put {
        key: kv.key_str().unwrap().to_owned(),
        created: kv.create_revision(),
        value: kv.value_str().unwrap().to_owned(),
        lease: kv.lease(),
    };
    queue(etcd, name).await.iter().map(read).collect()
}

/// The only key under a name.
pub(crate) async fn only(etcd: &Plain, name: &str) -> Put {
    let mut found = line(etcd, name).await;
    assert_eq!(found.len(), 1, "{found:?}");
    found.remove(0)
}

#[tokio::test]
async fn a_name_that_one_client_takes_again_and_again_has_one_key() {
    const ROUNDS: usize = 50;
    let server = start().await;
    let (lock, etcd) = (client(&server).await, plain(&server).await);
    let locks = Locks::new(lock.clone());
    for _ in 0..ROUNDS {
        locks.lock("n").ttl(LONG).await.unwrap().release().await.unwrap();
        // Refused claims, and claims with a lease of their own, leave no trace either.
        let guard = locks
            .lock("own")
            .ttl(LONG)
            .renew(lock_core::Renew::Never)
            .await
            .unwrap();
        busy(&lock, &claim("own", LONG)).await;
        busy(&lock, &claim("own", LONG).with_own_lease()).await;
        guard.release().await.unwrap();
    }
    assert_eq!(etcd.lease_client().leases().await.unwrap().leases().len(), 1);
    for name in ["n", "own"] {
        let keys = history(&etcd, name).await;
        assert_eq!(keys.into_values().collect::<Vec<_>>(), [ROUNDS], "{name}");
    }
}

/// A client whose requests can be held back, which gives them up.
pub(crate) async fn through(server: &Etcd, proxy: &Proxy) -> EtcdLock {
    let config = config_behind(server, proxy);
    config.op_timeout(GIVEN_UP).connect().await.unwrap()
}

#[tokio::test]
async fn a_release_that_arrives_late_spares_the_next_claim_of_the_same_client() {
    let server = start().await;
    let proxy = Proxy::start(server.authority()).await.unwrap();
    let (lock, etcd) = (through(&server, &proxy).await, plain(&server).await);
    let (late, next) = (claim("n", LONG), claim("n", LONG));
    granted(&lock, &late).await;
    let key = only(&etcd, "n").await;
    let held = proxy.hold(key.key.as_bytes());
    fails(&proxy, &held, lock.release(&late, None)).await;
    clean_up(&lock, &late).await;
    granted(&lock, &next).await;
    let before = only(&etcd, "n").await;
    assert_eq!(before.key, key.key);
    deliver(&server, &proxy, held).await;
    assert_eq!(only(&etcd, "n").await, before);
    assert_eq!(lock.release(&next, None).await.unwrap(), Released::Released);
}

#[tokio::test]
async fn a_request_to_take_a_name_that_arrives_late_changes_nothing_for_the_next_claim_of_the_same_client() {
    let server = start().await;
    raise_base(&plain(&server).await).await;
    let proxy = Proxy::start(server.authority()).await.unwrap();
    let (lock, etcd) = (through(&server, &proxy).await, plain(&server).await);
    let (late, next) = (claim("n", LONG), claim("n", LONG));
    // Keeps the lease that all share.
    granted(&lock, &claim("kept", LONG)).await;
    let held = proxy.hold(late.owner().to_string().as_bytes());
    fails(&proxy, &held, lock.try_acquire(&late)).await;
    assert_eq!(clean_up(&lock, &late).await, Released::NotHeld);
    granted(&lock, &next).await;
    let before = only(&etcd, "n").await;
    deliver(&server, &proxy, held).await;
    assert_eq!(only(&etcd, "n").await, before);
    assert_eq!(lock.release(&next, None).await.unwrap(), Released::Released);
    assert!(queue(&etcd, "n").await.is_empty());
}

#[tokio::test]
async fn a_claim_can_be_released_through_another_client() {
    let server = shared().await;
    let (one, other, etcd) = (client(&server).await, client(&server).await, plain(&server).await);
    for held in [claim("n", LONG), claim("n", LONG).with_own_lease()] {
        granted(&one, &held).await;
        assert_eq!(other.release(&claim("n", LONG), None).await.unwrap(), Released::NotHeld);
        busy(&other, &claim("n", LONG)).await;
        assert_eq!(other.release(&held, None).await.unwrap(), Released::Released);
        assert!(queue(&etcd, "n").await.is_empty());
        // Who released it first has the last word on the next.
        let next = claim("n", LONG);
        granted(&other, &next).await;
        assert_eq!(one.release(&held, None).await.unwrap(), Released::NotHeld);
        assert_eq!(other.release(&next, None).await.unwrap(), Released::Released);
    }
}

#[tokio::test]
async fn a_claim_far_back_in_a_queue_can_be_released_through_another_client() {
    const BEFORE: usize = 1100;
    let server = shared().await;
    let (one, other, etcd) = (client(&server).await, client(&server).await, plain(&server).await);
    for number in 0..BEFORE {
        let key = format!("{}stranger.0.{number}", etcd.prefix("n"));
        let value = format!("2 {} c 1 - 0 host", lock_core::OwnerId::random());
        etcd.kv_client().put(key, value, None).await.unwrap();
    }
    let wanted = claim("n", LONG);
    let waiting = waiting(&one, &wanted);
    until_queued(&etcd, "n", BEFORE).await;
    waiting.abort();
    assert!(waiting.await.unwrap_err().is_cancelled());
    assert_eq!(other.release(&wanted, None).await.unwrap(), Released::NotHeld);
    let left = line(&etcd, "n").await;
    assert_eq!(left.len(), BEFORE);
    let owner = wanted.owner().to_string();
    assert!(!left.iter().any(|put| put.value.contains(&owner)));
}

#[tokio::test]
async fn a_claim_on_a_shared_lease_that_is_asked_for_again_through_another_client_is_that_one_s() {
    let server = shared().await;
    let (one, other, etcd) = (client(&server).await, client(&server).await, plain(&server).await);
    let wanted = claim("n", LONG);
    let mut last = granted(&one, &wanted).await.token;
    for (lock, waits) in [(&other, false), (&one, true), (&other, true), (&one, false)] {
        let before = only(&etcd, "n").await;
        let grant = if waits {
            waited(lock, &wanted).await
        } else {
            granted(lock, &wanted).await
        };
        assert!(grant.token > last);
        assert_ne!(only(&etcd, "n").await.lease, before.lease);
        last = grant.token;
    }
}

#[tokio::test]
async fn what_is_left_under_a_key_of_a_claim_that_was_released_is_in_nobodys_way() {
    let server = shared().await;
    let (lock, etcd) = (client(&server).await, plain(&server).await);
    let released = claim("n", LONG);
    granted(&lock, &released).await;
    let left = only(&etcd, "n").await;
    lock.release(&released, None).await.unwrap();
    for waits in [false, true] {
        // As after the restore of an older state.
        etcd.kv_client().put(&*left.key, &*left.value, None).await.unwrap();
        let next = claim("n", LONG);
        if waits {
            waited(&lock, &next).await;
        } else {
            granted(&lock, &next).await;
        }
        assert_ne!(only(&etcd, "n").await.value, left.value);
        lock.release(&next, None).await.unwrap();
    }
}
