//! Locks that several hold at once, as far as the suite does not show them, and what a backend cannot do.

use std::time::Duration;

use lock_core::{LockError, LockRequest, Locks};

use crate::engine::scripted::{SECOND, World, ask, granted};
use crate::{paused, until};

const HOUR: Duration = Duration::from_secs(3600);

#[tokio::test(start_paused = true)]
async fn several_locks_are_shared_together() {
    let memory = paused::memory();
    let [one, other] = [(); 2].map(|()| paused::client(memory.client()));
    let readers = one.lock_all(["a", "b"]).shared().await.unwrap();
    let beside = other.lock_all(["b", "a"]).shared().await.unwrap();
    assert!(other.lock_all(["b"]).no_wait().await.unwrap_err().is_busy());
    readers.release().await.unwrap();
    beside.release().await.unwrap();
    assert!(other.lock_all(["b"]).no_wait().await.unwrap().is_held());
}

#[tokio::test(start_paused = true)]
async fn a_downgrade_that_fails_releases_the_lock() {
    let memory = paused::memory();
    let locks = paused::client(memory.client());
    let guard = locks.lock("a").await.unwrap();
    memory.set_reachable(false);
    let error = fails!(guard.downgrade().await, LockError::Unavailable { .. });
    assert!(error.name().is_some(), "{error}");
    memory.set_reachable(true);
    locks.drain().await;
    assert!(locks.holder("a").await.unwrap().is_none());
    // Nor does a future that is dropped leave anything.
    for is_polled in [false, true] {
        let mut downgrade = Box::pin(locks.lock("a").await.unwrap().downgrade());
        if is_polled {
            assert!(tokio::time::timeout(Duration::ZERO, &mut downgrade).await.is_err());
        }
        drop(downgrade);
        until(|| locks.stats().held == 0).await;
        locks.drain().await;
        assert!(locks.holder("a").await.unwrap().is_none());
    }
    let guard = locks.lock("b").at_least(SECOND).await.unwrap();
    fails!(guard.downgrade().await, LockError::NotSupported { .. });
    // One that was lost.
    let guard = locks.lock("a").await.unwrap();
    memory.steal(guard.name());
    fails!(guard.downgrade().await, LockError::Lost { .. });
}

#[tokio::test(start_paused = true)]
async fn a_lock_that_is_kept_for_the_next_holder_is_released_for_one_that_shares() {
    let memory = paused::memory();
    let locks = Locks::with_options(memory.client(), paused::options().linger(9 * SECOND));
    for _ in 0..3 {
        locks.lock("a").await.unwrap().release().await.unwrap();
        tokio::time::sleep(SECOND / 1000).await;
    }
    let reader = locks.lock("a").shared().no_wait().await.unwrap();
    reader.release().await.unwrap();
    assert!(locks.holder("a").await.unwrap().is_none(), "a share is not kept");
    // Nor do those wait for its time that are there before it is released.
    let guard = locks.lock("a").await.unwrap();
    let readers = [(); 3].map(|()| ask(locks.lock("a").shared().wait_for(SECOND)));
    until(|| memory.waiters() == 3).await;
    guard.release().await.unwrap();
    for reader in readers {
        assert!(granted(reader).await.is_held());
    }
}

#[tokio::test(start_paused = true)]
async fn what_the_backend_cannot_is_refused_before_anything_is_sent() {
    let plain = World::new();
    let memory = paused::client(paused::memory());
    let run = plain.locks.run_once_per("job", HOUR, async |_| panic!("it runs"));
    for refused in [
        plain.lock("a").shared().await.map(drop),
        plain.lock("a").at_least(HOUR).await.map(drop),
        plain.locks.semaphore("a", 2).await.map(drop),
        run.await.map(drop),
        memory.lock("a").shared().at_least(SECOND).await.map(drop),
        plain.held("b").await.downgrade().await.map(drop),
    ] {
        let error = fails!(refused, LockError::NotSupported { .. });
        assert!(error.name().is_some(), "{error}");
    }
    // No time at all needs no reservation.
    drop(plain.lock("c").at_least(Duration::ZERO).await.unwrap());
    plain.locks.drain().await;
    assert_eq!(plain.requests(), 4, "two locks were acquired and released");

    let reserves = World::with(|kind| kind.reserves = true);
    let too_long = LockRequest::MAX_AT_LEAST + Duration::from_nanos(1);
    let refused = reserves.lock("job").at_least(too_long).await;
    let error = fails!(refused, LockError::Configuration { .. });
    assert!(error.to_string().contains("366 days"), "{error}");
    assert_eq!((reserves.requests(), memory.stats().acquired), (0, 0));
}
