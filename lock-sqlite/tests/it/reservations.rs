//! Names that stay taken for a time, and what a reboot makes of them.

use std::time::Duration;

use crate::file::{File, LONG, SHORT, busy, claim, granted};
use lock_core::{DistributedLock, Released, Renewal};
use lock_sqlite::SqliteConfig;

const REBOOT: &str = "UPDATE lock SET boot = '00000000-0000-4000-8000-000000000000'";
const HOUR: Duration = Duration::from_secs(3600);

#[tokio::test]
async fn a_reboot_leaves_what_is_left_of_a_reservation_by_the_wall_clock() {
    for released in [false, true] {
        let file = File::new();
        let before = file.client().await;
        let (job, held) = (claim("job", LONG).with_at_least(HOUR), claim("held", LONG));
        let grant = granted(&before, &job).await;
        granted(&before, &held).await;
        assert_eq!(before.reserve(&job, HOUR).await.unwrap(), Renewal::Renewed);
        if released {
            assert_eq!(before.release(&job, Some(HOUR)).await.unwrap(), Released::Released);
        }
        // Ten minutes pass, and the boot clock begins anew.
        file.sql("UPDATE lock SET reserved_wall = reserved_wall - 600000000, acquired_at = acquired_at - 600000000");
        file.sql(&format!("{REBOOT}, expires = 1, reserved = min(reserved, 1)"));
        let after = file.client().await;
        assert!(
            after.holders(held.name()).await.unwrap().pop().is_none(),
            "a reboot frees what is held"
        );
        let shown = after.holders(job.name()).await.unwrap().pop().unwrap();
        let left = shown.remaining.unwrap();
        assert!(shown.is_reserved && shown.token == Some(grant.token), "{shown:?}");
        assert!(
            left <= Duration::from_secs(3000) && left > Duration::from_secs(2900),
            "{left:?}"
        );
        busy(&after, &claim("job", SHORT)).await;
        assert_eq!(after.renew(&grant.lease).await.unwrap(), Renewal::NotHeld);
        assert_eq!(after.reserve(&job, HOUR).await.unwrap(), Renewal::NotHeld);
    }
}

#[tokio::test]
async fn a_wall_clock_that_was_set_back_across_a_reboot_lengthens_no_reservation_beyond_its_whole() {
    let file = File::new();
    let before = file.client().await;
    let job = claim("job", LONG).with_at_least(HOUR);
    granted(&before, &job).await;
    before.reserve(&job, HOUR).await.unwrap();
    // As if both had been written by a clock that was ahead by a year.
    let year = 365_i64 * 24 * 3600 * 1_000_000;
    file.sql(&format!(
        "UPDATE lock SET reserved_wall = reserved_wall + {year}, acquired_at = acquired_at + {year}"
    ));
    file.sql(REBOOT);
    let after = file.client().await;
    let left = after
        .holders(job.name())
        .await
        .unwrap()
        .pop()
        .unwrap()
        .remaining
        .unwrap();
    assert!(left <= HOUR + Duration::from_secs(60), "{left:?}");
    // And one that was set forward ends it.
    file.sql(&format!("UPDATE lock SET reserved_wall = reserved_wall - {year}"));
    file.sql(REBOOT);
    assert!(file.client().await.holders(job.name()).await.unwrap().pop().is_none());
    assert_eq!(file.rows(), 0);
}

#[tokio::test]
async fn what_was_reserved_leaves_no_row_behind() {
    let file = File::new();
    let lock = file.client().await;
    for n in 0..32 {
        let job = claim(&format!("job {n}"), SHORT).with_at_least(Duration::from_millis(1));
        granted(&lock, &job).await;
        lock.reserve(&job, Duration::from_millis(1)).await.unwrap();
        lock.release(&job, Some(Duration::from_millis(1))).await.unwrap();
    }
    let last = claim("last", LONG);
    while file.rows() > 1 {
        granted(&lock, &last).await;
        lock.release(&last, None).await.unwrap();
        granted(&lock, &last).await;
    }
    lock.release(&last, None).await.unwrap();
}

#[tokio::test]
async fn the_end_of_a_client_leaves_what_is_reserved_and_nothing_else() {
    let file = File::new();
    let (lock, other) = (file.client().await, file.client().await);
    let (job, held) = (claim("job", LONG).with_at_least(HOUR), claim("held", LONG));
    granted(&lock, &job).await;
    granted(&lock, &held).await;
    lock.reserve(&job, HOUR).await.unwrap();
    lock.close().await.unwrap();
    granted(&other, &claim("held", LONG)).await;
    let shown = busy(&other, &claim("job", LONG)).await.holder.unwrap();
    assert!(shown.is_reserved && shown.owner == Some(job.owner()), "{shown:?}");
    // Its lease would have ended long before, had nothing been reserved.
    assert!(shown.remaining.unwrap() > HOUR - LONG);
}

#[tokio::test]
async fn a_file_of_a_version_without_reservations_is_brought_up_to_date() {
    let file = File::new();
    let lock = file.client().await;
    let held = claim("held", LONG);
    let grant = granted(&lock, &held).await;
    // As the earlier version has it.
    file.sql(
        "ALTER TABLE lock DROP COLUMN reserved; ALTER TABLE lock DROP COLUMN reserved_wall; PRAGMA user_version = 1",
    );
    let refused = SqliteConfig::new(file.path())
        .read_only(true)
        .connect()
        .await
        .unwrap_err();
    assert!(refused.to_string().contains("brings it up to date"), "{refused}");
    let other = file.client().await;
    assert_eq!(
        busy(&other, &claim("held", LONG)).await.holder.unwrap().owner,
        Some(held.owner())
    );
    let job = claim("job", LONG).with_at_least(HOUR);
    assert!(granted(&other, &job).await.token > grant.token);
    assert_eq!(other.reserve(&job, HOUR).await.unwrap(), Renewal::Renewed);
    assert_eq!(lock.renew(&grant.lease).await.unwrap(), Renewal::Renewed);
}
