//! What the database looks like.

use std::path::Path;

use rusqlite::Connection;

use crate::error::Failure;

/// Marks the file as ours (`fncl`), so that no other program's database is ever written to.
const APPLICATION_ID: i32 = 0x666e_636c;

/// The format of the tables below. A file with another one is refused.
const FORMAT: i32 = 3;

/// - `lock`: a row per hold. It counts while its `boot` is this one and `expires`, a reading of the boot clock in nanoseconds, is ahead. `mode`
///   and `permits`: see `commands.rs`. `acquired_at` is in microseconds of Unix time. `reserved` and `reserved_wall` are the end of a
///   reservation by the boot clock and by the wall clock in microseconds, 0 without one; `expires` is never below `reserved`. A row without a
///   `client` is only reserved: its owner has released it.
/// - `waiter`: a row per claim that waits, for as long as its client keeps it up. `place` is its place among the waiters of the name, `passed`
///   how many later claims were granted before it.
/// - `counter`: the last token drawn, and the durable ceiling below which tokens may be drawn.
const TABLES: &str = "
CREATE TABLE lock (
    name TEXT NOT NULL,
    owner TEXT NOT NULL,
    client TEXT NOT NULL,
    mode INTEGER NOT NULL,
    permits INTEGER NOT NULL,
    token INTEGER NOT NULL,
    boot TEXT NOT NULL,
    expires INTEGER NOT NULL,
    label TEXT,
    host TEXT,
    pid INTEGER,
    acquired_at INTEGER NOT NULL,
    reserved INTEGER NOT NULL DEFAULT 0,
    reserved_wall INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (name, owner)
) STRICT, WITHOUT ROWID;
CREATE TABLE waiter (
    name TEXT NOT NULL,
    owner TEXT NOT NULL,
    client TEXT NOT NULL,
    mode INTEGER NOT NULL,
    permits INTEGER NOT NULL,
    boot TEXT NOT NULL,
    expires INTEGER NOT NULL,
    place INTEGER NOT NULL,
    passed INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (name, owner)
) STRICT, WITHOUT ROWID;
CREATE TABLE counter (
    only_row INTEGER NOT NULL PRIMARY KEY CHECK (only_row = 1),
    token INTEGER NOT NULL,
    ceiling INTEGER NOT NULL
) STRICT;
INSERT INTO counter (only_row, token, ceiling) VALUES (1, 0, 0);
";

/// Sets the journal mode of a database that [`is_ours`] or empty, and opens its log.
pub(crate) fn set_journal_mode(conn: &Connection, path: &Path) -> Result<(), Failure> {
    let mode: String = conn.query_row("PRAGMA journal_mode = WAL", [], |row| row.get(0))?;
    if mode != "wal" {
        return Err(Failure::configuration(format!(
            "SQLite keeps {} in journal mode {mode}, and locks need the write-ahead log; put the file on a disk with shared memory between \
             processes",
            path.display()
        )));
    }
    // SQLite opens the log with the first read.
    Ok(conn.query_row("SELECT count(*) FROM sqlite_schema", [], |_| Ok(()))?)
}

/// Lays out the tables of an empty database.
pub(crate) fn create(tx: &Connection) -> Result<(), Failure> {
    tx.execute_batch(TABLES)?;
    tx.pragma_update(None, "application_id", APPLICATION_ID)?;
    Ok(tx.pragma_update(None, "user_version", FORMAT)?)
}

/// Whether the database has our tables. False if it is empty. In a transaction, or another process could lay out its tables meanwhile.
pub(crate) fn is_ours(tx: &Connection, path: &Path) -> Result<bool, Failure> {
    let pragma = |name| tx.pragma_query_value(None, name, |row| row.get::<_, i32>(0));
    let (id, format) = (pragma("application_id")?, pragma("user_version")?);
    let tables: i64 = tx.query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))?;
    let refused = match (id, format, tables) {
        (APPLICATION_ID, FORMAT, _) => return Ok(true),
        (0, 0, 0) => return Ok(false),
        (APPLICATION_ID, ..FORMAT, _) => format!(
            "has format {format}, of an earlier version of fencelock; stop all its users, then remove it with its -wal and -shm files. \
             Tokens go on above the old ones"
        ),
        (APPLICATION_ID, _, _) => format!(
            "has format {format}, and this version of fencelock knows format {FORMAT}; update this program, or use another file"
        ),
        _ => "is the database of another program; give locks a file of their own".to_owned(),
    };
    Err(Failure::configuration(format!("{} {refused}", path.display())))
}
