//! What the suite needs to know of the SQLite backend.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use conformance_tests::{Fault, Harness, Injection, Namespace, Resource};
use lock_core::{DistributedLock, FencingToken, LockError, OwnerId};
use lock_sqlite::SqliteLock;
use lock_sqlite::fence::{self, FenceError};
use lock_sqlite::rusqlite::{Connection, Transaction, TransactionBehavior};

/// A database per namespace.
pub(crate) struct SqliteHarness;

#[async_trait]
impl Harness for SqliteHarness {
    fn name(&self) -> &str {
        "sqlite"
    }

    fn known_skips(&self) -> Option<&str> {
        Some(include_str!("skips/sqlite.txt"))
    }

    async fn client(&self, namespace: &Namespace) -> Result<Arc<dyn DistributedLock>, LockError> {
        Ok(Arc::new(SqliteLock::open(database(namespace)).await?))
    }

    async fn leftovers(&self, namespace: &Namespace) -> Result<Option<Vec<String>>, LockError> {
        rows(namespace).map(Some).map_err(failed)
    }

    async fn inject(&self, namespace: &Namespace, fault: &Fault) -> Result<Injection, LockError> {
        match fault {
            Fault::Expire(name) => change(
                namespace,
                "UPDATE lock SET expires = 0 WHERE name = ?1",
                &[name.as_str()],
            ),
            Fault::Delete(name) => change(namespace, "DELETE FROM lock WHERE name = ?1", &[name.as_str()]),
            Fault::SetBackCounter(_) => change(namespace, "UPDATE counter SET token = 5", &[]),
            Fault::Steal(name) => {
                let stranger = OwnerId::random().to_string();
                change(namespace, "UPDATE counter SET token = token + 1", &[]).and_then(|()| {
                    let steal = "UPDATE lock SET owner = ?1, client = ?1, token = (SELECT token FROM counter) \
                                 WHERE name = ?2";
                    change(namespace, steal, &[&stranger, name.as_str()])
                })
            }
            Fault::Freeze(time) => freeze(namespace, *time),
            // Where a directory is, no file can be.
            Fault::Revoke => {
                remove(namespace)?;
                let made = std::fs::create_dir(database(namespace));
                return made.map(|()| Injection::Done).map_err(blocked);
            }
            Fault::Permit => {
                let removed = std::fs::remove_dir(database(namespace));
                return removed.map(|()| Injection::Done).map_err(blocked);
            }
            Fault::RestartWithoutData => return remove(namespace).map(|()| Injection::Done),
            Fault::Copy => copy(namespace),
            Fault::Restore => return restore(namespace).map(|()| Injection::Done),
            _ => return Ok(Injection::NotPossible),
        }
        .map(|()| Injection::Done)
        .map_err(failed)
    }

    async fn resource(&self, namespace: &Namespace, resource: &str) -> Result<Option<Arc<dyn Resource>>, LockError> {
        let database = namespace.folder().join("resources.db");
        Ok(Some(Arc::new(FencedRow::open(&database, resource).map_err(failed)?)))
    }

    // Every operation crosses to the thread that works the file and back.
    fn fewest_polls(&self) -> usize {
        2
    }

    fn connects_without_runtime(&self) -> bool {
        true
    }
}

fn database(namespace: &Namespace) -> PathBuf {
    namespace.folder().join("locks.db")
}

fn open(namespace: &Namespace) -> lock_sqlite::rusqlite::Result<Connection> {
    let connection = Connection::open(database(namespace))?;
    connection.busy_timeout(Duration::from_secs(10))?;
    Ok(connection)
}

/// Every row, also those that do not count any more.
fn rows(namespace: &Namespace) -> lock_sqlite::rusqlite::Result<Vec<String>> {
    let connection = open(namespace)?;
    let mut statement = connection.prepare("SELECT name, owner, label FROM lock")?;
    let rows = statement.query_map([], |row| {
        let (name, owner, label): (String, String, Option<String>) = (row.get(0)?, row.get(1)?, row.get(2)?);
        Ok(format!("{name:?} held by {owner} ({})", label.unwrap_or_default()))
    })?;
    rows.collect()
}

fn change(namespace: &Namespace, sql: &str, parameters: &[&str]) -> lock_sqlite::rusqlite::Result<()> {
    let mut connection = open(namespace)?;
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    transaction.execute(sql, lock_sqlite::rusqlite::params_from_iter(parameters))?;
    transaction.commit()
}

/// Stops every writer, as a process does that is stopped inside a transaction.
fn freeze(namespace: &Namespace, time: Duration) -> lock_sqlite::rusqlite::Result<()> {
    let connection = open(namespace)?;
    connection.execute_batch("BEGIN IMMEDIATE")?;
    std::thread::spawn(move || {
        std::thread::sleep(time);
        drop(connection);
    });
    Ok(())
}

fn remove(namespace: &Namespace) -> Result<(), LockError> {
    for end in ["", "-wal", "-shm"] {
        let mut file = database(namespace).into_os_string();
        file.push(end);
        match std::fs::remove_file(file) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(LockError::failed("removing the database", error));
            }
            _ => {}
        }
    }
    Ok(())
}

fn copy(namespace: &Namespace) -> lock_sqlite::rusqlite::Result<()> {
    let path = namespace.folder().join("copy.db").to_string_lossy().into_owned();
    open(namespace)?.execute("VACUUM INTO ?1", [path]).map(drop)
}

fn restore(namespace: &Namespace) -> Result<(), LockError> {
    remove(namespace)?;
    std::fs::rename(namespace.folder().join("copy.db"), database(namespace))
        .map_err(|error| LockError::failed("restoring the database", error))
}

/// A number in a table of a user's own database, protected by the fence that the backend ships.
struct FencedRow {
    connection: Mutex<Connection>,
    resource: String,
}

impl FencedRow {
    fn open(database: &Path, resource: &str) -> lock_sqlite::rusqlite::Result<Self> {
        let connection = Connection::open(database)?;
        // Many write at once here, and SQLite's own pauses are made for few.
        connection.busy_handler(Some(|tries| {
            std::thread::sleep(Duration::from_micros(200));
            tries < 100_000
        }))?;
        connection.execute_batch("PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL")?;
        connection.execute_batch(fence::CREATE_SQL)?;
        connection.execute_batch("CREATE TABLE IF NOT EXISTS number (resource TEXT PRIMARY KEY, value INTEGER)")?;
        let row = "INSERT INTO number VALUES (?1, 0) ON CONFLICT DO NOTHING";
        connection.execute(row, [resource])?;
        Ok(Self {
            connection: Mutex::new(connection),
            resource: resource.to_owned(),
        })
    }

    fn connection(&self) -> MutexGuard<'_, Connection> {
        self.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Admits the token and does `work` in one transaction.
    fn admitted(
        &self,
        admit: impl FnOnce(&Transaction<'_>, &str, FencingToken) -> Result<(), FenceError>,
        token: FencingToken,
        work: impl FnOnce(&Transaction<'_>) -> lock_sqlite::rusqlite::Result<()>,
    ) -> Result<bool, LockError> {
        let mut connection = self.connection();
        let transaction = connection
            .transaction_with_behavior(TransactionBehavior::Immediate)
            .map_err(failed)?;
        match admit(&transaction, &self.resource, token) {
            Ok(()) => {}
            Err(FenceError::Stale(_)) => return Ok(false),
            Err(error) => return Err(LockError::failed("admitting a token", error)),
        }
        work(&transaction).and_then(|()| transaction.commit()).map_err(failed)?;
        Ok(true)
    }
}

#[async_trait]
impl Resource for FencedRow {
    async fn admit(&self, token: FencingToken) -> Result<bool, LockError> {
        self.admitted(fence::admit, token, |_| Ok(()))
    }

    async fn admit_shared(&self, token: FencingToken) -> Result<bool, LockError> {
        self.admitted(fence::admit_shared, token, |_| Ok(()))
    }

    async fn read(&self) -> Result<i64, LockError> {
        let query = "SELECT value FROM number WHERE resource = ?1";
        let number = self.connection().query_row(query, [&self.resource], |row| row.get(0));
        number.map_err(failed)
    }

    async fn write(&self, token: FencingToken, number: i64) -> Result<bool, LockError> {
        self.admitted(fence::admit, token, |transaction| {
            let update = "UPDATE number SET value = ?1 WHERE resource = ?2";
            transaction.execute(update, (number, &self.resource)).map(drop)
        })
    }
}

fn blocked(error: std::io::Error) -> LockError {
    LockError::failed("putting a directory in the place of the database", error)
}

fn failed(error: lock_sqlite::rusqlite::Error) -> LockError {
    LockError::failed("looking at the database", error)
}
