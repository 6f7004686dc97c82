//! All integration tests of `lock-core`, as one program.
//!
//! Time-outs, leases and pauses run on tokio's paused time ([`paused`]) or on a `ManualClock`. Only tests of several threads and of the end
//! of a process run on real time.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test that cannot go on has failed"
)]

use std::time::{Duration, Instant};

/// Asserts that the result is an error that matches, and returns it.
macro_rules! fails {
    ($result:expr, $($kind:tt)+) => {{
        let error = $result.map(drop).unwrap_err();
        assert!(matches!(&error, $($kind)+), "{error:?}");
        error
    }};
}

mod engine;
mod events;
mod exit;
mod extended;
mod lease;
mod modes;
mod observe;
mod paused;
mod reservations;
mod together;
mod usage;

/// Longest real time for what must happen. A test that waits longer fails.
const HANG_LIMIT: Duration = Duration::from_secs(60);

/// Waits until `condition` holds. Paused time passes meanwhile.
async fn until(condition: impl Fn() -> bool) {
    let started = Instant::now();
    let mut looks = 0;
    while !condition() {
        assert!(started.elapsed() < HANG_LIMIT, "the condition does not come true");
        looks += 1;
        // Most conditions hold as soon as other tasks have run.
        if looks < 100 {
            tokio::task::yield_now().await;
        } else {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}
