//! Requests and answers that arrive after their clean-up.

use std::time::Duration;

use lock_core::{DistributedLock, Locks, Options};
use lock_postgres::PostgresLock;

use crate::abandoned::TTL;
use crate::server::proxy::Proxy;
use crate::server::{Database, claim, granted};

/// Each request that is not answered takes that long; time enough for those that are.
async fn through(server: &Database, proxy: &Proxy) -> PostgresLock {
    let config = server.config_at(proxy.port()).op_timeout(Duration::from_secs(3));
    config.connect().await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_that_is_lost_after_the_grant_leaves_nothing_beside_another_lock_that_is_held() {
    let server = Database::new().await;
    let proxy = Proxy::to(server.port()).await;
    let lock = through(&server, &proxy).await;
    let other = server.client().await;
    let locks = Locks::with_options(lock.clone(), Options::new().ttl(TTL));
    let kept = locks.lock("kept").await.unwrap();
    let mine = claim("a", TTL);
    proxy.hold_answers();
    let error = lock.try_acquire(&mine).await.unwrap_err();
    assert!(error.is_retryable(), "{error}");
    // It was granted: nobody has heard of it.
    server.until_locks(2).await;
    let releasing = lock.release(&mine, None);
    assert!(releasing.await.is_err());
    proxy.pass();
    server.until_locks(1).await;
    assert!(kept.is_held(), "a lost answer costs only what it was about");
    granted(&other, &claim("a", TTL)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_arrives_after_its_clean_up_leaves_nothing_beside_another_lock_that_is_held() {
    let server = Database::new().await;
    let proxy = Proxy::to(server.port()).await;
    let lock = through(&server, &proxy).await;
    let locks = Locks::with_options(lock.clone(), Options::new().ttl(TTL));
    let kept = locks.lock("kept").await.unwrap();
    for name in ["a", "b", "c"] {
        let mine = claim(name, TTL);
        proxy.hold_requests_after(0);
        assert!(lock.try_acquire(&mine).await.is_err());
        // The client has done what it can, and goes on.
        assert!(lock.release(&mine, None).await.is_err());
        proxy.pass();
        server.until_locks(1).await;
        let mut looks = 0;
        while looks < 20 {
            assert!(server.locks().await <= 2);
            looks += 1;
        }
        server.until_locks(1).await;
        assert!(kept.is_held());
    }
    // Of a claim that wants a session to itself, while its connection is given up for good.
    let own = claim("own", TTL).with_own_lease();
    proxy.hold_requests_after(0);
    assert!(lock.try_acquire(&own).await.is_err());
    drop((kept, locks));
    lock.close().await.unwrap();
    drop(lock);
    proxy.pass();
    server.until_locks(0).await;
}
