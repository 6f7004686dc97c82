//! A file that is replaced or removed while it is open.

use std::fs;

use lock_core::{DistributedLock, Locks, LossReason, Released, Renew, Renewal};
use lock_sqlite::SqliteLock;

use crate::file::{File, HANG_LIMIT, claim, granted, in_time, refusal};

#[tokio::test]
async fn a_file_that_vanishes_is_told_once_and_made_again() {
    for gone in ["locks.db", "locks.db-wal", "locks.db-shm"] {
        let file = File::new();
        let lock = file.client().await;
        let grant = granted(&lock, &claim("n")).await;
        fs::remove_file(file.beside(gone)).unwrap();
        let failed = lock.try_acquire(&claim("other")).await.unwrap_err();
        let told = format!("{failed:#}");
        assert!(
            failed.is_retryable() && told.contains("replaced or removed while it was in use"),
            "{told}"
        );
        // Other locks of the client are lost with it.
        assert_eq!(grant.revoked(), Some(LossReason::NotHeld));
        assert!(granted(&lock, &claim("other")).await.token > grant.token);
    }
}

/// What happens to a holder's files.
#[derive(Clone, Copy, Debug)]
enum Event {
    Removed,
    LogRemoved,
    ReplacedWhileClosed,
    SetBackWhileClosed,
}

/// Its lease would end, and its next renewal come, long after the test.
#[tokio::test]
async fn a_holder_hears_soon_what_happened_to_its_files_although_it_asks_for_nothing() {
    use Event::*;

    for event in [Removed, LogRemoved, ReplacedWhileClosed, SetBackWhileClosed] {
        let file = File::new();
        let lock = file.client().await;
        let copy = file.copy();
        let holder = Locks::new(lock.clone());
        let guard = holder.lock("n").ttl(3 * HANG_LIMIT).renew(Renew::Never).await.unwrap();
        if matches!(event, ReplacedWhileClosed | SetBackWhileClosed) {
            // A failure of SQLite that leaves the connection in doubt, so that the client closes the file.
            file.sql("ALTER TABLE counter RENAME TO hidden");
            lock.try_acquire(&claim("other")).await.unwrap_err();
        }
        match event {
            Removed => fs::remove_file(file.path()).unwrap(),
            LogRemoved => ["-wal", "-shm"]
                .into_iter()
                .for_each(|end| fs::remove_file(file.beside(&format!("locks.db{end}"))).unwrap()),
            ReplacedWhileClosed => fs::rename(copy, file.path()).unwrap(),
            SetBackWhileClosed => file.sql(
                "ALTER TABLE hidden RENAME TO counter; UPDATE counter SET token = token - 50, ceiling = token - 50",
            ),
        }
        assert_eq!(in_time(guard.lost().wait()).await, LossReason::NotHeld, "{event:?}");
    }
}

#[tokio::test]
async fn a_renewal_of_a_replaced_file_says_that_the_lock_is_lost_and_a_release_finds_the_copy() {
    let file = File::new();
    let lock = file.client().await;
    let held = claim("n");
    let grant = granted(&lock, &held).await;
    fs::rename(file.copy(), file.path()).unwrap();
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
    let grant = granted(&lock, &claim("n")).await;
    fs::rename(&dir, &moved).unwrap();
    lock.try_acquire(&claim("n")).await.unwrap_err();
    let why = refusal(lock.try_acquire(&claim("n")).await);
    assert!(why.contains("create it"), "{why}");
    fs::rename(&moved, &dir).unwrap();
    // The same file as before, with its locks.
    assert_eq!(lock.renew(&grant.lease).await.unwrap(), Renewal::Renewed);
}
