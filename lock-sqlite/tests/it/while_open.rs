//! What happens to a file while it is open: it is replaced, damaged, blocked by another process.

use std::fs;

use crate::file::{File, LONG, claim, granted, name, until_waiting, waited};
use lock_core::{DistributedLock, LockError, Released, Renewal, Wait};
use lock_sqlite::SqliteLock;

#[tokio::test]
async fn a_damaged_entry_hides_no_other_and_can_be_forced_free() {
    let file = File::new();
    let lock = file.client().await;
    for n in ["a", "b", "c"] {
        granted(&lock, &claim(n, LONG)).await;
    }
    file.sql("UPDATE lock SET owner = 'nobody' WHERE name = 'b'");
    assert_eq!(lock.list("").await.unwrap().len(), 2);
    for failed in [
        lock.holders(&name("b")).await.map(drop).unwrap_err(),
        lock.acquire(&claim("b", LONG), Wait::until(None))
            .await
            .map(drop)
            .unwrap_err(),
    ] {
        assert!(matches!(failed, LockError::Configuration { .. }), "{failed}");
        assert!(format!("{failed:#}").contains("force the lock free"), "{failed}");
    }
    let forced = lock.force_release(&name("b")).await.unwrap().pop().unwrap();
    assert_eq!(forced.name, Some(name("b")));
    granted(&lock, &claim("b", LONG)).await;
}

#[tokio::test]
async fn a_waiter_whose_entry_is_damaged_leaves_the_other_waiters_waiting() {
    let file = File::new();
    let lock = file.client().await;
    let held = claim("good", LONG);
    granted(&lock, &held).await;
    granted(&lock, &claim("bad", LONG)).await;
    let (good, bad) = (claim("good", LONG), claim("bad", LONG));
    let mut good = std::pin::pin!(lock.acquire(&good, Wait::until(None)));
    let mut bad = std::pin::pin!(lock.acquire(&bad, Wait::until(None)));
    until_waiting(&lock, good.as_mut()).await;
    until_waiting(&lock, bad.as_mut()).await;
    file.sql("UPDATE lock SET token = -1 WHERE name = 'bad'");
    let failed = bad.await.unwrap_err();
    assert!(format!("{failed:#}").contains("force the lock free"), "{failed}");
    lock.release(&held, None).await.unwrap();
    assert!(good.await.unwrap().granted().is_some());
}

#[tokio::test]
async fn a_file_that_vanishes_is_told_once_and_made_again() {
    for gone in ["locks.db", "locks.db-wal", "locks.db-shm"] {
        let file = File::new();
        let lock = file.client().await;
        let held = claim("n", LONG);
        let grant = granted(&lock, &held).await;
        fs::remove_file(file.beside(gone)).unwrap();
        let failed = lock.try_acquire(&claim("other", LONG)).await.unwrap_err();
        assert!(failed.is_retryable(), "{failed}");
        assert!(
            format!("{failed:#}").contains("replaced or removed while it was in use"),
            "{failed}"
        );
        let next = granted(&lock, &claim("other", LONG)).await;
        assert!(next.token > grant.token);
        if gone == "locks.db" {
            assert_eq!(lock.renew(&grant.lease).await.unwrap(), Renewal::NotHeld);
        }
    }
}

#[tokio::test]
async fn a_holder_whose_file_is_replaced_hears_of_it_at_the_next_renewal() {
    let file = File::new();
    let lock = file.client().await;
    let held = claim("n", LONG);
    let grant = granted(&lock, &held).await;
    file.copy_to(file.beside("copy"));
    fs::rename(file.beside("copy"), file.path()).unwrap();
    assert_eq!(lock.renew(&grant.lease).await.unwrap(), Renewal::NotHeld);
    // The copy has the lock too; the release finds it there.
    assert_eq!(lock.release(&held, None).await.unwrap(), Released::Released);
    assert_eq!(file.rows(), 0);
}

#[tokio::test]
async fn those_who_wait_hear_of_a_replaced_file_too() {
    let file = File::new();
    let lock = file.client().await;
    granted(&lock, &claim("n", LONG)).await;
    let wanted = claim("n", LONG);
    let mut waiting = std::pin::pin!(lock.acquire(&wanted, Wait::until(None)));
    until_waiting(&lock, waiting.as_mut()).await;
    fs::remove_file(file.path()).unwrap();
    let failed = waiting.await.unwrap_err();
    assert!(format!("{failed:#}").contains("replaced or removed"), "{failed}");
    waited(&lock, &wanted).await;
}

#[tokio::test]
async fn a_vanished_directory_is_refused_until_it_is_back() {
    let file = File::new();
    let (dir, moved) = (file.beside("d"), file.beside("moved"));
    fs::create_dir(&dir).unwrap();
    let lock = SqliteLock::open(dir.join("locks.db")).await.unwrap();
    let grant = granted(&lock, &claim("n", LONG)).await;
    fs::rename(&dir, &moved).unwrap();
    lock.try_acquire(&claim("n", LONG)).await.unwrap_err();
    let refused = lock.try_acquire(&claim("n", LONG)).await.unwrap_err();
    assert!(format!("{refused:#}").contains("create it"), "{refused}");
    assert!(lock.renew(&grant.lease).await.is_err());
    fs::rename(&moved, &dir).unwrap();
    // The same file as before: nothing was lost after all.
    assert_eq!(lock.renew(&grant.lease).await.unwrap(), Renewal::Renewed);
}
