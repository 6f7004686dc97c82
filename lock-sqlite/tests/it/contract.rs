//! What the backend does, asked through the trait as the core asks it.

use std::time::Duration;

use lock_core::{DistributedLock, LockError, Released, Renewal};

use crate::file::{File, busy, claim, granted, name, refusal};

const REBOOT: &str = "UPDATE lock SET boot = '00000000-0000-4000-8000-000000000000'";
const HOUR: Duration = Duration::from_secs(3600);
const HOUR_MICROS: i64 = 3_600_000_000;

#[tokio::test]
async fn another_boot_frees_every_lock_and_opening_the_file_deletes_none() {
    let file = File::new();
    let (a, b) = (file.client().await, file.client().await);
    let held = claim("n");
    let grant = granted(&a, &held).await;
    granted(&a, &claim("other")).await;
    file.sql(REBOOT);
    // A container that sees a boot of its own must not take what others hold by merely opening the file.
    file.client().await;
    assert_eq!(file.rows(), 2);
    assert!(b.holders(held.name()).await.unwrap().is_empty() && b.list("").await.unwrap().is_empty());
    assert_eq!(a.renew(&grant.lease).await.unwrap(), Renewal::NotHeld);
    assert!(granted(&b, &claim("n")).await.token > grant.token);
    // A grant sweeps.
    assert_eq!(file.rows(), 1);
}

#[tokio::test]
async fn expired_rows_are_swept_by_later_grants() {
    let file = File::new();
    let lock = file.client().await;
    for i in 0..40 {
        granted(&lock, &claim(&format!("left/{i}"))).await;
    }
    file.sql("UPDATE lock SET expires = 1");
    file.sql("INSERT INTO waiter VALUES ('left/1', 'x', 'x', 0, 0, 'x', 1, 1, 0)");
    for _ in 0..30 {
        let claim = claim("busy");
        granted(&lock, &claim).await;
        lock.release(&claim, None).await.unwrap();
    }
    assert_eq!(file.rows() + file.number("SELECT count(*) FROM waiter"), 0);
}

#[tokio::test]
async fn a_close_that_failed_can_be_called_again() {
    let file = File::new();
    let (a, b) = (file.client_within(Duration::from_millis(300)), file.client().await);
    let mine = claim("n");
    // A busy machine can miss so short a limit.
    while a.try_acquire(&mine).await.is_err() {}
    let stuck = file.connection();
    stuck.execute_batch("BEGIN IMMEDIATE").unwrap();
    let failed = a.close().await.unwrap_err();
    assert!(matches!(failed, LockError::Unavailable { .. }), "{failed}");
    stuck.execute_batch("ROLLBACK").unwrap();
    while a.close().await.is_err() {}
    a.close().await.unwrap();
    assert!(matches!(a.try_acquire(&mine).await, Err(LockError::Closed { .. })));
    granted(&b, &claim("n")).await;
}

#[tokio::test]
async fn a_damaged_entry_hides_no_other_and_can_be_forced_free() {
    let file = File::new();
    let lock = file.client().await;
    for n in ["a", "b", "c"] {
        granted(&lock, &claim(n)).await;
    }
    file.sql("UPDATE lock SET token = -1 WHERE name = 'b'");
    assert_eq!(lock.list("").await.unwrap().len(), 2);
    let why = refusal(lock.try_acquire(&claim("b")).await);
    assert!(why.contains("force the lock free"), "{why}");
    let forced = lock.force_release(&name("b")).await.unwrap().pop().unwrap();
    assert_eq!(forced.name, Some(name("b")));
    granted(&lock, &claim("b")).await;
}

#[tokio::test]
async fn a_reboot_leaves_what_is_left_of_a_reservation_by_the_wall_clock() {
    for released in [false, true] {
        let file = File::new();
        let before = file.client().await;
        let (job, held) = (claim("job").with_at_least(HOUR), claim("held"));
        let grant = granted(&before, &job).await;
        granted(&before, &held).await;
        assert_eq!(before.reserve(&job, HOUR).await.unwrap(), Renewal::Renewed);
        if released {
            assert_eq!(before.release(&job, Some(HOUR)).await.unwrap(), Released::Released);
        }
        // Ten minutes pass, and the boot clock begins anew.
        file.sql("UPDATE lock SET reserved_wall = reserved_wall - 600000000, acquired_at = acquired_at - 600000000");
        file.sql(&format!("{REBOOT}, expires = 1, reserved = min(reserved, 1)"));
        let seen_before = file.reader().holders(job.name()).await.unwrap();
        let after = file.client().await;
        granted(&after, &held).await;
        for shown in [seen_before, after.holders(job.name()).await.unwrap()] {
            let (shown, bounds) = (&shown[0], Duration::from_secs(2900)..=Duration::from_secs(3000));
            assert!(shown.is_reserved && shown.token == Some(grant.token), "{shown:?}");
            assert!(bounds.contains(&shown.remaining.unwrap()), "{shown:?}");
        }
        busy(&after, &claim("job")).await;
        assert_eq!(after.renew(&grant.lease).await.unwrap(), Renewal::NotHeld);
        assert_eq!(after.reserve(&job, HOUR).await.unwrap(), Renewal::NotHeld);
    }
}

#[tokio::test]
async fn a_wall_clock_that_is_set_changes_a_reservation_across_a_reboot_within_its_length() {
    for (between, after, is_left) in [
        (0, 0, true),
        (-24, 0, true),
        (24, 0, true),
        (0, -24, true),
        (0, 24, false),
    ] {
        let file = File::new();
        let lock = file.client().await;
        let job = claim("job").with_at_least(HOUR);
        granted(&lock, &job).await;
        // The clock is set by so many hours between the grant and the reservation, and again before the reboot.
        let [between, after] = [between, after].map(|hours: i64| hours * HOUR_MICROS);
        file.sql(&format!("UPDATE lock SET acquired_at = acquired_at - {between}"));
        lock.reserve(&job, HOUR).await.unwrap();
        file.sql(&format!(
            "{REBOOT}, reserved_wall = reserved_wall - {after}, acquired_at = acquired_at - {after}, reserved = 1, expires = 1"
        ));
        let next = file.client().await;
        if !is_left {
            granted(&next, &claim("job")).await;
            continue;
        }
        let left = busy(&next, &claim("job")).await.retry_after.unwrap();
        let minute = Duration::from_secs(60);
        let is_whole = (HOUR - minute..=HOUR + minute).contains(&left);
        assert!(is_whole, "{left:?} {between} {after}");
    }
}
