//! Tokens rise, whatever happens to clients, to the file and to the clock.

use std::num::NonZeroU32;
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use lock_core::{DistributedLock, FencingToken};
use lock_sqlite::SqliteLock;

use crate::file::{File, claim, granted, refusal};

/// Draws that many tokens and returns the last.
pub(crate) async fn draw(lock: &SqliteLock, tokens: usize) -> u64 {
    let mut last = 0;
    for _ in 0..tokens {
        let claim = claim("n");
        let token = granted(lock, &claim).await.token.get();
        assert!(token > last, "{token} after {last}");
        last = token;
        lock.release(&claim, None).await.unwrap();
    }
    last
}

/// Sets the counter so far ahead that the wall clock plays no part.
pub(crate) fn far_ahead(file: &File) {
    let ahead = micros(SystemTime::now() + Duration::from_secs(365 * 24 * 3600));
    file.sql(&format!("UPDATE counter SET token = {ahead}, ceiling = {ahead}"));
}

fn micros(time: SystemTime) -> u64 {
    u64::try_from(time.duration_since(UNIX_EPOCH).unwrap().as_micros()).unwrap()
}

#[tokio::test]
async fn every_client_starts_above_all_tokens_before_it_also_when_clock_and_file_are_of_no_help() {
    let before = micros(SystemTime::now());
    let file = File::new();
    let first = file.client().await;
    let token = draw(&first, 1).await;
    assert!(token > before && token < before + 60_000_000, "{token} at {before}");
    far_ahead(&file);
    let mut last = draw(&first, 3).await;
    for _ in 0..5 {
        let token = draw(&file.client().await, 2).await;
        // Far less than the microseconds that pass, or the clock would never catch up.
        assert!(token > last && token < last + 10_000, "{token} after {last}");
        last = token;
    }
    last = draw(&first, 1).await;
    for suffix in ["", "-wal", "-shm"] {
        std::fs::remove_file(file.beside(&format!("locks.db{suffix}"))).unwrap();
    }
    first.try_acquire(&claim("n")).await.unwrap_err();
    assert!(draw(&first, 1).await > last);
}

#[tokio::test]
async fn a_counter_that_went_back_under_an_open_file_is_noticed() {
    let file = File::new();
    // Also where the ceiling must be raised before the next token.
    for (drawn, set) in [
        (100, "token"),
        (0, "token"),
        (100, "token = token - 50, ceiling"),
        (0, "ceiling = token - 50, token"),
    ] {
        let lock = file.client().await;
        let last = draw(&lock, drawn).await;
        file.sql(&format!("UPDATE counter SET {set} = token - 50"));
        let failed = lock.try_acquire(&claim("n")).await.unwrap_err();
        assert!(format!("{failed:#}").contains("older state"), "{failed}");
        assert_eq!(file.rows(), 0);
        assert!(draw(&lock, 1).await > last);
    }
}

#[tokio::test]
async fn the_end_of_the_counter_is_an_error_that_says_so() {
    let file = File::new();
    let lock = file.client().await;
    let end = FencingToken::MAX.get();
    file.sql(&format!("UPDATE counter SET token = {0}, ceiling = {0}", end - 3));
    // A ceiling at the end leaves the last tokens below it.
    assert_eq!(draw(&lock, 3).await, end);
    let why = refusal(lock.try_acquire(&claim("n")).await);
    assert!(why.contains("2^53") && file.rows() == 0, "{why}");
}

#[tokio::test]
async fn a_block_goes_up_to_the_clock_and_the_ceiling() {
    let file = File::new();
    let lock = file.client().await;
    let ahead = "UPDATE counter SET token = token + 3600000000, ceiling = token + 3600001024";
    let mut last = 0;
    for (before, wanted, tokens) in [
        ("SELECT 1", 8, 8),
        ("SELECT 1", 1, 1),
        ("SELECT 1", u32::MAX, 16),
        ("UPDATE counter SET ceiling = token + 5", 8, 5),
        (ahead, 8, 1),
        ("SELECT 1", 8, 1),
    ] {
        thread::sleep(Duration::from_millis(1));
        file.sql(before);
        let claim = claim("n").with_tokens_wanted(NonZeroU32::new(wanted).unwrap());
        let grant = granted(&lock, &claim).await;
        let (first, next) = (grant.first_token().get(), grant.token.get());
        let is_right = first > last && next - first + 1 == tokens;
        assert!(is_right, "{first}..={next}: {before}, {wanted}");
        let again = granted(&lock, &claim).await;
        assert_eq!((again.first_token(), again.token), (grant.token, grant.token));
        lock.release(&claim, None).await.unwrap();
        last = next;
    }
}
