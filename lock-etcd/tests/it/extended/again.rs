//! Requests that arrive late, when their key is used again.

use conformance_tests::faults::Proxy;
use lock_core::{DistributedLock, Released, Wait};

use crate::again::{line, only, through};
use crate::server::{
    LONG, claim, clean_up, client, deliver, fails, granted, plain, queue, raise_base, soon, start, until_queued,
    waiting,
};

#[tokio::test]
async fn a_release_that_is_dropped_under_way_spares_the_next_claim_of_the_same_client() {
    let server = start().await;
    let proxy = Proxy::start(server.authority()).await.unwrap();
    let (lock, etcd) = (through(&server, &proxy).await, plain(&server).await);
    let (late, next) = (claim("n", LONG), claim("n", LONG));
    granted(&lock, &late).await;
    let key = only(&etcd, "n").await;
    let held = proxy.hold(key.key.as_bytes());
    tokio::select! {
        biased;
        _ = lock.release(&late, None) => panic!("it is held back"),
        () = held.caught() => {}
    }
    clean_up(&lock, &late).await;
    granted(&lock, &next).await;
    let before = only(&etcd, "n").await;
    deliver(&server, &proxy, held).await;
    assert_eq!(only(&etcd, "n").await, before);
    assert_eq!(before.key, key.key);
}

#[tokio::test]
async fn a_request_to_join_a_queue_that_arrives_late_joins_nothing() {
    let server = start().await;
    raise_base(&plain(&server).await).await;
    let proxy = Proxy::start(server.authority()).await.unwrap();
    let (lock, holder, etcd) = (
        through(&server, &proxy).await,
        client(&server).await,
        plain(&server).await,
    );
    let (late, next, in_the_way) = (claim("n", LONG), claim("n", LONG), claim("n", LONG));
    granted(&lock, &claim("kept", LONG)).await;
    granted(&holder, &in_the_way).await;
    let held = proxy.hold(late.owner().to_string().as_bytes());
    fails(&proxy, &held, lock.acquire(&late, Wait::until(soon()))).await;
    clean_up(&lock, &late).await;
    let waiting = waiting(&lock, &next);
    until_queued(&etcd, "n", 1).await;
    let before = line(&etcd, "n").await;
    deliver(&server, &proxy, held).await;
    assert_eq!(line(&etcd, "n").await, before);
    holder.release(&in_the_way, None).await.unwrap();
    waiting.await.unwrap();
    assert_eq!(lock.release(&next, None).await.unwrap(), Released::Released);
    assert!(queue(&etcd, "n").await.is_empty());
}
