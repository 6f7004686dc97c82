//! Locks without a runtime.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use fencelock::{LockError, LossReason, ReleaseOutcome, Retry, blocking};

use crate::until;

fn locks() -> blocking::Locks {
    blocking::connect("memory:").unwrap()
}

#[test]
fn threads_without_a_runtime_take_turns() {
    let locks = locks();
    let inside = Arc::new(AtomicBool::new(false));
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..20 {
                    let guard = locks.lock("a").acquire().unwrap();
                    assert!(!inside.swap(true, Ordering::SeqCst), "one holds at a time");
                    thread::yield_now();
                    inside.store(false, Ordering::SeqCst);
                    assert_eq!(guard.release().unwrap(), ReleaseOutcome::Released);
                }
            });
        }
    });
}

#[test]
fn what_is_asked_for_is_what_is_held() {
    let locks = locks();
    let guard = locks
        .scoped("shop")
        .lock("a")
        .ttl(Duration::from_secs(70))
        .label("till")
        .acquire()
        .unwrap();
    assert_eq!(
        (guard.name().as_str(), guard.ttl()),
        ("shop/a", Duration::from_secs(70))
    );
    assert!(guard.is_held() && guard.remaining() <= guard.ttl());
    guard.renew_now().unwrap();
    let holder = locks.holder("shop/a").unwrap().unwrap();
    assert_eq!(holder.owner, Some(guard.owner()));
    assert_eq!(holder.token, Some(guard.token()));
    assert_eq!(locks.list("shop/").unwrap().len(), 1);
    assert!(locks.try_lock("shop/a").unwrap().is_none());
    let busy = locks
        .lock("shop/a")
        .wait_for(Duration::from_millis(10))
        .acquire()
        .unwrap_err();
    assert!(busy.is_busy(), "{busy}");
    let busy = locks
        .lock("shop/a")
        .retry(Retry::new(2, Duration::from_millis(1)))
        .acquire()
        .unwrap_err();
    assert!(busy.is_busy(), "{busy}");
    drop(guard);
    locks.drain();
    assert_eq!(locks.list("").unwrap(), []);
}

#[test]
fn a_body_runs_under_the_lock_and_a_loss_is_told() {
    let locks = locks();
    let token = locks.lock("a").with(|guard| guard.token()).unwrap();
    let (other, ended) = (locks.clone(), locks.clone());
    let guard = locks.lock("a").acquire().unwrap();
    assert!(guard.token() > token);
    let watches = thread::spawn(move || (guard.wait_lost(), guard.is_held()));
    ended.shutdown().unwrap();
    assert_eq!(watches.join().unwrap(), (LossReason::Shutdown, false));
    let closed = other.lock("a").with(|_| ()).unwrap_err();
    assert!(matches!(closed, LockError::Closed { .. }), "{closed}");
}

/// Where a thread may block, in a program that has a runtime.
#[tokio::test]
async fn a_thread_of_a_runtime_that_may_block_uses_them_too() {
    let locks = fencelock::connect("memory:").await.unwrap();
    let held = locks.lock("a").await.unwrap();
    let blocking = blocking::Locks::from(locks.clone());
    let waits = tokio::task::spawn_blocking(move || blocking.lock("a").acquire().unwrap().token());
    until(|| locks.stats().waiting > 0).await;
    let token = held.token();
    held.release().await.unwrap();
    assert!(waits.await.unwrap() > token);
}
