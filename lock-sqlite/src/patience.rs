//! How long SQLite waits for another process's transaction.

use std::cell::Cell;
use std::thread;
use std::time::{Duration, Instant};

thread_local! {
    // SQLite's callback carries nothing; each connection is worked by one thread, so the thread carries it.
    static UNTIL: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// Sets until when statements of this thread wait for a lock of another process.
pub(crate) fn until(end: Instant) {
    UNTIL.set(Some(end));
}

/// Waits a little; false when the patience is at an end.
///
/// SQLite's own timeout sleeps up to 100 ms at a time, a thousand times as long as one of our transactions takes.
pub(crate) fn wait_for_the_other(tries: i32) -> bool {
    const SHORTEST: Duration = Duration::from_micros(20);
    const LONGEST: Duration = Duration::from_millis(5);
    let left = UNTIL
        .get()
        .map_or(Duration::ZERO, |end| end.saturating_duration_since(Instant::now()));
    if left.is_zero() {
        return false;
    }
    let doubled = SHORTEST * (1 << tries.clamp(0, 16));
    thread::sleep(doubled.min(LONGEST).mul_f64(0.5 + fastrand::f64()).min(left));
    true
}
