//! A lock that ends with a transaction of the user's own.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use lock_core::{Clock, FencingToken, LockError, LockName};
use tokio::time::sleep;
use tokio_postgres::Transaction;
use tokio_postgres::error::SqlState;

use crate::PostgresLock;
use crate::commands::{self, millis};
use crate::counter;
use crate::failure::Failure;
use crate::sessions::Sessions;

/// How far apart looks at a reservation are, which may be ended by force.
const LOOKS: Duration = Duration::from_millis(500);

/// What came of an attempt.
enum Locked {
    Yes,
    No,
    /// For so long.
    Reserved(Duration),
}

/// The statements of [`PostgresLock::in_transaction`], for other drivers.
///
/// In a transaction of your own, which must not be `REPEATABLE READ`: lock, then draw the token. Both end with the transaction;
/// the token stays drawn.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TransactionSql {
    /// Takes the lock with the key `$1`, a `bigint`, or waits for it. See [`PostgresLock::key`].
    pub lock: &'static str,
    /// Takes the lock with the key `$1` if it is free: yields true or false.
    pub try_lock: &'static str,
    /// Draws a token, once the lock is there. Null: nobody has put the counter right since the server started, or it is
    /// about to run into its ceiling. [`PostgresLock::prepare_tokens`] sees to both; then draw again.
    pub token: String,
    /// Whether the key `$1`, a `bigint`, is [reserved](lock_core::LockRequest::at_least): yields true or false. To be asked after the
    /// lock, in a transaction that is `READ COMMITTED`; if true, roll back to before the lock. Only where requests with `at_least` are made.
    pub reserved: String,
}

impl PostgresLock {
    /// Takes the lock on the transaction's own connection and draws a token. The lock has no lease and is not renewed. It is
    /// released
    ///
    /// - when the transaction ends, for whichever reason;
    /// - when a savepoint is rolled back that was set before the lock was taken. If `tx` is such a nested transaction, that is
    ///   its own rollback. The caller must not rely on the lock from then on.
    ///
    /// `PREPARE TRANSACTION` hands the lock to the prepared transaction. It keeps the lock, across restarts too, until it is
    /// committed or rolled back.
    ///
    /// The transaction must be `READ COMMITTED` or `SERIALIZABLE`. In `REPEATABLE READ` all statements see the data as it was when
    /// the first one began, which is before the lock is granted: a read would miss what the last holder has written, so such a
    /// transaction is refused. A `SERIALIZABLE` one sees old data just as well, but the server then ends it with error 40001
    /// instead of a commit, if all transactions that touch the data are `SERIALIZABLE`; repeat it, as always.
    ///
    /// Excludes whoever locks the same name by any client of the same database, namespace and schema, and is not granted while the name is
    /// [reserved](lock_core::LockRequest::at_least). Waits at most for `wait`, or for ever if there is none; with zero it takes the lock only if it is free. No setting of the
    /// transaction is changed.
    ///
    /// ```no_run
    /// # async fn example(lock: lock_postgres::PostgresLock, client: &mut lock_postgres::tokio_postgres::Client)
    /// # -> Result<(), Box<dyn std::error::Error>> {
    /// use std::time::Duration;
    ///
    /// let mut tx = client.transaction().await?;
    /// let token = lock.in_transaction(&mut tx, &"stock/10000".parse()?, Some(Duration::from_secs(2))).await?;
    /// tx.execute("UPDATE stock SET amount = amount - 1, fence = $1", &[&token.as_i64()]).await?;
    /// tx.commit().await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// [`LockError::TimedOut`] if it is still held after `wait`, [`LockError::Deadlock`] if the server found one: the
    /// transaction can be used as before in both cases, without the lock. [`LockError::Configuration`] if the transaction is
    /// `REPEATABLE READ`, in another database, or began (`SERIALIZABLE`) before the server's counter of tokens was put right.
    /// [`LockError::Unavailable`] if the server failed; roll back then.
    ///
    /// # Cancellation
    ///
    /// Dropping the future may leave the lock to the transaction. Roll back then.
    pub async fn in_transaction(
        &self,
        tx: &mut Transaction<'_>,
        name: &LockName,
        wait: Option<Duration>,
    ) -> Result<FencingToken, LockError> {
        self.lock_in(tx, name, wait).await.map_err(|error| error.of(name))
    }

    async fn lock_in(
        &self,
        tx: &mut Transaction<'_>,
        name: &LockName,
        wait: Option<Duration>,
    ) -> Result<FencingToken, LockError> {
        self.sessions().may_write()?;
        let started = Clock::system().now();
        check_isolation(tx).await?;
        let key = self.key(name);
        let left = |wait: Duration| wait.saturating_sub(Clock::system().now().since(started));
        loop {
            let locked = self.lock_once(tx, key, wait.map(left)).await;
            let rest = match locked.map_err(|failure| failure.explain("acquire"))? {
                Locked::Yes => break,
                Locked::Reserved(rest) if wait.is_none_or(|wait| !left(wait).is_zero()) => rest,
                _ => return Err(LockError::timed_out(name, Clock::system().now().since(started), None)),
            };
            let rest = wait.map_or(rest, |wait| rest.min(left(wait)));
            sleep(rest.min(LOOKS)).await;
        }
        let sql = self.transaction_sql().token;
        let seen = &self.sessions().seen;
        let before = seen.load(Ordering::Acquire);
        for _ in 0..2 {
            let drawn = tx.query_one(&sql, &[]).await.and_then(|row| row.try_get(0));
            let drawn: Option<i64> = drawn.map_err(|error| Failure::from(error).explain("acquire"))?;
            let Some(token) = drawn.and_then(|token| FencingToken::try_from(token).ok()) else {
                self.prepare_tokens().await?;
                continue;
            };
            if token.get() > before {
                seen.fetch_max(token.get(), Ordering::AcqRel);
                return Ok(token);
            }
        }
        Err(LockError::configuration(
            "no token can be drawn in this transaction: it is in another database than the locks, or it began before the \
             server's counter was put right; begin a new one",
        ))
    }

    /// The transaction is as before, unless the lock is there.
    async fn lock_once(&self, tx: &mut Transaction<'_>, key: i64, wait: Option<Duration>) -> Result<Locked, Failure> {
        let some_reserved = commands::some_reserved(&self.sessions().settings.schema);
        let mut savepoint = tx.savepoint("fencelock").await?;
        let outcome = match lock(&mut savepoint, key, wait, &some_reserved).await {
            Ok(None) => Ok(Locked::No),
            Ok(Some(false)) => Ok(Locked::Yes),
            // By another session: what this transaction sees may be of a time before the lock.
            Ok(Some(true)) => self.look_for_reservation(key).await,
            Err(error) if error.code() == Some(&SqlState::LOCK_NOT_AVAILABLE) => Ok(Locked::No),
            Err(error) => Err(error.into()),
        };
        match outcome {
            Ok(Locked::Yes) => savepoint.commit().await?,
            // With the savepoint go the limit, and the lock if it was granted all the same.
            _ => savepoint.rollback().await?,
        }
        outcome
    }

    async fn look_for_reservation(&self, key: i64) -> Result<Locked, Failure> {
        let sessions = Arc::clone(self.sessions());
        let reserved = self
            .sessions()
            .run("acquire", async move { sessions.reservation_at_lock(key).await });
        Ok(match reserved.await? {
            Some(reserved) => Locked::Reserved(reserved.holder.remaining.unwrap_or_default()),
            None => Locked::Yes,
        })
    }

    /// The statements of [`in_transaction`](Self::in_transaction), for other drivers.
    #[must_use]
    pub fn transaction_sql(&self) -> TransactionSql {
        TransactionSql {
            lock: "SELECT pg_advisory_xact_lock($1)",
            try_lock: "SELECT pg_try_advisory_xact_lock($1)",
            token: counter::draw_elsewhere(&self.sessions().settings.schema),
            reserved: commands::is_reserved(&self.sessions().settings.schema),
        }
    }

    /// Sees to it that [`TransactionSql::token`] has tokens to draw.
    ///
    /// # Errors
    ///
    /// As [`PostgresConfig::connect`](crate::PostgresConfig::connect).
    pub async fn prepare_tokens(&self) -> Result<(), LockError> {
        self.sessions().may_write()?;
        let sessions = Arc::clone(self.sessions());
        self.sessions()
            .run("preparing tokens", async move { prepare(&sessions).await })
            .await
    }
}

/// Refuses a transaction whose statements see the data as it was before the lock was granted, and whose commit does not fail
/// for it. The statement that waits for the lock takes the snapshot before it waits, so being the first does not help.
async fn check_isolation(tx: &Transaction<'_>) -> Result<(), LockError> {
    let asked = tx
        .query_one("SELECT current_setting('transaction_isolation')", &[])
        .await;
    let level: Result<String, _> = asked.and_then(|row| row.try_get(0));
    if level.map_err(|error| Failure::from(error).explain("acquire"))? != "repeatable read" {
        return Ok(());
    }
    Err(LockError::configuration(
        "the transaction is REPEATABLE READ, so it sees the data as it was before the lock is granted and could undo what the \
         last holder wrote; begin it with READ COMMITTED or SERIALIZABLE",
    ))
}

/// Takes the lock, or waits for it, and says whether any key may be reserved by then. `None`: it was not free in time.
async fn lock(
    savepoint: &mut Transaction<'_>,
    key: i64,
    wait: Option<Duration>,
    some_reserved: &str,
) -> Result<Option<bool>, tokio_postgres::Error> {
    if wait.is_some_and(|wait| wait.is_zero()) {
        let sql = format!("SELECT CASE WHEN pg_try_advisory_xact_lock($1) THEN {some_reserved} END");
        return savepoint.query_one(&sql, &[&key]).await?.try_get(0);
    }
    let row = savepoint
        .query_one("SELECT current_setting('lock_timeout')", &[])
        .await?;
    let before: String = row.try_get(0)?;
    // Zero is no limit.
    let limit = wait.map_or(0, |wait| millis(wait).clamp(1, i32::MAX as u64));
    savepoint
        .batch_execute(&format!("SET LOCAL lock_timeout = {limit}"))
        .await?;
    let sql = format!("SELECT CASE WHEN pg_advisory_xact_lock($1)::text = '' THEN {some_reserved} END");
    let some_reserved = savepoint.query_one(&sql, &[&key]).await?.try_get(0)?;
    savepoint
        .batch_execute(&format!("SET LOCAL lock_timeout = '{before}'"))
        .await?;
    Ok(some_reserved)
}

async fn prepare(sessions: &Arc<Sessions>) -> Result<(), Failure> {
    let session = sessions.any().await?;
    let prepared = async {
        let drawn = sessions.draw(&session).await?;
        session
            .ask(&counter::raise_ceiling(&sessions.settings.schema, drawn.token.get()))
            .await
    };
    let prepared = prepared.await;
    sessions.spare(session);
    prepared.map(drop)
}
