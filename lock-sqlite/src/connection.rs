//! A connection to the database: how it is opened, how long it waits for other processes, and when the write-ahead log is brought in.

use std::cell::Cell;
use std::ops::{Deref, DerefMut};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::thread;
use std::time::{Duration, Instant};

use lock_core::LockError;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_encode};
use rusqlite::{OpenFlags, Transaction, TransactionBehavior};

use crate::error::Failure;

/// A connection of this process. SQLite is refused to a forked child for as long as it would count one of its parent.
#[derive(Debug)]
pub(crate) struct Connection {
    conn: rusqlite::Connection,
    path: PathBuf,
    /// A longer log is brought into the database.
    due: u64,
    /// Dropped after the connection is closed.
    _in_use: InUse,
}

/// Length of the log that makes a checkpoint due, in bytes: about 1 000 pages, as SQLite itself has it. SQLite cuts a longer log to this length
/// when it begins anew, so the length of the file tells each client how full the log is, whichever client wrote it.
const LOG: u64 = 4 << 20;

impl Connection {
    /// Opens the file at `path`, which must exist.
    pub(crate) fn open(path: &Path, in_use: InUse) -> Result<Self, Failure> {
        let conn = open(path, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
        conn.set_prepared_statement_cache_capacity(64);
        let set = |sql: &str| conn.query_row(sql, [], |_| Ok(()));
        // Checkpoints are made by `checkpoint`.
        set("PRAGMA wal_autocheckpoint = 0")?;
        set(&format!("PRAGMA journal_size_limit = {LOG}"))?;
        Ok(Self {
            conn,
            path: path.to_owned(),
            due: LOG,
            _in_use: in_use,
        })
    }

    /// Opens the file to read it, and makes no other beside it. One that is `immutable` must have no log; else there must be a log and its index.
    pub(crate) fn open_to_read(path: &Path, immutable: bool, in_use: InUse) -> Result<Self, Failure> {
        const PLAIN: &AsciiSet = &NON_ALPHANUMERIC.remove(b'/').remove(b'.').remove(b'-').remove(b'_');
        let encoded = percent_encode(path.as_os_str().as_bytes(), PLAIN);
        let how = if immutable { "immutable=1" } else { "readonly_shm=1" };
        let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_URI;
        Ok(Self {
            conn: open(Path::new(&format!("file://{encoded}?mode=ro&{how}")), flags)?,
            path: path.to_owned(),
            due: LOG,
            _in_use: in_use,
        })
    }

    /// Whether commits wait for the disk.
    pub(crate) fn set_durable(&self, durable: bool) -> Result<(), Failure> {
        Ok(self.pragma_update(None, "synchronous", if durable { "FULL" } else { "NORMAL" })?)
    }

    /// Brings the log into the database while no other connection can write, and tells whether that was everything: the log then begins anew.
    ///
    /// SQLite before 3.51.3 has a fault: if another connection begins the log anew while a checkpoint runs, frames of the new log count as
    /// brought in that are not. To begin it anew takes the write lock, so this client holds that. SQLite refuses a checkpoint on a connection
    /// that has a transaction, so it takes a second one.
    pub(crate) fn checkpoint(&self) -> Result<bool, Failure> {
        let lock = Transaction::new_unchecked(&self.conn, TransactionBehavior::Immediate)?;
        let second = open(&self.path, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
        // SQLite opens the log with the first read.
        second.query_row("PRAGMA page_count", [], |_| Ok(()))?;
        let (busy, length, done) = second.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |row| {
            Ok((row.get::<_, bool>(0)?, row.get::<_, i64>(1)?, row.get::<_, i64>(2)?))
        })?;
        lock.rollback()?;
        Ok(!busy && done == length)
    }

    /// Brings in a log of that length if it is too long. If another connection writes, this is left to the next call or to that client.
    pub(crate) fn checkpoint_if_due(&mut self, length: u64) {
        if length <= LOG {
            self.due = LOG;
        }
        if length <= self.due {
            return;
        }
        let until = UNTIL.take();
        let done = self.checkpoint();
        UNTIL.set(until);
        match done {
            Err(failure) if failure.is_busy() => return,
            Err(failure) => tracing::warn!(
                target: "fencelock", ?failure, database = %self.path.display(), "the write-ahead log cannot be brought in, and grows"
            ),
            Ok(_) => {}
        }
        // A reader may keep the log from beginning anew; not every commit is to try.
        self.due = length + LOG / 4;
    }
}

/// `&mut`, as newer versions of rusqlite want it.
fn wait_when_busy(conn: &mut rusqlite::Connection) -> Result<(), rusqlite::Error> {
    conn.busy_handler(Some(busy_handler))
}

fn open(path: &Path, flags: OpenFlags) -> Result<rusqlite::Connection, rusqlite::Error> {
    let mut conn = rusqlite::Connection::open_with_flags(path, flags | OpenFlags::SQLITE_OPEN_NO_MUTEX)?;
    wait_when_busy(&mut conn)?;
    // The user who made the file must not run code in our process.
    conn.pragma_update(None, "trusted_schema", false)?;
    // On macOS a plain fsync leaves the data in the drive's cache. Elsewhere it changes nothing.
    conn.pragma_update(None, "fullfsync", true)?;
    Ok(conn)
}

impl Deref for Connection {
    type Target = rusqlite::Connection;

    fn deref(&self) -> &rusqlite::Connection {
        &self.conn
    }
}

impl DerefMut for Connection {
    fn deref_mut(&mut self) -> &mut rusqlite::Connection {
        &mut self.conn
    }
}

thread_local! {
    // SQLite's callback carries nothing; each connection is worked by one thread, so the thread carries it.
    static UNTIL: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// Sets until when statements of this thread wait for a lock of another process.
pub(crate) fn wait_until(end: Instant) {
    UNTIL.set(Some(end));
}

/// Waits a little; false when the time is over. SQLite's own timeout sleeps up to 100 ms, a thousand times as long as one of our transactions.
fn busy_handler(tries: i32) -> bool {
    const SHORTEST: Duration = Duration::from_micros(20);
    const LONGEST: Duration = Duration::from_millis(5);
    let left = UNTIL.get().map(|end| end.saturating_duration_since(Instant::now()));
    let Some(left) = left.filter(|left| !left.is_zero()) else {
        return false;
    };
    let doubled = SHORTEST * (1 << tries.clamp(0, 16));
    thread::sleep(doubled.min(LONGEST).mul_f64(0.5 + fastrand::f64()).min(left));
    true
}

/// Keeps clients that open a file and clients that only look at one apart.
///
/// POSIX locks belong to the process: to close a file that was opened as immutable drops the locks that SQLite has on it for others, and an
/// index that was opened read-only is so for all connections of the process.
static TURNS: RwLock<()> = RwLock::new(());

/// Held while a client opens a file, until it has the log open. Others can open theirs meanwhile.
pub(crate) fn opening() -> RwLockReadGuard<'static, ()> {
    TURNS.read().unwrap_or_else(PoisonError::into_inner)
}

/// Held while a client that only looks has a file open.
pub(crate) fn looking() -> RwLockWriteGuard<'static, ()> {
    TURNS.write().unwrap_or_else(PoisonError::into_inner)
}

/// How many connections are open or about to be opened in this process, in the lower half, and the process, in the upper half: a forked child
/// inherits both.
static IN_USE: AtomicU64 = AtomicU64::new(0);

/// Counts a connection while it lives.
#[derive(Debug)]
pub(crate) struct InUse {
    process: u64,
}

impl InUse {
    /// Refuses a forked child whose parent had a connection: SQLite in the child believes in locks that only the parent has, and its mutexes
    /// and ours may have been held by another thread of the parent, for ever. To be called before [`opening`] and [`looking`].
    pub(crate) fn begin() -> Result<Self, LockError> {
        let process = u64::from(std::process::id()) << u32::BITS;
        let counted = IN_USE.fetch_update(Ordering::AcqRel, Ordering::Acquire, |state| match count(state) {
            0 => Some(process + 1),
            _ if state - count(state) == process => Some(state + 1),
            _ => None,
        });
        match counted {
            Ok(_) => Ok(Self { process }),
            Err(_) => Err(LockError::configuration(
                "the parent process had an SQLite client open at the fork, and SQLite cannot be used on both sides of a fork; connect \
                 after the fork, shut the client down before it, or start a new program (exec)",
            )),
        }
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        // Not one that a child inherited, once it counts its own.
        let _ = IN_USE.fetch_update(Ordering::AcqRel, Ordering::Acquire, |state| {
            (count(state) > 0 && state - count(state) == self.process).then(|| state - 1)
        });
    }
}

fn count(state: u64) -> u64 {
    state & u64::from(u32::MAX)
}

/// Refuses an SQLite that lacks STRICT tables, which came with 3.37.0, and the two versions in which a thread that closes a connection and one
/// that opens the same file can wait for each other for ever.
pub(crate) fn check_version() -> Result<(), LockError> {
    check(rusqlite::version_number(), rusqlite::version())
}

fn check(number: i32, version: &str) -> Result<(), LockError> {
    let wanted = match number {
        ..3_037_000 => "3.37.0 or later",
        3_051_000 | 3_051_001 => {
            "3.51.2 or later, or 3.50 or earlier: this one can block for ever when a file is opened and closed"
        }
        _ => return Ok(()),
    };
    Err(LockError::configuration(format!(
        "this program is linked with SQLite {version}, and locks in SQLite need {wanted}; link another one, or turn on the feature \
         \"bundled\" of fencelock and build again"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sqlite_that_is_linked_will_do_and_versions_that_will_not_are_named() {
        check_version().unwrap();
        for (number, version) in [(3_036_000, "3.36.0"), (3_051_000, "3.51.0"), (3_051_001, "3.51.1")] {
            let refused = check(number, version).unwrap_err().to_string();
            assert!(
                refused.contains(version) && refused.contains("\"bundled\""),
                "{refused}"
            );
        }
        for number in [3_037_000, 3_050_004, 3_051_002, 3_051_003] {
            check(number, "a good one").unwrap();
        }
    }

    #[test]
    fn no_checkpoint_runs_while_another_connection_can_write_and_the_log_begins_anew_after_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.db");
        std::fs::write(&path, "").unwrap();
        // Without opening the file: closing it would drop SQLite's locks.
        let length = |end: &str| std::fs::metadata(dir.path().join(format!("a.db{end}"))).unwrap().len();
        let mut ours = Connection::open(&path, InUse::begin().unwrap()).unwrap();
        ours.execute_batch("PRAGMA journal_mode = WAL; CREATE TABLE t (filler)")
            .unwrap();
        for _ in 0..6 {
            ours.execute_batch("INSERT INTO t VALUES (zeroblob(1000000))").unwrap();
        }
        let other = rusqlite::Connection::open(&path).unwrap();
        other.execute_batch("BEGIN IMMEDIATE").unwrap();
        let before = length("");
        assert!(ours.checkpoint().unwrap_err().is_busy());
        ours.checkpoint_if_due(length("-wal"));
        assert_eq!(length(""), before, "frames were brought in beside a writer");
        other.execute_batch("ROLLBACK; BEGIN; SELECT count(*) FROM t").unwrap();
        ours.execute_batch("INSERT INTO t VALUES (1)").unwrap();
        assert!(
            !ours.checkpoint().unwrap(),
            "what the reader does not know was brought in"
        );
        ours.checkpoint_if_due(length("-wal"));
        assert!(ours.due > length("-wal"), "every commit would try again");
        other.execute_batch("COMMIT").unwrap();
        assert!(ours.checkpoint().unwrap());
        assert!(length("") > 6_000_000);
        ours.execute_batch("INSERT INTO t VALUES (1)").unwrap();
        assert_eq!(length("-wal"), LOG);
        ours.checkpoint_if_due(length("-wal"));
        assert_eq!(ours.due, LOG);
    }
}
