//! A connection to the database: how it is opened, how long it waits for other processes, and when the write-ahead log is brought in.

use std::cell::Cell;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use lock_core::LockError;
use rusqlite::{Connection, OpenFlags, Transaction, TransactionBehavior};

use crate::error::Failure;
use crate::file_identity::FileIdentity;

/// Length of the log that makes a checkpoint due, in bytes: about 1 000 pages, as SQLite itself has it. SQLite cuts a longer log to this length
/// when it begins anew, so the length of the file tells each client how full the log is, whichever client wrote it.
pub(crate) const LOG: u64 = 4 << 20;

/// `&mut`, as newer versions of rusqlite want it.
fn wait_when_busy(conn: &mut Connection) -> Result<(), rusqlite::Error> {
    conn.busy_handler(Some(busy_handler))
}

/// Opens the file at `path`, which must exist.
pub(crate) fn open(path: &Path, flags: OpenFlags) -> Result<Connection, Failure> {
    let mut conn = Connection::open_with_flags(path, flags | OpenFlags::SQLITE_OPEN_NO_MUTEX)?;
    conn.set_prepared_statement_cache_capacity(64);
    wait_when_busy(&mut conn)?;
    // The user who made the file must not run code in our process.
    conn.pragma_update(None, "trusted_schema", false)?;
    // On macOS a plain fsync leaves the data in the drive's cache. Elsewhere it changes nothing.
    conn.pragma_update(None, "fullfsync", true)?;
    // Checkpoints are made by `checkpoint`.
    conn.query_row("PRAGMA wal_autocheckpoint = 0", [], |_| Ok(()))?;
    conn.query_row(&format!("PRAGMA journal_size_limit = {LOG}"), [], |_| Ok(()))?;
    Ok(conn)
}

/// Begins a transaction that keeps others from writing.
pub(crate) fn begin(conn: &Connection) -> Result<Transaction<'_>, Failure> {
    Ok(Transaction::new_unchecked(conn, TransactionBehavior::Immediate)?)
}

/// Whether commits wait for the disk.
pub(crate) fn set_durable(conn: &Connection, durable: bool) -> Result<(), Failure> {
    Ok(conn.pragma_update(None, "synchronous", if durable { "FULL" } else { "NORMAL" })?)
}

/// Brings the log into the database while no other connection can write. It then begins anew, unless a reader is in its way. Does not wait for
/// other connections.
///
/// SQLite before 3.51.3 has a fault: if another connection begins the log anew while a checkpoint runs, frames of the new log count as
/// brought in that are not. To begin it anew takes the write lock, so this client holds that. SQLite refuses a checkpoint on a connection
/// that has a transaction, so it takes a second one.
pub(crate) fn checkpoint(conn: &Connection, files: &FileIdentity) -> Result<(), Failure> {
    wait_until(Instant::now());
    let lock = begin(conn)?;
    let second = open(&files.database, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
    // SQLite opens the log with the first read.
    second.query_row("PRAGMA page_count", [], |_| Ok(()))?;
    // The path may lead to another file by now, for which this client has no lock.
    files.check()?;
    second.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |_| Ok(()))?;
    Ok(lock.rollback()?)
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

/// Held while a client of this process opens a file, until SQLite has its locks, and while one that only looks has a file open.
///
/// POSIX locks belong to the process: closing a file drops those that SQLite has on it for others, unless SQLite knows of both.
pub(crate) fn opening() -> MutexGuard<'static, ()> {
    static OPENING: Mutex<()> = Mutex::new(());
    OPENING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The number of the process in the upper half, and how many connections it has open or is about to open. A forked child inherits both.
static IN_USE: AtomicU64 = AtomicU64::new(0);

/// Counts a connection while it lives.
#[derive(Debug)]
pub(crate) struct InUse(());

impl InUse {
    /// Refuses a forked child whose parent had a connection: SQLite in the child believes in locks that only the parent has, and its mutexes
    /// and ours may have been held by another thread of the parent, for ever. To be called before [`opening`].
    pub(crate) fn begin() -> Result<Self, LockError> {
        let process = u64::from(std::process::id()) << 32;
        let counted = IN_USE.fetch_update(Ordering::AcqRel, Ordering::Acquire, |seen| match seen as u32 {
            0 => Some(process + 1),
            _ => (seen >> 32 == process >> 32).then_some(seen + 1),
        });
        match counted {
            Ok(_) => Ok(Self(())),
            Err(_) => Err(LockError::configuration(
                "the parent process had an SQLite client open at the fork, and SQLite cannot be used on both sides of a fork; connect \
                 after the fork, shut the client down before it, or start a new program (exec)",
            )),
        }
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        IN_USE.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Refuses an SQLite that lacks STRICT tables, which came with 3.37.0, and the two versions in which a thread that closes a connection and one
/// that opens the same file can wait for each other for ever.
pub(crate) fn check_version() -> Result<(), LockError> {
    match rusqlite::version_number() {
        3_037_000.. if !matches!(rusqlite::version_number(), 3_051_000 | 3_051_001) => Ok(()),
        _ => Err(LockError::configuration(format!(
            "this program is linked with SQLite {}, and locks in SQLite need 3.37.0 or later, but not 3.51.0 or 3.51.1, in which opening \
             and closing a file can block for ever; link another one, or turn on the feature \"bundled\" of fencelock and build again",
            rusqlite::version()
        ))),
    }
}
