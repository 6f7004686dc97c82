//! SQLite: the file locks of the system, and bare transactions instead of round trips.

use std::fs::{File, TryLockError};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rusqlite::{Connection, TransactionBehavior};

use crate::contestant::{Contestant, Result, contestant, round_trips};

pub(crate) const FLOOR: &str = "2 x a transaction of one row";
pub(crate) const PEERS: &[&str] = &["std File::lock, a file per name"];

pub(crate) fn connect(who: &str, url: &str) -> Result<Contestant> {
    let path = url.strip_prefix("sqlite:").unwrap_or(url);
    if who == FLOOR {
        let database = Arc::new(Mutex::new(open(&format!("{path}.floor"))?));
        return Ok(round_trips(database, |database, name, _| async move {
            let mut database = database.lock().unwrap_or_else(PoisonError::into_inner);
            let transaction = database.transaction_with_behavior(TransactionBehavior::Immediate)?;
            transaction
                .prepare_cached("INSERT INTO bench VALUES (?1, 1) ON CONFLICT DO UPDATE SET count = count + 1")?
                .execute([name])?;
            Ok(transaction.commit()?)
        }));
    }
    let folder = Path::new(path).parent().ok_or("the database lies in no folder")?;
    Ok(contestant(folder.to_owned(), |folder, name, body| async move {
        let file = File::create(folder.join(format!("{name}.lock")))?;
        let file = match file.try_lock() {
            Ok(()) => file,
            Err(TryLockError::WouldBlock) => tokio::task::spawn_blocking(|| file.lock().map(|()| file)).await??,
            Err(TryLockError::Error(error)) => return Err(error.into()),
        };
        body.await;
        Ok(file.unlock()?)
    }))
}

/// A database of its own, opened as fencelock opens its database.
fn open(path: &str) -> Result<Connection> {
    let database = Connection::open(path)?;
    database.busy_timeout(Duration::from_secs(5))?;
    database.execute_batch(
        "PRAGMA journal_mode = WAL;
         PRAGMA synchronous = NORMAL;
         CREATE TABLE IF NOT EXISTS bench (name TEXT PRIMARY KEY, count INTEGER NOT NULL) WITHOUT ROWID",
    )?;
    Ok(database)
}
