//! What the database looks like, and how it is opened.

use std::path::Path;

use lock_core::LockError;
use rusqlite::{Connection, Transaction, TransactionBehavior};

use crate::checkpoint::Checkpointer;
use crate::database::Database;
use crate::failure::{self, Failure};
use crate::patience;

/// Marks the file as ours (`fncl`), so that no other program's database is ever written to.
const APPLICATION_ID: i32 = 0x666e_636c;

/// The format of the tables below. A file with a higher one is refused, so clients that know of no reservations are, too.
const FORMAT: i32 = 2;

/// Makes that of format 1.
const FROM_FORMAT_1: &str = "
ALTER TABLE lock ADD COLUMN reserved INTEGER NOT NULL DEFAULT 0;
ALTER TABLE lock ADD COLUMN reserved_wall INTEGER NOT NULL DEFAULT 0;
";

/// `lock`: who holds what. A row counts while its boot is this one and its expiry is ahead; all others are free.
/// `expires` is a reading of the boot clock in nanoseconds, `ttl` in nanoseconds, `acquired_at` in microseconds of Unix
/// time. `reserved`, `reserved_wall`, and an empty `client`: [`crate::reservations`]. `counter`: the last token drawn, and the durable ceiling below which tokens may be drawn.
const TABLES: &str = "
CREATE TABLE lock (
    name TEXT NOT NULL PRIMARY KEY,
    owner TEXT NOT NULL,
    client TEXT NOT NULL,
    token INTEGER NOT NULL,
    boot TEXT NOT NULL,
    expires INTEGER NOT NULL,
    ttl INTEGER NOT NULL,
    label TEXT,
    host TEXT,
    pid INTEGER,
    acquired_at INTEGER NOT NULL,
    reserved INTEGER NOT NULL DEFAULT 0,
    reserved_wall INTEGER NOT NULL DEFAULT 0
) STRICT, WITHOUT ROWID;
CREATE TABLE counter (
    only_row INTEGER NOT NULL PRIMARY KEY CHECK (only_row = 1),
    token INTEGER NOT NULL,
    ceiling INTEGER NOT NULL
) STRICT;
INSERT INTO counter (only_row, token, ceiling) VALUES (1, 0, 0);
";

/// Pages that are written once and then free. On a full disk the log is emptied into the database and begun again, so
/// the database must have room for what is in the log without growing.
const ROOM: &str = "CREATE TABLE room (filler BLOB); INSERT INTO room VALUES (zeroblob(65536));";

/// Opens the database, and lays out the tables if the file is new.
pub(crate) fn open(path: &Path) -> Result<(Database, Checkpointer), Failure> {
    let mut conn = Database::open(path, true)?;
    conn.set_prepared_statement_cache_capacity(32);
    // Before the journal mode, which is stored in the file: another program's database must stay untouched.
    let found = Found::look(&conn.transaction()?, path)?;
    write_ahead(&conn, path)?;
    let mut checkpointer = Checkpointer::open(path)?;
    if found == Found::Format1 {
        let tx = conn.transaction_with_behavior(TransactionBehavior::Immediate)?;
        if Found::look(&tx, path)? == Found::Format1 {
            tx.execute_batch(FROM_FORMAT_1)?;
            tx.pragma_update(None, "user_version", FORMAT)?;
            tx.commit()?;
        }
    }
    if found == Found::Nothing {
        let tx = conn.transaction_with_behavior(TransactionBehavior::Immediate)?;
        // Another process may have been faster.
        if Found::look(&tx, path)? == Found::Nothing {
            tx.execute_batch(TABLES)?;
            tx.execute_batch(ROOM)?;
            tx.pragma_update(None, "application_id", APPLICATION_ID)?;
            tx.pragma_update(None, "user_version", FORMAT)?;
            tx.commit()?;
            checkpointer.run(&conn)?;
            conn.execute_batch("DROP TABLE IF EXISTS room")?;
            checkpointer.run(&conn)?;
        }
    }
    Ok((conn, checkpointer))
}

/// The journal in which readers and one writer do not block each other.
fn write_ahead(conn: &Connection, path: &Path) -> Result<(), Failure> {
    let mut tries = 0;
    let mode: String = loop {
        // Two processes that switch the same new file at once would deadlock; SQLite tells one of them without asking
        // the busy handler.
        match conn.query_row("PRAGMA journal_mode = WAL", [], |row| row.get(0)) {
            Err(e) if failure::contention(&e) && patience::wait_for_the_other(tries) => tries += 1,
            other => break other?,
        }
    };
    if mode != "wal" {
        return Err(Failure::Refused(LockError::configuration(format!(
            "SQLite keeps {} in journal mode {mode}, and locks need the write-ahead log; put the file on a disk with \
             shared memory between processes",
            path.display()
        ))));
    }
    conn.pragma_update(None, "synchronous", "NORMAL")?;
    Checkpointer::prepare(conn)?;
    Ok(())
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Found {
    Nothing,
    /// Ours, of a version without reservations.
    Format1,
    Ours,
}

impl Found {
    /// In a transaction, or another process could lay out its tables between one question and the next.
    pub(crate) fn look(tx: &Transaction<'_>, path: &Path) -> Result<Self, Failure> {
        let pragma = |name| tx.pragma_query_value(None, name, |row| row.get::<_, i32>(0));
        let (id, format) = (pragma("application_id")?, pragma("user_version")?);
        let tables: i64 = tx.query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))?;
        let refused = |message| Err(Failure::Refused(LockError::configuration(message)));
        match (id, format, tables) {
            (APPLICATION_ID, FORMAT, _) => Ok(Self::Ours),
            (APPLICATION_ID, 1, _) => Ok(Self::Format1),
            (APPLICATION_ID, _, _) => refused(format!(
                "{} has format {format}, and this version of fencelock knows format {FORMAT}; update this program, or \
                 use another file",
                path.display()
            )),
            (0, 0, 0) => Ok(Self::Nothing),
            _ => refused(format!(
                "{} is the database of another program; give locks a file of their own",
                path.display()
            )),
        }
    }
}
