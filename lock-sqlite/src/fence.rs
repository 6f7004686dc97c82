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
//! No row changed means that the token is stale (or the row is missing). That is all that a blind write needs. Whoever
//! reads before it writes, or protects more than a row, admits the token *first*, in the same transaction:
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
//! With another driver, execute [`CREATE_SQL`] once and [`ADMIT_SQL`] at the start of each transaction.
//!
//! The marks are in the `main` database of the connection, whatever temporary tables and attached databases there are. All
//! writers must open the same file as `main`.

use lock_core::FencingToken;
use lock_core::fence::StaleToken;
use rusqlite::types::Value;
use rusqlite::{OptionalExtension, Transaction};

/// Makes the table of marks where it is missing.
pub const CREATE_SQL: &str = "CREATE TABLE IF NOT EXISTS main.fencelock_fence \
    (resource TEXT NOT NULL PRIMARY KEY, mark INTEGER NOT NULL) WITHOUT ROWID";

/// Admits token `?2` to resource `?1`: yields one row, or none if the token is stale.
///
/// It writes, so from then on no other connection can come between it and the end of the transaction.
pub const ADMIT_SQL: &str = "INSERT INTO main.fencelock_fence (resource, mark) VALUES (?1, ?2) \
    ON CONFLICT (resource) DO UPDATE SET mark = excluded.mark WHERE mark <= excluded.mark RETURNING mark";

/// Reads the mark of resource `?1`: yields no row if no token was ever admitted.
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
    /// The mark is not a token: somebody else wrote to the table.
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
    let admitted = tx.prepare_cached(ADMIT_SQL)?.exists((resource, token.as_i64()))?;
    if admitted {
        return Ok(());
    }
    match mark(tx, resource)? {
        Some(mark) => Err(StaleToken::new(resource, token, mark).into()),
        None => Err(FenceError::Mark {
            resource: resource.to_owned(),
        }),
    }
}

/// The highest token that `resource` has admitted.
///
/// # Errors
///
/// [`FenceError::Sqlite`] if the database failed.
pub fn mark(tx: &Transaction<'_>, resource: &str) -> Result<Option<FencingToken>, FenceError> {
    let mark: Option<Value> = tx
        .prepare_cached(MARK_SQL)?
        .query_row([resource], |row| row.get(0))
        .optional()?;
    let Some(mark) = mark else { return Ok(None) };
    let token = match mark {
        Value::Integer(mark) => FencingToken::try_from(mark).ok(),
        _ => None,
    };
    token.map(Some).ok_or_else(|| FenceError::Mark {
        resource: resource.to_owned(),
    })
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
    fn an_equal_token_is_admitted_again_and_a_lower_one_is_refused() {
        let mut conn = database();
        for value in [5, 5, 9] {
            let tx = conn.transaction().unwrap();
            admit(&tx, "r", token(value)).unwrap();
            tx.commit().unwrap();
        }
        let tx = conn.transaction().unwrap();
        let Err(FenceError::Stale(stale)) = admit(&tx, "r", token(8)) else {
            panic!("a stale token was admitted");
        };
        assert_eq!(stale, StaleToken::new("r", token(8), token(9)));
        admit(&tx, "another", token(1)).unwrap();
        assert_eq!(mark(&tx, "r").unwrap(), Some(token(9)));
    }

    #[test]
    fn between_admission_and_commit_nobody_else_writes() {
        let dir = tempfile::tempdir().unwrap();
        let open = || Connection::open(dir.path().join("data.db")).unwrap();
        let (mut one, mut other) = (open(), open());
        one.execute_batch(CREATE_SQL).unwrap();
        other.busy_timeout(std::time::Duration::ZERO).unwrap();
        let tx = one.transaction().unwrap();
        admit(&tx, "r", token(5)).unwrap();
        let late = other.transaction().unwrap();
        let busy = admit(&late, "r", token(6));
        assert!(matches!(busy, Err(FenceError::Sqlite(_))), "{busy:?}");
        drop(late);
        tx.commit().unwrap();
        admit(&other.transaction().unwrap(), "r", token(6)).unwrap();
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
        let nonsense = [Value::Integer(i64::MAX), Value::Text("x".into()), Value::Blob(vec![1])];
        for (resource, mark) in nonsense.into_iter().enumerate() {
            let row = (resource.to_string(), mark);
            conn.execute("INSERT INTO fencelock_fence VALUES (?1, ?2)", row)
                .unwrap();
            let tx = conn.transaction().unwrap();
            let refused = admit(&tx, &resource.to_string(), token(1));
            assert!(matches!(refused, Err(FenceError::Mark { .. })), "{refused:?}");
        }
    }

    #[test]
    fn the_recipe_for_a_row_with_its_own_mark_refuses_the_stale() {
        let conn = Connection::open_in_memory().unwrap();
        conn.execute_batch(
            "CREATE TABLE stock (id INTEGER, amount INTEGER, fence INTEGER NOT NULL); INSERT INTO stock VALUES (1, 5, 0)",
        )
        .unwrap();
        let write = |amount: i64, token: i64| {
            conn.execute(
                "UPDATE stock SET amount = ?2, fence = ?3 WHERE id = ?1 AND fence <= ?3",
                (1, amount, token),
            )
            .unwrap()
        };
        assert_eq!([write(4, 7), write(3, 7), write(2, 6), write(1, 8)], [1, 1, 0, 1]);
    }
}
