//! What the backend does, asked through the trait as the core asks it.

use std::pin::pin;
use std::time::Duration;

use lock_core::{DistributedLock, LockError, Mode, Released, Renewal, Wait};
use lock_sqlite::SqliteConfig;

use crate::file::{File, LONG, SHORT, busy, claim, claim_as, granted, name, until_waiting};

const REBOOT: &str = "UPDATE lock SET boot = '00000000-0000-4000-8000-000000000000'";
const HOUR: Duration = Duration::from_secs(3600);

#[tokio::test]
async fn the_holder_is_shown_with_all_that_is_known() {
    let file = File::new();
    let (a, b) = (file.client().await, file.client().await);
    let held = claim_as("n", Mode::Shared).with_label("nightly 'import'");
    assert!(b.holders(held.name()).await.unwrap().pop().is_none());
    let grant = granted(&a, &held).await;
    let found = busy(&b, &claim("n", LONG)).await;
    assert!(found.retry_after.unwrap() > LONG * 3 / 4);
    for holder in [b.holders(held.name()).await.unwrap().pop(), found.holder] {
        let holder = holder.unwrap();
        assert_eq!(
            (holder.name.as_ref(), holder.owner),
            (Some(held.name()), Some(held.owner()))
        );
        assert_eq!((holder.token, holder.mode), (Some(grant.token), Mode::Shared));
        assert_eq!(holder.label.as_deref(), Some("nightly 'import'"));
        assert_eq!(holder.pid, Some(std::process::id()));
        assert!(holder.host.is_some() && holder.acquired_at.unwrap().elapsed().unwrap() < LONG);
        assert!(holder.remaining.unwrap() <= LONG);
    }
}

#[tokio::test]
async fn another_boot_frees_every_lock_and_opening_the_file_deletes_none() {
    let file = File::new();
    let (a, b) = (file.client().await, file.client().await);
    let held = claim("n", LONG);
    let grant = granted(&a, &held).await;
    granted(&a, &claim("other", LONG)).await;
    file.sql(REBOOT);
    // A container that sees a boot of its own must not take what others hold by merely opening the file.
    file.client().await;
    assert_eq!(file.rows(), 2);
    assert!(b.holders(held.name()).await.unwrap().pop().is_none());
    assert!(b.list("").await.unwrap().is_empty());
    assert_eq!(a.renew(&grant.lease).await.unwrap(), Renewal::NotHeld);
    let next = claim("n", LONG);
    assert!(granted(&b, &next).await.token > grant.token);
    // A grant sweeps.
    assert_eq!(file.rows(), 1);
    file.sql(REBOOT);
    assert_eq!(b.release(&next, None).await.unwrap(), Released::NotHeld);
    assert_eq!(file.rows(), 0);
}

#[tokio::test]
async fn expired_rows_are_swept_by_later_grants_and_waits() {
    let file = File::new();
    let lock = file.client().await;
    for i in 0..40 {
        granted(&lock, &claim(&format!("left/{i}"), LONG)).await;
    }
    file.sql("UPDATE lock SET expires = 1");
    file.sql("INSERT INTO waiter VALUES ('left/1', 'x', 'x', 0, 0, 'x', 1, 1, 0)");
    assert!(lock.list("").await.unwrap().is_empty());
    for _ in 0..30 {
        let claim = claim("busy", LONG);
        granted(&lock, &claim).await;
        lock.release(&claim, None).await.unwrap();
    }
    assert_eq!(file.rows(), 0);
    granted(&lock, &claim("busy", LONG)).await;
    let wanted = claim("busy", LONG);
    let mut waiting = pin!(lock.acquire(&wanted, Wait::until(None)));
    until_waiting(&lock, waiting.as_mut()).await;
    assert_eq!(file.number("SELECT count(*) FROM waiter"), 1);
}

#[tokio::test]
async fn closing_frees_what_the_client_holds_and_ends_it_for_good() {
    let file = File::new();
    let (a, b) = (file.client().await, file.client().await);
    let (mine, job, other) = (
        claim("n", LONG),
        claim("job", LONG).with_at_least(HOUR),
        claim("other", LONG),
    );
    granted(&a, &mine).await;
    granted(&a, &job).await;
    a.reserve(&job, HOUR).await.unwrap();
    granted(&b, &other).await;
    let wanted = claim("other", LONG);
    let mut waiting = pin!(a.acquire(&wanted, Wait::until(None)));
    until_waiting(&a, waiting.as_mut()).await;
    a.close().await.unwrap();
    a.close().await.unwrap();
    assert!(matches!(waiting.await, Err(LockError::Closed { .. })));
    assert!(matches!(a.try_acquire(&mine).await, Err(LockError::Closed { .. })));
    assert!(matches!(a.release(&mine, None).await, Err(LockError::Closed { .. })));
    granted(&b, &claim("n", LONG)).await;
    assert!(b.holders(other.name()).await.unwrap().pop().is_some());
    let shown = busy(&b, &claim("job", LONG)).await.holder.unwrap();
    assert!(shown.is_reserved && shown.remaining.unwrap() > HOUR - LONG, "{shown:?}");
    assert_eq!(file.number("SELECT count(*) FROM waiter"), 0);
}

#[tokio::test]
async fn a_client_that_connects_lazily_opens_at_the_first_request() {
    let file = File::new();
    let lock = SqliteConfig::new(file.beside("no/locks.db")).connect_lazy().unwrap();
    let refused = lock.try_acquire(&claim("n", LONG)).await.unwrap_err();
    assert!(matches!(refused, LockError::Configuration { .. }), "{refused}");
    std::fs::create_dir(file.beside("no")).unwrap();
    granted(&lock, &claim("n", LONG)).await;
}

#[tokio::test]
async fn a_damaged_entry_hides_no_other_and_can_be_forced_free() {
    let file = File::new();
    let lock = file.client().await;
    for n in ["a", "b", "c"] {
        granted(&lock, &claim(n, LONG)).await;
    }
    file.sql("UPDATE lock SET token = -1 WHERE name = 'b'");
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
        granted(&after, &held).await;
        for taken_over in [false, true] {
            let shown = after.holders(job.name()).await.unwrap().pop().unwrap();
            let left = shown.remaining.unwrap();
            assert!(shown.is_reserved && shown.token == Some(grant.token), "{shown:?}");
            let bounds = Duration::from_secs(2900)..=Duration::from_secs(3000);
            assert!(bounds.contains(&left), "{left:?}, {taken_over}");
            busy(&after, &claim("job", SHORT)).await;
        }
        assert_eq!(after.renew(&grant.lease).await.unwrap(), Renewal::NotHeld);
        assert_eq!(after.reserve(&job, HOUR).await.unwrap(), Renewal::NotHeld);
    }
}

#[tokio::test]
async fn a_wall_clock_that_was_set_back_across_a_reboot_lengthens_no_reservation_beyond_its_whole() {
    let file = File::new();
    let lock = file.client().await;
    let job = claim("job", LONG).with_at_least(HOUR);
    granted(&lock, &job).await;
    lock.reserve(&job, HOUR).await.unwrap();
    // As if both had been written by a clock that was ahead by a year.
    let year = 365_i64 * 24 * 3600 * 1_000_000;
    file.sql(&format!(
        "UPDATE lock SET reserved_wall = reserved_wall + {year}, acquired_at = acquired_at + {year}"
    ));
    file.sql(REBOOT);
    for _ in 0..2 {
        let left = busy(&lock, &claim("job", LONG)).await.retry_after.unwrap();
        assert!(left <= HOUR + Duration::from_secs(60), "{left:?}");
    }
    // It goes by the boot clock by now, which ends.
    assert_eq!(file.number("SELECT count(*) FROM lock WHERE boot LIKE '0000%'"), 0);
    // One that was set forward ends it.
    file.sql(&format!("{REBOOT}, reserved_wall = reserved_wall - 2 * {year}"));
    granted(&lock, &claim("job", LONG)).await;
}
