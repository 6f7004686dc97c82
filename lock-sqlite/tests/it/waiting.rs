//! Claims that wait, beside claims that come later and writers that are stuck.

use std::pin::pin;
use std::time::Duration;

use lock_core::{Attempt, DistributedLock, LockError, Mode, Renewal, Wait};

use crate::file::{File, HANG_LIMIT, busy, claim, claim_as, granted, in_time, until_waiting};

/// How many later claims are granted before one that waits, as the documentation says.
const PASSES: usize = 32;

fn waiters(file: &File) -> i64 {
    file.number("SELECT count(*) FROM waiter")
}

#[tokio::test]
async fn a_client_that_takes_the_lock_again_and_again_passes_a_waiter_a_limited_number_of_times() {
    for mode in [Mode::Exclusive, Mode::Permit { of: 1 }] {
        let file = File::new();
        let (greedy, other) = (file.client().await, file.client().await);
        let held = claim_as("n", mode);
        granted(&greedy, &held).await;
        let wanted = claim_as("n", mode);
        let mut waiting = pin!(other.acquire(&wanted, Wait::until(None)));
        until_waiting(&other, waiting.as_mut()).await;
        assert_eq!(waiters(&file), 1);
        // The waiter does not look meanwhile: it is as slow as can be. Its row is kept up for it.
        file.sql("UPDATE waiter SET expires = 9e18");
        greedy.release(&held, None).await.unwrap();
        let mut grants = 0;
        loop {
            let again = claim_as("n", mode);
            let Attempt::Granted(_) = greedy.try_acquire(&again).await.unwrap() else {
                break;
            };
            greedy.release(&again, None).await.unwrap();
            grants += 1;
            assert!(grants <= PASSES, "a claim that waits is passed without end");
        }
        assert_eq!(grants, PASSES);
        assert!(in_time(waiting).await.unwrap().granted().is_some());
        assert_eq!(waiters(&file), 0);
        other.release(&wanted, None).await.unwrap();
        granted(&greedy, &held).await;
    }
}

#[tokio::test]
async fn new_readers_wait_behind_a_writer_until_it_is_released_or_its_row_counts_no_more() {
    let file = File::new();
    let (reader, writer) = (file.client().await, file.client().await);
    granted(&reader, &claim_as("n", Mode::Shared)).await;
    let wanted = claim("n");
    {
        let mut waiting = pin!(writer.acquire(&wanted, Wait::until(None)));
        until_waiting(&writer, waiting.as_mut()).await;
        file.sql("UPDATE waiter SET expires = 9e18");
        busy(&reader, &claim_as("n", Mode::Shared)).await;
    }
    // The wait was dropped, and the core releases the claim then.
    writer.release(&wanted, None).await.unwrap();
    assert_eq!(waiters(&file), 0);
    granted(&reader, &claim_as("n", Mode::Shared)).await;
    // The row of a writer that is killed counts for a while only.
    file.sql(
        "INSERT INTO waiter SELECT name, 'killed', client, 0, 0, boot, expires, 1, 0 FROM lock WHERE name = 'n' LIMIT 1; \
         UPDATE waiter SET expires = 1",
    );
    granted(&reader, &claim_as("n", Mode::Shared)).await;
}

#[tokio::test]
async fn of_several_claims_that_wait_those_are_woken_whose_name_has_room_for_them() {
    let permit = Mode::Permit { of: 2 };
    for (held, wanted) in [
        ([Mode::Exclusive; 1].as_slice(), Mode::Exclusive),
        (&[Mode::Exclusive], Mode::Shared),
        (&[permit; 2], permit),
    ] {
        let file = File::new();
        let (holder, other) = (file.client().await, file.client().await);
        let held: Vec<_> = held.iter().map(|&mode| claim_as("n", mode)).collect();
        for claim in held.iter().chain([&claim("held on")]) {
            granted(&holder, claim).await;
        }
        let wanted = [claim_as("n", wanted), claim("held on")];
        let [mut freed, mut kept] = wanted
            .each_ref()
            .map(|claim| Box::pin(other.acquire(claim, Wait::until(None))));
        until_waiting(&other, freed.as_mut()).await;
        until_waiting(&other, kept.as_mut()).await;
        holder.release(&held[0], None).await.unwrap();
        let first = tokio::select! {
            freed = in_time(freed) => freed,
            kept = kept => panic!("{kept:?}"),
        };
        assert!(first.unwrap().granted().is_some());
    }
}

#[tokio::test]
async fn a_wait_whose_time_ends_while_another_process_is_stuck_ends_in_time_and_says_so() {
    let file = File::new();
    let lock = file.client().await;
    granted(&lock, &claim("n")).await;
    let wanted = claim("n");
    let end = lock.clock().now() + Duration::from_secs(2);
    let mut waiting = pin!(lock.acquire(&wanted, Wait::until(Some(end))));
    until_waiting(&lock, waiting.as_mut()).await;
    // The name becomes free while no process can write.
    file.sql("UPDATE lock SET expires = 1");
    let stuck = file.connection();
    stuck.execute_batch("BEGIN IMMEDIATE").unwrap();
    let failed = in_time(waiting).await.unwrap_err();
    assert!(format!("{failed:#}").contains("did not answer within"), "{failed}");
}

#[tokio::test]
async fn requests_beside_a_writer_that_is_stuck_fail_with_the_reason_and_work_again_after_it() {
    let file = File::new();
    let (lock, hasty) = (file.client().await, file.client_within(Duration::from_millis(300)));
    let slow = file.client_within(100 * HANG_LIMIT);
    let held = claim("held");
    let grant = granted(&lock, &held).await;
    let stuck = file.connection();
    stuck.execute_batch("BEGIN IMMEDIATE").unwrap();
    let renewed = hasty.renew(&grant.lease).await.map(drop);
    // A request that does not wait does not take as long as others may.
    let tried = in_time(slow.try_acquire(&claim("other"))).await.map(drop);
    for failed in [renewed.unwrap_err(), tried.unwrap_err()] {
        let told = format!("{failed:#}");
        let is_unavailable = matches!(failed, LockError::Unavailable { .. });
        assert!(
            is_unavailable && told.contains("stopped inside a transaction"),
            "{told}"
        );
    }
    // Reading goes on.
    assert!(!lock.holders(held.name()).await.unwrap().is_empty());
    stuck.execute_batch("COMMIT").unwrap();
    granted(&slow, &claim("free")).await;
    assert_eq!(lock.renew(&grant.lease).await.unwrap(), Renewal::Renewed);
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn the_pipe_is_hidden_and_follows_the_rights_of_the_database() {
    use std::os::unix::fs::PermissionsExt;

    for (mode, wanted) in [(0o600, 0o600), (0o660, 0o660), (0o640, 0o600)] {
        let file = File::new();
        let lock = file.client().await;
        std::fs::set_permissions(file.path(), PermissionsExt::from_mode(mode)).unwrap();
        granted(&lock, &claim("n")).await;
        let next = claim("n");
        let mut waiting = pin!(lock.acquire(&next, Wait::until(None)));
        until_waiting(&lock, waiting.as_mut()).await;
        let pipe = std::fs::metadata(file.beside(".locks.db-wake")).unwrap();
        assert_eq!(pipe.permissions().mode() & 0o777, wanted, "{mode:o}");
        // What a shell's * leads to are regular files only: none of them blocks a program that reads it.
        let mut shown = file.names().into_iter().filter(|name| !name.starts_with('.'));
        assert!(shown.all(|name| file.beside(&name).is_file()), "{:?}", file.names());
    }
}
