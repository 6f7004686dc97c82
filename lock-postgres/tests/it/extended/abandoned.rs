//! Answers that arrive after their caller has given up.

use std::time::Duration;

use lock_core::{DistributedLock, Locks, Options};

use crate::abandoned::TTL;
use crate::server::proxy::Proxy;
use crate::server::{Database, claim, granted};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_that_is_lost_after_the_grant_leaves_nothing_beside_another_lock_that_is_held() {
    let server = Database::new().await;
    let proxy = Proxy::to(server.port()).await;
    // Each request that is not answered takes that long; time enough for those that are.
    let config = server.config_at(proxy.port()).op_timeout(Duration::from_secs(3));
    let (lock, other) = (config.connect().await.unwrap(), server.client().await);
    let locks = Locks::with_options(lock.clone(), Options::new().ttl(TTL));
    let kept = locks.lock("kept").await.unwrap();
    let mine = claim("a", TTL);
    proxy.hold_answers();
    let error = lock.try_acquire(&mine).await.unwrap_err();
    assert!(error.is_retryable(), "{error}");
    // The server has granted it; the client does not know.
    server.until_locks(2).await;
    assert!(lock.release(&mine, None).await.is_err());
    proxy.pass();
    server.until_locks(1).await;
    assert!(kept.is_held(), "a lost answer costs only what it was about");
    granted(&other, &claim("a", TTL)).await;
}
