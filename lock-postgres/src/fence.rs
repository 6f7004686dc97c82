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
//!
//! # Where the marks are
//!
//! All writers of a resource must use the same table of marks. The table is `public.fencelock_fence`, whatever the
//! `search_path` of the role, the database or the session is, and whatever temporary tables there are. For a table in another
//! schema, use a [`FenceTable`] with that schema in every program that writes.

use lock_core::fence::StaleToken;
use lock_core::{FencingToken, LockError};
use tokio_postgres::Transaction;

use crate::schema::Schema;

/// The statements for the table of marks in one schema, which is written as SQL. `search_path` must not choose it.
macro_rules! sql {
    (create, $schema:expr) => {
        concat!(
            "CREATE TABLE IF NOT EXISTS ",
            $schema,
            ".fencelock_fence (resource text PRIMARY KEY, mark bigint NOT NULL)"
        )
    };
    (admit, $schema:expr) => {
        concat!(
            "INSERT INTO ",
            $schema,
            ".fencelock_fence AS f (resource, mark) VALUES ($1, $2) ON CONFLICT (resource) DO UPDATE SET mark = \
             excluded.mark WHERE f.mark <= excluded.mark RETURNING mark"
        )
    };
    (mark, $schema:expr) => {
        concat!("SELECT mark FROM ", $schema, ".fencelock_fence WHERE resource = $1")
    };
}

/// Makes the table of marks, `public.fencelock_fence`, if it is missing. The role needs `CREATE` on the schema; to use the table
/// it needs `SELECT`, `INSERT` and `UPDATE` on it.
pub const CREATE_SQL: &str = sql!(create, "public");

/// Admits token `$2`, a `bigint`, to resource `$1`, a `text`: yields one row, or none if the token is stale.
///
/// It locks the row of the mark, so nobody can come between it and the end of the transaction.
pub const ADMIT_SQL: &str = sql!(admit, "public");

/// Reads the mark of resource `$1`: yields no row if no token was ever admitted.
pub const MARK_SQL: &str = sql!(mark, "public");

/// The table of marks in a schema other than `public`.
///
/// ```
/// use lock_postgres::fence::FenceTable;
///
/// let marks = FenceTable::in_schema("shop")?;
/// assert!(marks.create_sql().starts_with(r#"CREATE TABLE IF NOT EXISTS "shop".fencelock_fence"#));
/// # Ok::<(), lock_core::LockError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FenceTable {
    create: String,
    admit: String,
    mark: String,
}

impl FenceTable {
    /// The table `fencelock_fence` in that schema. The schema must exist already; its name is quoted, so it is taken as it is.
    ///
    /// # Errors
    ///
    /// [`LockError::Configuration`] if Postgres allows no schema of that name.
    pub fn in_schema(schema: &str) -> Result<Self, LockError> {
        const HERE: &str = "{schema}";
        let schema = Schema::new(schema)?.quoted();
        Ok(Self {
            create: sql!(create, "{schema}").replace(HERE, &schema),
            admit: sql!(admit, "{schema}").replace(HERE, &schema),
            mark: sql!(mark, "{schema}").replace(HERE, &schema),
        })
    }

    /// [`CREATE_SQL`] for this table.
    #[must_use]
    pub fn create_sql(&self) -> &str {
        &self.create
    }

    /// [`ADMIT_SQL`] for this table.
    #[must_use]
    pub fn admit_sql(&self) -> &str {
        &self.admit
    }

    /// [`MARK_SQL`] for this table.
    #[must_use]
    pub fn mark_sql(&self) -> &str {
        &self.mark
    }

    /// [`admit`] with this table.
    ///
    /// # Errors
    ///
    /// As [`admit`].
    ///
    /// # Cancellation
    ///
    /// As [`admit`].
    pub async fn admit(&self, tx: &Transaction<'_>, resource: &str, token: FencingToken) -> Result<(), FenceError> {
        admit_by(tx, (&self.admit, &self.mark), resource, token).await
    }

    /// [`mark`] with this table.
    ///
    /// # Errors
    ///
    /// As [`mark`].
    pub async fn mark(&self, tx: &Transaction<'_>, resource: &str) -> Result<Option<FencingToken>, FenceError> {
        mark_by(tx, &self.mark, resource).await
    }
}

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
    admit_by(tx, (ADMIT_SQL, MARK_SQL), resource, token).await
}

async fn admit_by(
    tx: &Transaction<'_>,
    (admit, mark): (&str, &str),
    resource: &str,
    token: FencingToken,
) -> Result<(), FenceError> {
    if tx.query_opt(admit, &[&resource, &token.as_i64()]).await?.is_some() {
        return Ok(());
    }
    match mark_by(tx, mark, resource).await? {
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
    mark_by(tx, MARK_SQL, resource).await
}

async fn mark_by(tx: &Transaction<'_>, sql: &str, resource: &str) -> Result<Option<FencingToken>, FenceError> {
    let row = tx.query_opt(sql, &[&resource]).await?;
    let mark = row.map(|row| row.try_get::<_, i64>(0)).transpose()?;
    mark.map(FencingToken::try_from)
        .transpose()
        .map_err(|_| FenceError::Mark {
            resource: resource.to_owned(),
        })
}
