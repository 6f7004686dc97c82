//! What the backend promises to the core.

use std::time::Duration;

use lock_core::{DistributedLock, Locks, LossReason, Released};

use crate::server::{Database, claim, granted, in_time};

const TTL: Duration = Duration::from_secs(30);

#[tokio::test]
async fn a_lock_is_one_advisory_lock_and_goes_with_its_release() {
    let server = Database::new().await;
    let (lock, claim) = (server.client().await, claim("a", TTL));
    granted(&lock, &claim).await;
    // However often it is asked for.
    granted(&lock, &claim).await;
    assert_eq!(server.locks().await, 1);
    assert_eq!(lock.release(&claim, None).await.unwrap(), Released::Released);
    assert_eq!(server.locks().await, 0);
}

#[tokio::test]
async fn a_session_that_is_ended_is_told_at_once() {
    let server = Database::new().await;
    let lock = server.client().await;
    let locks = Locks::new(lock.clone());
    let guard = locks.lock("a").ttl(TTL).await.unwrap();
    server.end_sessions().await;
    let told = in_time(guard.lost().wait()).await;
    // And not because its time is over.
    assert_eq!(told, LossReason::Revoked);
    assert!(!guard.is_held());
    locks.lock("a").ttl(TTL).await.unwrap().release().await.unwrap();
}
