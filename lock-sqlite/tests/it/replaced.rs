//! A file that is replaced or removed while it is open.

use std::fs;

use lock_core::{DistributedLock, Locks, LossReason, Released, Renew, Renewal};
use lock_sqlite::SqliteLock;

use crate::file::{File, HANG_LIMIT, LONG, claim, granted, in_time};

#[tokio::test]
async fn a_file_that_vanishes_is_told_once_and_made_again() {
    for gone in ["locks.db", "locks.db-wal", "locks.db-shm"] {
        let file = File::new();
        let lock = file.client().await;
        let grant = granted(&lock, &claim("n", LONG)).await;
        fs::remove_file(file.beside(gone)).unwrap();
        let failed = lock.try_acquire(&claim("other", LONG)).await.unwrap_err();
        assert!(failed.is_retryable(), "{failed}");
        let told = format!("{failed:#}");
        assert!(told.contains("replaced or removed while it was in use"), "{told}");
        // Other locks of the client are lost with it.
        assert_eq!(grant.revoked(), Some(LossReason::NotHeld));
        let next = granted(&lock, &claim("other", LONG)).await;
        assert!(next.token > grant.token);
    }
}

/// Its lease would end, and its next renewal come, long after the test.
#[tokio::test]
async fn a_holder_hears_soon_that_its_files_are_gone_although_it_asks_for_nothing() {
    for gone in [&["locks.db"][..], &["locks.db-wal", "locks.db-shm"]] {
        let file = File::new();
        let holder = Locks::new(file.client().await);
        let guard = holder.lock("n").ttl(3 * HANG_LIMIT).renew(Renew::Never).await.unwrap();
        for name in gone {
            fs::remove_file(file.beside(name)).unwrap();
        }
        assert_eq!(in_time(guard.lost().wait()).await, LossReason::NotHeld, "{gone:?}");
    }
}

#[tokio::test]
async fn a_holder_hears_soon_that_its_file_was_replaced_or_set_back_while_its_client_had_it_closed() {
    for set_back in [false, true] {
        let file = File::new();
        let lock = file.client().await;
        let holder = Locks::new(lock.clone());
        file.copy_to(file.beside("copy"));
        let guard = holder.lock("n").ttl(3 * HANG_LIMIT).renew(Renew::Never).await.unwrap();
        // A failure of SQLite that leaves the connection in doubt.
        file.sql("ALTER TABLE counter RENAME TO hidden");
        lock.try_acquire(&claim("other", LONG)).await.unwrap_err();
        if set_back {
            file.sql(
                "ALTER TABLE hidden RENAME TO counter; UPDATE counter SET token = token - 50, ceiling = token - 50",
            );
        } else {
            fs::rename(file.beside("copy"), file.path()).unwrap();
        }
        assert_eq!(in_time(guard.lost().wait()).await, LossReason::NotHeld, "{set_back}");
    }
}

#[tokio::test]
async fn a_renewal_of_a_replaced_file_says_that_the_lock_is_lost_and_a_release_finds_the_copy() {
    let file = File::new();
    let lock = file.client().await;
    let held = claim("n", LONG);
    let grant = granted(&lock, &held).await;
    file.copy_to(file.beside("copy"));
    fs::rename(file.beside("copy"), file.path()).unwrap();
    assert_eq!(lock.renew(&grant.lease).await.unwrap(), Renewal::NotHeld);
    assert_eq!(lock.release(&held, None).await.unwrap(), Released::Released);
    assert_eq!(file.rows(), 0);
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
    fs::rename(&moved, &dir).unwrap();
    // The same file as before, with its locks.
    assert_eq!(lock.renew(&grant.lease).await.unwrap(), Renewal::Renewed);
}
