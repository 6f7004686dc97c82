//! The server's clock is set while it runs.

use std::time::{Duration, Instant};

use lock_core::{Attempt, DistributedLock, Locks};

use crate::server::{Server, claim, granted, in_time, until};

const TTL: Duration = Duration::from_secs(4);

/// Waits until sessions see the new time.
pub(super) async fn step(server: &Server, seconds: i64) {
    server.step_clock(seconds);
    until("the clock is set", async || {
        (server.seconds_behind().await + seconds as f64).abs() < 1.0
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_renews_keeps_the_lock_or_is_told_and_tokens_rise() {
    let server = Server::with_a_clock_that_steps();
    let (locks, other) = (Locks::new(server.client().await), server.client().await);
    let mut last = locks.lock("a").ttl(TTL).await.unwrap();
    for seconds in [3600, 0, -3600, -3600 * 24, 0, 3600 * 24] {
        step(&server, seconds).await;
        let start = Instant::now();
        let mut taken = None;
        // Longer than any lease lasts that is not renewed.
        while start.elapsed() < TTL * 3 / 2 && taken.is_none() {
            taken = match other.try_acquire(&claim("a", TTL).with_own_lease()).await {
                Ok(Attempt::Granted(grant)) => Some(grant),
                _ => None,
            };
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        println!("{seconds:+} s: {}", if taken.is_some() { "ended" } else { "kept" });
        if let Some(grant) = taken {
            assert!(grant.token > last.token());
            in_time(last.lost().wait()).await;
            other.release(&grant.claim, None).await.unwrap();
        } else {
            assert!(last.is_held());
        }
        let before = last.token();
        let _ = last.release().await;
        last = locks.lock("a").ttl(TTL).await.unwrap();
        assert!(last.token() > before, "{} came after {before}", last.token());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_holder_is_freed_across_a_step_of_the_clock() {
    const STEP: i64 = 3;
    let server = Server::with_a_clock_that_steps();
    let lock = server.client().await;
    for seconds in [-STEP, 0] {
        let grant = granted(&lock, &claim("a", TTL).with_own_lease()).await;
        server.step_clock(seconds);
        let kept = server.until_locks(0).await;
        println!(
            "{seconds:+} s: kept for {kept:?}, believed in for {:?}",
            grant.lease.ttl()
        );
    }
}
