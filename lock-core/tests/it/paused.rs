//! Clients whose timers and clock are tokio's paused time, for tests with `start_paused = true`.

use std::time::Duration;

use lock_core::{Clock, DistributedLock, Locks, ManualClock, MemoryLock, Options};
use tokio::runtime::Handle;
use tokio::time::Instant;

/// Returns a clock that follows the time of the runtime to the millisecond, and the handle that advances it beyond that.
pub(crate) fn clock() -> (Clock, ManualClock) {
    let (clock, hand) = Clock::manual();
    let follows = hand.clone();
    tokio::spawn(async move {
        let mut last = Instant::now();
        loop {
            tokio::time::sleep(Duration::from_millis(1)).await;
            let now = Instant::now();
            follows.advance(now - last);
            last = now;
        }
    });
    (clock, hand)
}

/// Returns a backend in memory whose leases are measured by [`clock`].
pub(crate) fn memory() -> MemoryLock {
    MemoryLock::with_clock(clock().0)
}

/// Options of a client whose tasks run on the runtime of the test instead of the background thread.
pub(crate) fn options() -> Options {
    Options::new().runtime(Handle::current())
}

/// Returns a client whose tasks run on the runtime of the test.
pub(crate) fn client(backend: impl DistributedLock) -> Locks {
    Locks::with_options(backend, options())
}
