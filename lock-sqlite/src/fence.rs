//! The resource's side for data in SQLite: what refuses a stale holder.
//!
//! The data may lie in any SQLite database of yours, whichever backend the lock itself is on. The rule is that of
//! [`lock_core::fence`].
//!
//! Either the row that is protected carries its own mark, and every write of it says so:
//!
//! ```sql
//! UPDATE stock SET amount = ?2, fence = ?3 WHERE id = ?1 AND fence <= ?3
//! ```
//!
//! No row changed means that the token is stale (or the row is missing). That is all that a blind write needs. A
//! holder that reads before it writes, or protects more than a row, admits the token *first*, in the same transaction:
//!
//! ```
//! use lock_core::FencingToken;
//! use lock_sqlite::fence::{self, FenceError};
//! use lock_sqlite::rusqlite::{Connection, Transaction, TransactionBehavior};
//!
//! let mut conn = Connection::open_in_memory()?;
//! conn.execute_batch(fence::CREATE_SQL)?;
//! conn.execute_batch("CREATE TABLE stock (amount INTEGER); INSERT INTO stock VALUES (100)")?;
//!
//! let mut sell = |token: FencingToken| -> Result<(), FenceError> {
//!     let tx = conn.transaction_with_behavior(TransactionBehavior::Immediate)?;
//!     fence::admit(&tx, "stock/10000", token)?;
//!     let amount: i64 = tx.query_row("SELECT amount FROM stock", [], |row| row.get(0))?;
//!     tx.execute("UPDATE stock SET amount = ?1", [amount - 1])?;
//!     Ok(tx.commit()?)
//! };
//!
//! sell(FencingToken::new(8)?)?;
//! let refused = sell(FencingToken::new(7)?);
//! assert!(matches!(refused, Err(FenceError::Stale(_))));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Holders of a [shared](lock_core::LockRequest::shared) lock are admitted by [`admit_shared`], which keeps a mark of its own: they do not refuse
//! each other, a writer refuses older readers, and a reader refuses older writers.
//!
//! With another driver, execute [`CREATE_SQL`] once and [`ADMIT_SQL`] or [`ADMIT_SHARED_SQL`] at the start of each transaction.
//!
//! The marks are in the `main` database of the connection, whatever temporary tables and attached databases there are. All
//! writers must open the same file as `main`.

use lock_core::FencingToken;
use lock_core::fence::StaleToken;
use rusqlite::types::Value;
use rusqlite::{OptionalExtension, Transaction};

/// Makes the table of marks where it is missing.
pub const CREATE_SQL: &str = "CREATE TABLE IF NOT EXISTS main.fencelock_fence \
    (resource TEXT NOT NULL PRIMARY KEY, mark INTEGER NOT NULL DEFAULT 0, shared_mark INTEGER NOT NULL DEFAULT 0) WITHOUT ROWID";

/// Admits token `?2` to resource `?1`: yields one row, or none if the token is stale.
///
/// It writes, so from then on no other connection can come between it and the end of the transaction.
pub const ADMIT_SQL: &str = "INSERT INTO main.fencelock_fence (resource, mark) VALUES (?1, ?2) \
    ON CONFLICT (resource) DO UPDATE SET mark = excluded.mark WHERE max(mark, shared_mark) <= excluded.mark RETURNING mark";

/// As [`ADMIT_SQL`], for a holder that shares the lock.
pub const ADMIT_SHARED_SQL: &str = "INSERT INTO main.fencelock_fence (resource, shared_mark) VALUES (?1, ?2) \
    ON CONFLICT (resource) DO UPDATE SET shared_mark = max(shared_mark, excluded.shared_mark) \
    WHERE mark <= excluded.shared_mark AND typeof(shared_mark) = 'integer' RETURNING shared_mark";

/// Reads the mark of resource `?1`: yields no row if no token was ever admitted, and 0 if only holders were that share the lock.
pub const MARK_SQL: &str = "SELECT mark FROM main.fencelock_fence WHERE resource = ?1";

/// Why a holder was not admitted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FenceError {
    /// A later holder has been here. Roll back, and lock again.
    #[error(transparent)]
    Stale(#[from] StaleToken),
    /// The database failed; whether the holder is stale is not known.
    #[error(transparent)]
    Sqlite(#[from] rusqlite::Error),
    /// The mark is not a token: another program wrote to the table.
    #[error("the mark of {resource} is not a fencing token; repair the table fencelock_fence")]
    Mark {
        /// Whose mark it is.
        resource: String,
    },
}

/// Raises the mark of `resource` to `token` within the transaction, so that no older holder can write any more. Call it
/// before the first read; best in an `IMMEDIATE` transaction, which cannot fail for having started too early.
///
/// # Errors
///
/// [`FenceError::Stale`] if a later holder has been here; roll back then. [`FenceError::Sqlite`] if the database failed.
pub fn admit(tx: &Transaction<'_>, resource: &str, token: FencingToken) -> Result<(), FenceError> {
    admit_by(ADMIT_SQL, "max(mark, shared_mark)", tx, resource, token)
}

/// As [`admit`], for a holder that shares the lock: refused below the mark of those that write, and refuses older ones of them.
///
/// # Errors
///
/// As [`admit`].
pub fn admit_shared(tx: &Transaction<'_>, resource: &str, token: FencingToken) -> Result<(), FenceError> {
    admit_by(ADMIT_SHARED_SQL, "mark", tx, resource, token)
}

/// The highest token that `resource` has admitted of holders that do not share the lock.
///
/// # Errors
///
/// [`FenceError::Sqlite`] if the database failed.
pub fn mark(tx: &Transaction<'_>, resource: &str) -> Result<Option<FencingToken>, FenceError> {
    read(tx, "mark", resource)
}

fn admit_by(
    sql: &str,
    refusing: &str,
    tx: &Transaction<'_>,
    resource: &str,
    token: FencingToken,
) -> Result<(), FenceError> {
    if tx.prepare_cached(sql)?.exists((resource, token.as_i64()))? {
        return Ok(());
    }
    match read(tx, refusing, resource)? {
        Some(mark) if token < mark => Err(StaleToken::new(resource, token, mark).into()),
        _ => Err(nonsense(resource)),
    }
}

fn read(tx: &Transaction<'_>, mark: &str, resource: &str) -> Result<Option<FencingToken>, FenceError> {
    let sql = MARK_SQL.replacen("mark", mark, 1);
    let mark = tx.prepare_cached(&sql)?.query_row([resource], |row| row.get(0));
    match mark.optional()? {
        None | Some(Value::Integer(0)) => Ok(None),
        Some(Value::Integer(mark)) => FencingToken::try_from(mark).map(Some).map_err(|_| nonsense(resource)),
        Some(_) => Err(nonsense(resource)),
    }
}

fn nonsense(resource: &str) -> FenceError {
    FenceError::Mark {
        resource: resource.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rusqlite::Connection;

    fn token(value: u64) -> FencingToken {
        FencingToken::new(value).unwrap()
    }

    fn database() -> Connection {
        let conn = Connection::open_in_memory().unwrap();
        conn.execute_batch(CREATE_SQL).unwrap();
        conn.execute_batch(CREATE_SQL).unwrap();
        conn
    }

    #[test]
    fn the_mark_is_that_of_holders_that_do_not_share_and_a_refusal_names_the_one_that_refused() {
        let mut conn = database();
        let tx = conn.transaction().unwrap();
        admit_shared(&tx, "r", token(7)).unwrap();
        admit_shared(&tx, "r", token(5)).unwrap();
        assert_eq!(mark(&tx, "r").unwrap(), None);
        assert!(matches!(admit(&tx, "r", token(6)), Err(FenceError::Stale(stale)) if stale.mark == token(7)));
        admit(&tx, "r", token(9)).unwrap();
        assert_eq!(mark(&tx, "r").unwrap(), Some(token(9)));
        assert!(matches!(admit_shared(&tx, "r", token(8)), Err(FenceError::Stale(stale)) if stale.mark == token(9)));
    }

    #[test]
    fn a_temporary_table_of_that_name_is_not_mistaken_for_the_marks() {
        let dir = tempfile::tempdir().unwrap();
        let open = || Connection::open(dir.path().join("data.db")).unwrap();
        let (mut one, mut other) = (open(), open());
        one.execute_batch(CREATE_SQL).unwrap();
        other
            .execute_batch(&CREATE_SQL.replace("TABLE IF NOT EXISTS main.", "TEMPORARY TABLE "))
            .unwrap();
        let tx = one.transaction().unwrap();
        admit(&tx, "r", token(8)).unwrap();
        tx.commit().unwrap();
        let stale = admit(&other.transaction().unwrap(), "r", token(7));
        assert!(matches!(stale, Err(FenceError::Stale(_))), "{stale:?}");
    }

    #[test]
    fn nonsense_in_the_table_admits_nobody() {
        let mut conn = database();
        let tx = conn.transaction().unwrap();
        for nonsense in [Value::Integer(i64::MAX), Value::Text("x".into()), Value::Blob(vec![1])] {
            for column in ["mark", "shared_mark"] {
                let sql = format!("INSERT OR REPLACE INTO fencelock_fence (resource, {column}) VALUES ('r', ?1)");
                tx.execute(&sql, [&nonsense]).unwrap();
                let refused = admit(&tx, "r", token(1));
                assert!(matches!(refused, Err(FenceError::Mark { .. })), "{column}: {refused:?}");
            }
            let shared = "INSERT OR REPLACE INTO fencelock_fence (resource, mark) VALUES ('r', ?1)";
            tx.execute(shared, [&nonsense]).unwrap();
            let refused = admit_shared(&tx, "r", token(1));
            assert!(matches!(refused, Err(FenceError::Mark { .. })), "{refused:?}");
        }
    }
}
