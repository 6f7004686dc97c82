//! The resource's side for data in Postgres: what refuses a stale holder.
//!
//! The data may lie in any Postgres database of yours, whichever backend the lock itself is on. The rule is that of
//! [`lock_core::fence`].
//!
//! Either the row that is protected carries its own mark, and every write of it says so:
//!
//! ```sql
//! UPDATE stock SET amount = $2, fence = $3 WHERE id = $1 AND fence <= $3
//! ```
//!
//! No row changed means that the token is stale (or the row is missing). That is all that a blind write needs. Whoever
//! reads before it writes, or protects more than a row, admits the token *first*, in the same transaction:
//!
//! ```no_run
//! use lock_core::FencingToken;
//! use lock_postgres::fence::{self, FenceError};
//! use lock_postgres::tokio_postgres::Client;
//!
//! async fn sell(client: &mut Client, token: FencingToken) -> Result<(), FenceError> {
//!     let tx = client.transaction().await?;
//!     fence::admit(&tx, "stock/10000", token).await?;
//!     let amount: i32 = tx.query_one("SELECT amount FROM stock", &[]).await?.get(0);
//!     tx.execute("UPDATE stock SET amount = $1", &[&(amount - 1)]).await?;
//!     Ok(tx.commit().await?)
//! }
//! ```
//!
//! The row of the mark stays locked until the transaction ends, so no older holder can come in between. In `REPEATABLE READ`
//! and `SERIALIZABLE` the server may answer that the access could not be serialized; repeat the transaction then, as always.
//!
//! With another driver, execute [`CREATE_SQL`] once and [`ADMIT_SQL`] at the start of each transaction.

use lock_core::FencingToken;
use lock_core::fence::StaleToken;
use tokio_postgres::Transaction;

/// Makes the table of marks where it is missing.
pub const CREATE_SQL: &str =
    "CREATE TABLE IF NOT EXISTS fencelock_fence (resource text PRIMARY KEY, mark bigint NOT NULL)";

/// Admits token `$2`, a `bigint`, to resource `$1`, a `text`: yields one row, or none if the token is stale.
///
/// It locks the row of the mark, so nobody can come between it and the end of the transaction.
pub const ADMIT_SQL: &str = "INSERT INTO fencelock_fence AS f (resource, mark) VALUES ($1, $2) \
    ON CONFLICT (resource) DO UPDATE SET mark = excluded.mark WHERE f.mark <= excluded.mark RETURNING mark";

/// Reads the mark of resource `$1`: yields no row if no token was ever admitted.
pub const MARK_SQL: &str = "SELECT mark FROM fencelock_fence WHERE resource = $1";

/// Why a holder was not admitted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FenceError {
    /// A later holder has been here. Roll back, and lock again.
    #[error(transparent)]
    Stale(#[from] StaleToken),
    /// The database failed; whether the holder is stale is not known.
    #[error(transparent)]
    Postgres(#[from] tokio_postgres::Error),
    /// The mark is not a token: somebody else wrote to the table.
    #[error("the mark of {resource} is not a fencing token; repair the table fencelock_fence")]
    Mark {
        /// Whose mark it is.
        resource: String,
    },
}

/// Raises the mark of `resource` to `token` within the transaction, so that no older holder can write any more. Call it
/// before the first read.
///
/// # Errors
///
/// [`FenceError::Stale`] if a later holder has been here; roll back then. [`FenceError::Postgres`] if the database failed.
///
/// # Cancellation
///
/// Dropping the future may leave the mark raised within the transaction.
pub async fn admit(tx: &Transaction<'_>, resource: &str, token: FencingToken) -> Result<(), FenceError> {
    if tx.query_opt(ADMIT_SQL, &[&resource, &token.as_i64()]).await?.is_some() {
        return Ok(());
    }
    match mark(tx, resource).await? {
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
/// [`FenceError::Postgres`] if the database failed.
pub async fn mark(tx: &Transaction<'_>, resource: &str) -> Result<Option<FencingToken>, FenceError> {
    let row = tx.query_opt(MARK_SQL, &[&resource]).await?;
    let mark = row.map(|row| row.try_get::<_, i64>(0)).transpose()?;
    mark.map(FencingToken::try_from)
        .transpose()
        .map_err(|_| FenceError::Mark {
            resource: resource.to_owned(),
        })
}
