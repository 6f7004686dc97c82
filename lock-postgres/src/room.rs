//! Whether the server is short of connections.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lock_core::Stamp;

/// How many of a hundred connections are left to others, at least, before one more client keeps one to wait with.
const RESERVE: i64 = 20;

/// With fewer than that left, clients that merely wait give theirs back. The others are for those who connect to look.
const LEAST: i64 = 10;

/// How long a finding holds.
const KNOWN: Duration = Duration::from_secs(2);

/// What was found last, and when. All of it is a guess: others connect and leave all the time.
#[derive(Debug, Default)]
pub(crate) struct Room(Mutex<Option<(Stamp, i64)>>);

impl Room {
    /// The server has so many of a hundred connections left.
    pub(crate) fn saw(&self, left: i64, now: Stamp) {
        *self.lock() = Some((now, left));
    }

    /// Whether it had none to keep, lately.
    pub(crate) fn is_short(&self, now: Stamp) -> bool {
        self.left(now).is_some_and(|left| left < RESERVE)
    }

    /// Whether those that are kept should be given back.
    pub(crate) fn is_very_short(&self, now: Stamp) -> bool {
        self.left(now).is_some_and(|left| left < LEAST)
    }

    /// Whether that need not be asked for again.
    pub(crate) fn is_known(&self, now: Stamp) -> bool {
        self.left(now).is_some()
    }

    fn left(&self, now: Stamp) -> Option<i64> {
        // Nothing here panics while holding the mutex.
        let found = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        found.filter(|(then, _)| now.since(*then) < KNOWN).map(|(_, left)| left)
    }

    fn lock(&self) -> MutexGuard<'_, Option<(Stamp, i64)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
