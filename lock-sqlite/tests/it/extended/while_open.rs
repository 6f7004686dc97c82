//! A file that another process blocks for long.

use std::time::Duration;

use lock_core::{DistributedLock, LockError, Wait};
use lock_sqlite::SqliteConfig;
use rusqlite::Connection;

use crate::file::{File, HANG_LIMIT, LONG, claim, granted, until_waiting};

#[tokio::test]
async fn a_wait_whose_time_ends_while_another_process_is_stuck_ends_in_time_and_says_for_how_long() {
    const TTL: Duration = Duration::from_secs(2);
    let file = File::new();
    let lock = SqliteConfig::new(file.path())
        .op_timeout(2 * HANG_LIMIT)
        .connect()
        .await
        .unwrap();
    granted(&file.client().await, &claim("n", TTL)).await;
    let wanted = claim("n", LONG);
    let wait = 2 * TTL;
    let mut waiting = std::pin::pin!(lock.acquire(&wanted, Wait::until(Some(lock.clock().now() + wait))));
    until_waiting(&lock, waiting.as_mut()).await;
    // The name becomes free while nobody can write.
    let stuck = Connection::open(file.path()).unwrap();
    stuck.execute_batch("BEGIN IMMEDIATE").unwrap();
    let attempt = tokio::time::timeout(HANG_LIMIT, waiting).await;
    let failed = attempt
        .expect("the wait ends before the limit of one request")
        .unwrap_err();
    assert!(matches!(failed, LockError::Unavailable { .. }), "{failed}");
    assert!(!format!("{failed:#}").contains("within 120"), "{failed}");
    stuck.execute_batch("COMMIT").unwrap();
}
