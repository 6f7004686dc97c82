//! A SQLite file: what else locks among the processes of a machine, and the bare transactions.

use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use rusqlite::{Connection, TransactionBehavior};

use crate::backend::Peer;
use crate::contestant::{Body, Contestant, Failure, Trips};

pub(crate) const FLOOR: &str = "2 x a transaction of one row";

const FILE: &str = "std File::lock, a file per name";

pub(crate) const PEERS: &[Peer] = &[Peer::new(FILE)];

/// A client of one of the peers.
pub(crate) fn peer(who: &str, path: &str, _ttl: Duration) -> Result<Arc<dyn Contestant>, Failure> {
    match who {
        FILE => {
            let folder = Path::new(path).parent().ok_or("the file lies in no folder")?;
            Ok(Arc::new(FileLock(folder.to_owned())))
        }
        other => Err(format!("there is no contestant {other} beside SQLite").into()),
    }
}

/// The lock of the system, on a thread for blocking work if it has to be waited for.
struct FileLock(PathBuf);

impl FileLock {
    fn open(&self, name: &str) -> Result<File, Failure> {
        let path = self.0.join(format!("{}.lock", name.replace('/', "-")));
        Ok(File::create(path)?)
    }
}

#[async_trait]
impl Contestant for FileLock {
    async fn section(&self, name: &str, body: Body) -> Result<(), Failure> {
        let file = self.open(name)?;
        let file = match file.try_lock() {
            Ok(()) => file,
            Err(TryLockError::WouldBlock) => tokio::task::spawn_blocking(|| file.lock().map(|()| file)).await??,
            Err(TryLockError::Error(error)) => return Err(error.into()),
        };
        body.await;
        file.unlock()?;
        Ok(())
    }
}

/// One connection to a file of its own, opened as fencelock opens its own.
struct Transactions(Mutex<Connection>);

pub(crate) fn trips(path: &str) -> Result<Arc<dyn Trips>, Failure> {
    let connection = Connection::open(format!("{path}.floor"))?;
    connection.busy_timeout(Duration::from_secs(5))?;
    connection.execute_batch(
        "PRAGMA journal_mode = WAL;
         PRAGMA synchronous = NORMAL;
         CREATE TABLE IF NOT EXISTS bench (name TEXT PRIMARY KEY, count INTEGER NOT NULL) WITHOUT ROWID",
    )?;
    Ok(Arc::new(Transactions(Mutex::new(connection))))
}

#[async_trait]
impl Trips for Transactions {
    async fn first(&self, name: &str) -> Result<(), Failure> {
        let mut connection = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        transaction
            .prepare_cached("INSERT INTO bench VALUES (?1, 1) ON CONFLICT DO UPDATE SET count = count + 1")?
            .execute([name])?;
        transaction.commit()?;
        Ok(())
    }

    async fn second(&self, name: &str) -> Result<(), Failure> {
        self.first(name).await
    }
}
