//! How long SQLite waits for another process's transaction.

use std::cell::{Cell, RefCell};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

thread_local! {
    // SQLite's callback carries nothing; each connection is worked by one thread, so the thread carries it.
    static UNTIL: Cell<Option<Instant>> = const { Cell::new(None) };
    static STANDSTILL: RefCell<Option<Standstill>> = const { RefCell::new(None) };
}

/// Sets until when statements of this thread wait for a lock of another process.
pub(crate) fn until(end: Instant) {
    UNTIL.set(Some(end));
    STANDSTILL.set(None);
}

/// Ends these waits earlier, until the next call of [`until`]: as soon as no process has written to the file at `path` for `limit`.
///
/// While many processes take turns at the file, each of them gets through soon. A transaction that stays open keeps everybody from it.
pub(crate) fn but_for_no_standstill(path: &Path, limit: Duration) {
    STANDSTILL.set(Some(Standstill::new(path, limit)));
}

/// Runs `work`, whose statements wait for no lock of another process.
pub(crate) fn without_waiting<T>(work: impl FnOnce() -> T) -> T {
    let end = UNTIL.take();
    let done = work();
    UNTIL.set(end);
    done
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
    if left.is_zero() || STANDSTILL.with_borrow_mut(|still| still.as_mut().is_some_and(Standstill::is_over)) {
        return false;
    }
    let doubled = SHORTEST * (1 << tries.clamp(0, 16));
    thread::sleep(doubled.min(LONGEST).mul_f64(0.5 + fastrand::f64()).min(left));
    true
}

/// A watch for files that nobody writes to.
struct Standstill {
    /// The database and its log. They are only looked at: closing one would drop SQLite's locks.
    files: [PathBuf; 2],
    limit: Duration,
    seen: [Option<SystemTime>; 2],
    since: Instant,
    is_last_try: bool,
}

impl Standstill {
    fn new(path: &Path, limit: Duration) -> Self {
        // SQLite keeps the log beside the file that a symbolic link leads to.
        let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let mut log = path.clone().into_os_string();
        log.push("-wal");
        let files = [path, log.into()];
        Self {
            seen: written(&files),
            files,
            limit,
            since: Instant::now(),
            is_last_try: false,
        }
    }

    /// Whether nobody has written for too long. After a stall of the machine there is one try more.
    fn is_over(&mut self) -> bool {
        let now = written(&self.files);
        if now != self.seen {
            self.seen = now;
            self.since = Instant::now();
            self.is_last_try = false;
        } else if self.since.elapsed() >= self.limit {
            return std::mem::replace(&mut self.is_last_try, true);
        }
        false
    }
}

/// When the files were written to last.
fn written(files: &[PathBuf; 2]) -> [Option<SystemTime>; 2] {
    [0, 1].map(|file| std::fs::metadata(&files[file]).and_then(|data| data.modified()).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_standstill_ends_with_whatever_is_written_and_is_over_after_one_try_more() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("locks.db");
        let mut still = Standstill::new(&path, Duration::ZERO);
        assert!(!still.is_over());
        std::fs::write(dir.path().join("locks.db-wal"), "a commit").unwrap();
        assert!(!still.is_over(), "it was written to");
        assert!(!still.is_over(), "the last try");
        assert!(still.is_over());
        std::fs::write(&path, "a checkpoint").unwrap();
        assert!(!still.is_over());
        let mut still = Standstill::new(&path, Duration::from_secs(3_600));
        assert!(!still.is_over() && !still.is_over());
    }
}
