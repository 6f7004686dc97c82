//! All integration tests of `fencelock`, as one program. Each module is compiled if its features are on.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test that cannot go on has failed"
)]

#[cfg(feature = "memory")]
mod blocking;
#[cfg(all(feature = "memory", feature = "sqlite"))]
mod connect;
#[cfg(all(feature = "memory", feature = "macros"))]
mod macros;
#[cfg(all(feature = "memory", feature = "tower"))]
mod tower;

/// Longest time for what must happen. A test that waits longer fails.
#[cfg(feature = "memory")]
const HANG_LIMIT: std::time::Duration = std::time::Duration::from_secs(60);

/// Waits until `condition` holds.
#[cfg(feature = "memory")]
async fn until(condition: impl Fn() -> bool) {
    let started = std::time::Instant::now();
    while !condition() {
        assert!(started.elapsed() < HANG_LIMIT, "the condition does not come true");
        tokio::task::yield_now().await;
    }
}
