//! A connection to the database.

use std::ops::{Deref, DerefMut};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use lock_core::LockError;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_encode};
use rusqlite::{Connection, OpenFlags};

use crate::patience;

/// How many connections are open or about to be opened in this process, in the lower half, and the process, in the upper half: a forked
/// child inherits both.
static IN_USE: AtomicU64 = AtomicU64::new(0);

/// Counts a connection, which must be opened and closed, and the mutexes for that be locked, while it lives.
#[derive(Debug)]
pub(crate) struct InUse {
    process: u64,
}

impl InUse {
    /// Refuses a forked child whose parent had a connection: SQLite in the child believes in locks that only the parent has, and its
    /// mutexes and ours may have been held by another thread of the parent, for ever.
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
            (state - count(state) == self.process).then(|| state - 1)
        });
    }
}

fn count(state: u64) -> u64 {
    state & u64::from(u32::MAX)
}

/// Held while a connection of this process is opened or closed.
///
/// In SQLite 3.51.0 and 3.51.1 a thread that closes a connection in WAL mode, and another one that opens or closes the same file, take
/// two mutexes in opposite order. One of them is global, so every SQLite database of the process would be blocked for ever.
static OPENING_OR_CLOSING: Mutex<()> = Mutex::new(());

/// A connection that is opened and closed while no other one is.
#[derive(Debug)]
pub(crate) struct Database(Option<Connection>);

impl Database {
    /// Opens the file at `path`; if it does not exist, makes it if `create` says so.
    pub(crate) fn open(path: &Path, create: bool) -> Result<Self, rusqlite::Error> {
        let mut flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        flags.set(OpenFlags::SQLITE_OPEN_CREATE, create);
        let mut database = {
            let _alone = OPENING_OR_CLOSING.lock().unwrap_or_else(PoisonError::into_inner);
            Self(Some(Connection::open_with_flags(path, flags)?))
        };
        let conn: &mut Connection = &mut database;
        conn.busy_handler(Some(patience::wait_for_the_other))?;
        // Whoever made the file shall not run code of theirs in our process.
        conn.pragma_update(None, "trusted_schema", false)?;
        // On macOS a plain fsync leaves the data in the drive's cache. Elsewhere it changes nothing.
        conn.pragma_update(None, "fullfsync", true)?;
        Ok(database)
    }

    /// Opens the file at `path` to read it, and makes no other beside it. An `immutable` one must have no log; else the log and its index
    /// must be there.
    pub(crate) fn open_to_read(path: &Path, immutable: bool) -> Result<Self, rusqlite::Error> {
        const PLAIN: &AsciiSet = &NON_ALPHANUMERIC.remove(b'/').remove(b'.').remove(b'-').remove(b'_');
        let path = percent_encode(path.as_os_str().as_bytes(), PLAIN);
        let how = if immutable { "immutable=1" } else { "readonly_shm=1" };
        let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_URI | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let database = {
            let _alone = OPENING_OR_CLOSING.lock().unwrap_or_else(PoisonError::into_inner);
            Self(Some(Connection::open_with_flags(
                format!("file://{path}?mode=ro&{how}"),
                flags,
            )?))
        };
        // A client that has the file to itself may be about to take the log with it, so the caller looks again.
        database.busy_timeout(Duration::ZERO)?;
        database.pragma_update(None, "trusted_schema", false)?;
        Ok(database)
    }
}

impl Deref for Database {
    type Target = Connection;

    fn deref(&self) -> &Connection {
        match &self.0 {
            Some(conn) => conn,
            None => unreachable!("it is closed on drop only"),
        }
    }
}

impl DerefMut for Database {
    fn deref_mut(&mut self) -> &mut Connection {
        match &mut self.0 {
            Some(conn) => conn,
            None => unreachable!("it is closed on drop only"),
        }
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        let _alone = OPENING_OR_CLOSING.lock().unwrap_or_else(PoisonError::into_inner);
        self.0 = None;
    }
}

/// Refuses an SQLite that lacks what the backend uses: STRICT tables came with 3.37.0.
///
/// Versions with known faults are not refused: what the faults need is not done with them. See [`OPENING_OR_CLOSING`] and
/// [`Checkpointer`](crate::checkpoint::Checkpointer).
pub(crate) fn check_version() -> Result<(), LockError> {
    at_least_oldest(rusqlite::version_number(), rusqlite::version())
}

fn at_least_oldest(number: i32, version: &str) -> Result<(), LockError> {
    const OLDEST: i32 = 3_037_000;
    if number >= OLDEST {
        return Ok(());
    }
    Err(LockError::configuration(format!(
        "this program is linked with SQLite {version}, and locks in SQLite need 3.37.0 or later; link a later one, or turn on the \
         feature \"bundled\" of fencelock and build again"
    )))
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    /// With SQLite 3.51.1, which rusqlite 0.38 brings along, this never ends without [`OPENING_OR_CLOSING`].
    #[test]
    fn threads_open_and_close_the_same_file_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.db");
        let version = |conn: &Connection| conn.pragma_query_value(None, "user_version", |row| row.get::<_, i64>(0));
        let first = Database::open(&path, true).unwrap();
        first
            .execute_batch("PRAGMA journal_mode = WAL; PRAGMA user_version = 7")
            .unwrap();
        drop(first);
        let (ended, ends) = mpsc::channel();
        for _ in 0..2 {
            let (path, ended) = (path.clone(), ended.clone());
            thread::spawn(move || {
                patience::until(std::time::Instant::now() + Duration::from_secs(60));
                for _ in 0..2_000 {
                    assert_eq!(version(&Database::open(&path, false).unwrap()).unwrap(), 7);
                }
                ended.send(()).unwrap();
            });
        }
        for _ in 0..2 {
            ends.recv_timeout(Duration::from_secs(60))
                .expect("no thread is blocked");
        }
    }

    #[test]
    fn the_sqlite_that_is_linked_will_do_and_one_that_is_too_old_is_named() {
        check_version().unwrap();
        at_least_oldest(3_037_000, "3.37.0").unwrap();
        let refused = at_least_oldest(3_036_000, "3.36.0").unwrap_err();
        assert!(matches!(refused, LockError::Configuration { .. }), "{refused}");
        let text = refused.to_string();
        for part in ["3.36.0", "3.37.0", "\"bundled\""] {
            assert!(text.contains(part), "{text}");
        }
    }
}
