//! Claims that wait, beside claims that come later.

use std::pin::pin;
use std::task::{Context, Waker};

use lock_core::{Attempt, DistributedLock, Mode, Wait};
use lock_sqlite::SqliteLock;

use crate::file::{File, HANG_LIMIT, LONG, busy, claim, claim_as, granted, in_time, until_waiting};

/// How many later claims are granted before one that waits, as the documentation says.
const PASSES: usize = 32;

async fn waiters(file: &File) -> i64 {
    file.number("SELECT count(*) FROM waiter")
}

/// Takes and releases the name until that is refused, and tells how often it was granted.
async fn take_until_refused(lock: &SqliteLock, mode: Mode) -> usize {
    for grants in 0..2 * PASSES {
        let again = claim_as("n", mode);
        match lock.try_acquire(&again).await.unwrap() {
            Attempt::Granted(_) => lock.release(&again, None).await.map(drop).unwrap(),
            _ => return grants,
        }
    }
    panic!("a claim that waits is passed without end");
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
        assert_eq!(waiters(&file).await, 1);
        // The waiter does not look meanwhile: it is as slow as can be. Its row is kept up for it.
        file.sql("UPDATE waiter SET expires = 9e18");
        greedy.release(&held, None).await.unwrap();
        assert_eq!(take_until_refused(&greedy, mode).await, PASSES);
        assert!(in_time(waiting).await.unwrap().granted().is_some());
        assert_eq!(waiters(&file).await, 0);
        other.release(&wanted, None).await.unwrap();
        granted(&greedy, &held).await;
    }
}

#[tokio::test]
async fn new_readers_wait_behind_a_writer_and_go_on_when_it_has_gone() {
    let file = File::new();
    let (reader, writer) = (file.client().await, file.client().await);
    granted(&reader, &claim_as("n", Mode::Shared)).await;
    granted(&writer, &claim_as("n", Mode::Shared)).await;
    let wanted = claim("n", LONG);
    {
        let mut waiting = pin!(writer.acquire(&wanted, Wait::until(None)));
        until_waiting(&writer, waiting.as_mut()).await;
        file.sql("UPDATE waiter SET expires = 9e18");
        busy(&reader, &claim_as("n", Mode::Shared)).await;
    }
    // The wait was dropped, so that the row is gone once the client's next request is answered.
    writer.try_acquire(&claim("another", LONG)).await.unwrap();
    assert_eq!(waiters(&file).await, 0);
    granted(&reader, &claim_as("n", Mode::Shared)).await;
    // The row of a writer that is killed counts for a while only.
    file.sql(
        "INSERT INTO waiter SELECT name, 'killed', client, 0, 0, boot, expires, 1, 0 FROM lock WHERE name = 'n' LIMIT 1; \
         UPDATE waiter SET expires = 1",
    );
    granted(&reader, &claim_as("n", Mode::Shared)).await;
}

#[tokio::test]
async fn a_wait_that_was_dropped_takes_nothing_when_the_name_becomes_free() {
    let file = File::new();
    let (a, b) = (file.client().await, file.client().await);
    let (held, wanted) = (claim("n", LONG), claim("n", LONG));
    granted(&a, &held).await;
    {
        let mut waiting = pin!(b.acquire(&wanted, Wait::until(None)));
        until_waiting(&b, waiting.as_mut()).await;
        let mut renewal = b.try_acquire(&wanted);
        assert!(
            renewal
                .as_mut()
                .poll(&mut Context::from_waker(Waker::noop()))
                .is_pending()
        );
    }
    b.force_release(held.name()).await.unwrap();
    b.holders(held.name()).await.unwrap().pop();
    assert_eq!(file.rows(), 0);
}

#[tokio::test]
async fn a_wait_whose_time_ends_while_another_process_is_stuck_ends_in_time_and_says_so() {
    let file = File::new();
    let lock = file.client().await;
    let held = claim("n", LONG);
    granted(&lock, &held).await;
    let wanted = claim("n", LONG);
    let end = lock.clock().now() + std::time::Duration::from_secs(2);
    let mut waiting = pin!(lock.acquire(&wanted, Wait::until(Some(end))));
    until_waiting(&lock, waiting.as_mut()).await;
    // The name becomes free while no process can write.
    file.sql("UPDATE lock SET expires = 1");
    let stuck = file.connection();
    stuck.execute_batch("BEGIN IMMEDIATE").unwrap();
    let failed = in_time(waiting).await.unwrap_err();
    assert!(format!("{failed:#}").contains("did not answer within"), "{failed}");
    stuck.execute_batch("COMMIT").unwrap();
}

#[tokio::test]
async fn many_names_wait_at_once_while_requests_of_the_same_client_go_on() {
    const NAMES: usize = 300;
    let file = File::new();
    let (a, b) = (file.client().await, file.client().await);
    let held: Vec<_> = (0..NAMES).map(|n| claim(&format!("n{n}"), LONG)).collect();
    let mut waiting = Vec::new();
    for held in &held {
        granted(&a, held).await;
        let (b, wanted) = (b.clone(), claim(held.name().as_str(), LONG));
        waiting.push(tokio::spawn(async move { b.acquire(&wanted, Wait::until(None)).await }));
    }
    let other = claim("other", LONG);
    let grant = granted(&b, &other).await;
    for _ in 0..50 {
        b.renew(&grant.lease).await.unwrap();
    }
    for held in &held {
        a.release(held, None).await.unwrap();
    }
    for waiter in waiting {
        let attempt = tokio::time::timeout(HANG_LIMIT, waiter).await.unwrap().unwrap();
        assert!(attempt.unwrap().granted().is_some());
    }
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn the_pipe_is_hidden_and_follows_the_rights_of_the_database() {
    use std::os::unix::fs::PermissionsExt;

    let file = File::new();
    let (a, b) = (file.client().await, file.client().await);
    for (mode, wanted) in [(0o600, 0o600), (0o660, 0o660), (0o640, 0o600)] {
        std::fs::set_permissions(file.path(), PermissionsExt::from_mode(mode)).unwrap();
        let (held, next) = (claim("n", LONG), claim("n", LONG));
        granted(&a, &held).await;
        let mut waiting = pin!(b.acquire(&next, Wait::until(None)));
        until_waiting(&b, waiting.as_mut()).await;
        a.release(&held, None).await.unwrap();
        assert!(in_time(waiting).await.unwrap().granted().is_some());
        b.release(&next, None).await.unwrap();
        let found = std::fs::metadata(file.beside(".locks.db-wake"))
            .unwrap()
            .permissions()
            .mode();
        assert_eq!(found & 0o777, wanted, "{mode:o}");
    }
    // What a shell's * leads to are regular files only: none of them blocks a program that reads it.
    let shown = file.names().into_iter().filter(|name| !name.starts_with('.'));
    assert!(
        shown.into_iter().all(|name| file.beside(&name).is_file()),
        "{:?}",
        file.names()
    );
}
