//! What the lock protects: a number in a file, and a stock in a database with a fence.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use fencelock::sqlite::SqliteConfig;
use fencelock::sqlite::fence::{self, FenceError};
use fencelock::sqlite::rusqlite::{self, Connection, TransactionBehavior};
use fencelock::{FencingToken, LockError, Locks};

use crate::crew::PATIENCE;

/// The locks of the shop. A path that the system has chosen may hold what is special in an address, so none is made of it.
pub(crate) async fn locks(dir: &Path) -> Result<Locks, LockError> {
    let file = SqliteConfig::new(dir.join("locks.db")).op_timeout(PATIENCE);
    Ok(Locks::new(file.connect().await?))
}

pub(crate) fn read_count(dir: &Path) -> io::Result<u64> {
    let text = fs::read_to_string(dir.join("count"))?;
    text.trim().parse().map_err(io::Error::other)
}

/// Always of the same length and in one piece, so that a reader never finds half a number.
pub(crate) fn write_count(dir: &Path, count: u64) -> io::Result<()> {
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .open(dir.join("count"))?;
    file.write_all_at(format!("{count:>9}\n").as_bytes(), 0)
}

/// Notes the token under which something was written.
pub(crate) fn note_token(dir: &Path, token: FencingToken) -> io::Result<()> {
    let mut file = OpenOptions::new().append(true).create(true).open(dir.join("tokens"))?;
    writeln!(file, "{token}")
}

pub(crate) fn read_tokens(dir: &Path) -> io::Result<Vec<u64>> {
    let text = fs::read_to_string(dir.join("tokens"))?;
    text.lines()
        .map(|line| line.parse().map_err(io::Error::other))
        .collect()
}

/// The database of the stock: not the one that keeps the locks, as a shop's data would not be.
pub(crate) fn open(dir: &Path) -> rusqlite::Result<Connection> {
    let conn = Connection::open(database(dir))?;
    conn.busy_timeout(PATIENCE)?;
    conn.execute_batch(fence::CREATE_SQL)?;
    conn.execute_batch(
        "CREATE TABLE IF NOT EXISTS stock (id INTEGER PRIMARY KEY, amount INTEGER NOT NULL);
         INSERT OR IGNORE INTO stock VALUES (1, 100)",
    )?;
    Ok(conn)
}

/// Reads the stock for a holder who is going to write: admitted first, so that no older holder can write in between.
pub(crate) fn read_stock(conn: &mut Connection, token: FencingToken) -> Result<i64, FenceError> {
    let tx = conn.transaction_with_behavior(TransactionBehavior::Immediate)?;
    fence::admit(&tx, "stock", token)?;
    let amount = tx.query_row("SELECT amount FROM stock", [], |row| row.get(0))?;
    tx.commit()?;
    Ok(amount)
}

pub(crate) fn write_stock(conn: &mut Connection, token: FencingToken, amount: i64) -> Result<(), FenceError> {
    let tx = conn.transaction_with_behavior(TransactionBehavior::Immediate)?;
    fence::admit(&tx, "stock", token)?;
    tx.execute("UPDATE stock SET amount = ?1", [amount])?;
    Ok(tx.commit()?)
}

pub(crate) fn stock(dir: &Path) -> rusqlite::Result<i64> {
    open(dir)?.query_row("SELECT amount FROM stock", [], |row| row.get(0))
}

fn database(dir: &Path) -> PathBuf {
    dir.join("shop.db")
}
