//! When and how the write-ahead log is brought into the database.

use std::fs;
use std::path::{Path, PathBuf};

use rusqlite::{Connection, Transaction, TransactionBehavior};

use crate::database::Database;
use crate::failure::contention;
use crate::patience;
use crate::place::with_suffix;

/// Length of the log that makes a checkpoint due, in bytes: about 1 000 pages, as SQLite itself has it. An acquisition and its release
/// write three or four pages, so a checkpoint with its two waits for the disk comes every 300 of them.
///
/// SQLite cuts a longer log to this length when it begins anew, so the length of the file tells each client how full the log is,
/// whoever wrote it. A count of the client's own commits would not: many clients that write a little each would not know of each other.
pub(crate) const LOG: u64 = 4 << 20;

/// How much longer the log gets before the next attempt, if a reader has kept it from beginning anew.
const STEP: u64 = LOG / 4;

/// Brings the log into the database while no other connection can write.
///
/// SQLite before 3.51.3 has a fault: a checkpoint reads how long the log is, and if another connection begins the log anew before the
/// checkpoint goes on, frames of the new log count as checkpointed that are not in the database. To begin the log anew takes the write
/// lock. So a checkpoint runs only while this client holds the write lock itself, and SQLite's automatic checkpoints are off. For every
/// version, so that there is one way only. Three things are known of it, from SQLite's source:
///
/// - SQLite refuses a checkpoint on a connection that has a transaction, so it takes a second connection. The modes FULL, RESTART and
///   TRUNCATE take the write lock by themselves, but go on without it if they cannot have it.
/// - A transaction that was begun with the write lock reads the latest state, so its mark in the log keeps nothing from being brought in.
///   As it writes nothing, it does not begin the log anew either. The next transaction that writes does, unless a reader still uses the
///   log.
/// - The last connection that closes a database checkpoints as well. It holds the file exclusively then.
#[derive(Debug)]
pub(crate) struct Checkpointer {
    /// The second connection. It stays open, so that a full disk can be dealt with when there are no file descriptors left, too.
    conn: Database,
    log: PathBuf,
    /// Pages of the database when the log was last brought into it.
    pages: i64,
    /// A log that is longer is brought in.
    due: u64,
    /// Whether the last attempt failed, which is told once.
    fails: bool,
}

impl Checkpointer {
    /// Opens the second connection to the database at `path`, which is in WAL mode.
    pub(crate) fn open(path: &Path) -> Result<Self, rusqlite::Error> {
        let conn = Database::open(path, false)?;
        Ok(Self {
            // A read, as SQLite opens the log with the first one.
            pages: page_count(&conn)?,
            conn,
            log: with_suffix(path, "-wal"),
            due: LOG,
            fails: false,
        })
    }

    /// Turns off automatic checkpoints of `writer`, and has it cut a log that it begins anew.
    pub(crate) fn prepare(writer: &Connection) -> Result<(), rusqlite::Error> {
        let set = |sql: &str| writer.query_row(sql, [], |_| Ok(()));
        set("PRAGMA wal_autocheckpoint = 0")?;
        set(&format!("PRAGMA journal_size_limit = {LOG}"))
    }

    /// Brings in what is in the log, as far as readers let it, and tells whether that was everything. The log keeps its length, as room
    /// for more. `writer` must be a connection to the same database, in no transaction.
    pub(crate) fn run(&mut self, writer: &Connection) -> Result<bool, rusqlite::Error> {
        let lock = Transaction::new_unchecked(writer, TransactionBehavior::Immediate)?;
        // Busy, with two equal numbers that mean nothing, if another program's connection is at a checkpoint.
        let (busy, length, done): (bool, i64, i64) =
            self.conn.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |row| {
                Ok((row.get(0)?, row.get(1)?, row.get(2)?))
            })?;
        if !busy {
            self.pages = page_count(&lock)?;
        }
        lock.rollback()?;
        Ok(!busy && done == length)
    }

    /// As `run`, if the log is long, or the database has grown: the file grows while the disk has room. If another connection is writing
    /// this is left to the next call, or to that connection's client.
    pub(crate) fn run_if_due(&mut self, writer: &Connection) {
        let ran = page_count(writer).and_then(|pages| {
            let length = self.length();
            if length <= LOG {
                self.due = LOG;
            }
            if pages > self.pages || length > self.due {
                patience::without_waiting(|| self.run(writer))?;
                if length > LOG {
                    self.due = length + STEP;
                }
            }
            Ok(())
        });
        match ran {
            Ok(()) => self.fails = false,
            Err(error) if contention(&error) => {}
            Err(error) if self.fails => {
                tracing::debug!(target: "fencelock", error = format_args!("{error:#}"), "the write-ahead log still grows");
            }
            Err(error) => {
                self.fails = true;
                tracing::warn!(
                    target: "fencelock",
                    error = format_args!("{error:#}"),
                    log = %self.log.display(),
                    "the write-ahead log cannot be brought into the database, and grows"
                );
            }
        }
    }

    /// Length of the log in bytes.
    fn length(&self) -> u64 {
        fs::metadata(&self.log).map_or(0, |log| log.len())
    }
}

fn page_count(conn: &Connection) -> Result<i64, rusqlite::Error> {
    conn.prepare_cached("PRAGMA page_count")?
        .query_row([], |row| row.get(0))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;

    use rusqlite::ErrorCode;
    use tempfile::TempDir;

    use super::*;

    /// A database whose content is in its log, and the client that has written it.
    struct Filled {
        dir: TempDir,
        writer: Database,
        checkpointer: Checkpointer,
    }

    impl Filled {
        fn new(bytes: u64) -> Self {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("a.db");
            let writer = Database::open(&path, true).unwrap();
            writer.query_row("PRAGMA journal_mode = WAL", [], |_| Ok(())).unwrap();
            Checkpointer::prepare(&writer).unwrap();
            let checkpointer = Checkpointer::open(&path).unwrap();
            writer.execute_batch("CREATE TABLE t (filler BLOB)").unwrap();
            for _ in 0..bytes / 1_000_000 {
                writer
                    .execute_batch("INSERT INTO t VALUES (zeroblob(1000000))")
                    .unwrap();
            }
            Self {
                dir,
                writer,
                checkpointer,
            }
        }

        fn path(&self) -> PathBuf {
            self.dir.path().join("a.db")
        }

        /// Length of the database file. It grows with what a checkpoint brings in, page by page.
        fn length(&self) -> u64 {
            length(&self.path())
        }

        fn run(&mut self) -> Result<bool, rusqlite::Error> {
            self.checkpointer.run(&self.writer)
        }
    }

    /// Without opening the file: closing it would drop SQLite's locks.
    fn length(path: &Path) -> u64 {
        fs::metadata(path).unwrap().len()
    }

    /// Another program's connection, which waits for nothing.
    fn stranger(path: &Path) -> Connection {
        let conn = Connection::open(path).unwrap();
        conn.busy_timeout(std::time::Duration::ZERO).unwrap();
        conn.query_row("PRAGMA wal_autocheckpoint = 0", [], |_| Ok(())).unwrap();
        conn
    }

    fn is_busy(error: &rusqlite::Error) -> bool {
        error.sqlite_error_code() == Some(ErrorCode::DatabaseBusy)
    }

    #[test]
    fn no_checkpoint_runs_while_another_connection_can_write() {
        let mut ours = Filled::new(2_000_000);
        let other = stranger(&ours.path());
        let before = ours.length();
        other.execute_batch("BEGIN IMMEDIATE").unwrap();
        assert!(is_busy(&ours.run().unwrap_err()));
        ours.checkpointer.due = 0;
        ours.checkpointer.run_if_due(&ours.writer);
        assert_eq!(ours.length(), before, "frames were brought in beside a writer");
        other.execute_batch("INSERT INTO t VALUES (1); COMMIT").unwrap();
        assert!(ours.run().unwrap());
        assert!(ours.length() > 2_000_000);
    }

    #[test]
    fn no_other_connection_can_write_while_a_checkpoint_runs() {
        let mut ours = Filled::new(40_000_000);
        let path = ours.path();
        let (started, stop) = (AtomicBool::new(false), AtomicBool::new(false));
        let seen = thread::scope(|scope| {
            let writing = scope.spawn(|| {
                let other = stranger(&path);
                let mut seen = Vec::new();
                while !stop.load(Ordering::Acquire) {
                    if other.execute_batch("BEGIN IMMEDIATE").is_ok() {
                        seen.push(length(&path));
                        other.execute_batch("ROLLBACK").unwrap();
                    }
                    started.store(true, Ordering::Release);
                }
                seen
            });
            while !started.load(Ordering::Acquire) {
                thread::yield_now();
            }
            while let Err(error) = ours.run() {
                assert!(is_busy(&error), "{error}");
            }
            stop.store(true, Ordering::Release);
            writing.join().unwrap()
        });
        let after = ours.length();
        assert!(after > 40_000_000);
        let between = seen.iter().find(|&&length| length > 4096 && length < after);
        assert_eq!(between, None, "a writer saw a checkpoint at work");
    }

    #[test]
    fn the_log_begins_anew_after_a_checkpoint_and_is_cut() {
        let mut ours = Filled::new(10_000_000);
        let before = ours.checkpointer.length();
        assert!(before > 2 * LOG);
        ours.checkpointer.run_if_due(&ours.writer);
        assert!(ours.length() > 10_000_000);
        assert_eq!(ours.checkpointer.length(), before);
        ours.writer.execute_batch("INSERT INTO t VALUES (1)").unwrap();
        assert_eq!(ours.checkpointer.length(), LOG);
    }

    #[test]
    fn a_reader_puts_the_end_of_the_log_off_and_is_not_asked_at_every_commit() {
        let mut ours = Filled::new(10_000_000);
        let reader = stranger(&ours.path());
        reader.execute_batch("BEGIN; SELECT count(*) FROM t").unwrap();
        ours.writer.execute_batch("INSERT INTO t VALUES (1)").unwrap();
        assert!(!ours.run().unwrap(), "what the reader does not know was brought in");
        ours.checkpointer.run_if_due(&ours.writer);
        let due = ours.checkpointer.due;
        assert!(due > ours.checkpointer.length());
        ours.writer.execute_batch("INSERT INTO t VALUES (1)").unwrap();
        ours.checkpointer.run_if_due(&ours.writer);
        assert_eq!(ours.checkpointer.due, due);
        reader.execute_batch("COMMIT").unwrap();
        assert!(ours.run().unwrap());
        ours.writer.execute_batch("INSERT INTO t VALUES (1)").unwrap();
        ours.checkpointer.run_if_due(&ours.writer);
        assert_eq!((ours.checkpointer.length(), ours.checkpointer.due), (LOG, LOG));
    }
}
