//! What lies on the server from before: before its restart, or from an older version of this library.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use lock_core::{DistributedLock, Locks, Wait};

use crate::server::{LONG, Server, claim, name, soon, until, until_queued};

/// A lock that is held and waited for while the server is killed and comes back, after `before`.
async fn restart(mut server: Server, before: impl AsyncFnOnce(&Server)) {
    let (holder, other) = (Locks::new(server.client().await), server.client().await);
    let guard = holder.lock("n").ttl(LONG).await.unwrap();
    let wanted = claim("n", LONG);
    let wait = tokio::spawn({
        let lock = server.client().await;
        async move { (lock.acquire(&wanted, Wait::until(soon())).await, lock, wanted) }
    });
    until_queued(&server, "n", 1).await;
    before(&server).await;
    // All the time somebody tries to get in.
    let over = Arc::new(AtomicBool::new(false));
    let answers = Arc::new(AtomicUsize::new(0));
    let trying = tokio::spawn({
        let (other, over, answers) = (other.clone(), Arc::clone(&over), Arc::clone(&answers));
        async move {
            while !over.load(Ordering::Acquire) {
                if let Ok(attempt) = other.try_acquire(&claim("n", LONG)).await {
                    assert!(attempt.granted().is_none());
                    answers.fetch_add(1, Ordering::SeqCst);
                }
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
    });
    server.kill();
    server.revive();
    // The first requests may meet the connection that broke.
    let mut found = None;
    until("the server tells the holder", async || {
        found = other.holders(&name("n")).await.ok();
        found.is_some()
    })
    .await;
    assert_eq!(found.unwrap()[0].token, Some(guard.token()));
    until("a renewal succeeds", async || {
        let renewed = guard.renew_now().await.is_ok();
        assert!(guard.is_held(), "a connection that broke loses no lock");
        renewed
    })
    .await;
    let before = answers.load(Ordering::SeqCst);
    until("the server says that the lock is busy", async || {
        answers.load(Ordering::SeqCst) > before
    })
    .await;
    over.store(true, Ordering::Release);
    trying.await.unwrap();
    let token = guard.token();
    guard.release().await.unwrap();
    let (attempt, lock, wanted) = wait.await.unwrap();
    let grant = match attempt {
        Ok(attempt) => attempt.granted().unwrap(),
        // The core would ask again too.
        Err(error) if error.is_retryable() => lock
            .acquire(&wanted, Wait::until(soon()))
            .await
            .unwrap()
            .granted()
            .unwrap(),
        Err(error) => panic!("{error}"),
    };
    assert!(grant.token > token);
}

#[tokio::test]
async fn a_held_lock_survives_a_restart_with_an_append_only_file() {
    for fsync in ["everysec", "no", "always"] {
        let server = Server::with(&["--appendonly", "yes", "--appendfsync", fsync]);
        restart(server, Server::until_written).await;
    }
}

#[tokio::test]
async fn a_held_lock_survives_a_restart_with_a_snapshot() {
    restart(Server::start(), async |server| server.command("SAVE").await).await;
}
