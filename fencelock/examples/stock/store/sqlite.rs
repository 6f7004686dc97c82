//! The store in an SQLite file beside that of the locks.

use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use fencelock::FencingToken;
use fencelock::sqlite::SqliteConfig;
use fencelock::sqlite::fence::{self, FenceError};
use fencelock::sqlite::rusqlite::{self, Connection, OptionalExtension, Transaction, TransactionBehavior};

use super::{Books, Sale, Store, StoreError};
use crate::Outcome;
use crate::crew::PATIENCE;

/// A statement takes microseconds, so it is worked off right where it is asked for.
pub(crate) struct Sqlite {
    connection: Mutex<Connection>,
    path: PathBuf,
    act: String,
}

impl Sqlite {
    pub(crate) fn open(url: &str, run: &str, act: usize) -> Outcome<Self> {
        let mut path = SqliteConfig::from_url(url)?.path().as_os_str().to_owned();
        path.push(format!("-stock-{run}"));
        let connection = Connection::open(&path)?;
        connection.busy_timeout(PATIENCE)?;
        connection.execute_batch("PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL")?;
        Ok(Self {
            connection: Mutex::new(connection),
            path: path.into(),
            act: format!("act {act}"),
        })
    }

    fn connection(&self) -> MutexGuard<'_, Connection> {
        self.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn step<T, E: From<rusqlite::Error>>(&self, step: impl FnOnce(&Transaction<'_>) -> Result<T, E>) -> Result<T, E> {
        let mut connection = self.connection();
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let done = step(&transaction)?;
        transaction.commit()?;
        Ok(done)
    }
}

#[async_trait]
impl Store for Sqlite {
    async fn open(&self, stock: u32) -> Outcome<()> {
        self.step(|step| {
            step.execute_batch(fence::CREATE_SQL)?;
            step.execute_batch(
                "CREATE TABLE IF NOT EXISTS stock (act TEXT PRIMARY KEY, left INTEGER NOT NULL);
                 CREATE TABLE IF NOT EXISTS sale (act TEXT, buyer INTEGER, left INTEGER NOT NULL, token INTEGER,
                     PRIMARY KEY (act, buyer));
                 CREATE TABLE IF NOT EXISTS sign (act TEXT PRIMARY KEY, until INTEGER NOT NULL)",
            )?;
            step.execute("INSERT INTO stock VALUES (?1, ?2)", (&self.act, stock))?;
            Ok(())
        })
    }

    async fn admit(&self, token: FencingToken) -> Result<(), StoreError> {
        self.step(|step| fence::admit(step, &self.act, token)).map_err(refusal)
    }

    async fn left(&self) -> Outcome<u32> {
        let query = "SELECT left FROM stock WHERE act = ?1";
        Ok(self.connection().query_row(query, [&self.act], |row| row.get(0))?)
    }

    async fn sell(&self, sale: &Sale, fenced: bool) -> Result<(), StoreError> {
        let Sale { buyer, left, token } = *sale;
        self.step(|step| {
            if let Some(token) = token.filter(|_| fenced) {
                fence::admit(step, &self.act, token)?;
            }
            step.execute("UPDATE stock SET left = ?2 WHERE act = ?1", (&self.act, left))?;
            let token = token.map(FencingToken::as_i64);
            step.execute(
                "INSERT INTO sale VALUES (?1, ?2, ?3, ?4)",
                (&self.act, buyer, left, token),
            )?;
            Ok(())
        })
        .map_err(refusal)
    }

    async fn books(&self) -> Outcome<Books> {
        let left = self.left().await?;
        let connection = self.connection();
        let mut query = connection.prepare("SELECT buyer, left, token FROM sale WHERE act = ?1")?;
        let mut rows = query.query([&self.act])?;
        let mut sales = Vec::new();
        while let Some(row) = rows.next()? {
            sales.push(Sale {
                buyer: row.get(0)?,
                left: row.get(1)?,
                token: row.get::<_, Option<i64>>(2)?.map(FencingToken::try_from).transpose()?,
            });
        }
        Ok(Books { left, sales })
    }

    async fn put_up_sign(&self, ttl: Option<Duration>) -> Outcome<bool> {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?;
        let until = ttl.map_or(i64::MAX, |ttl| (now + ttl).as_millis() as i64);
        let put_up = "INSERT INTO sign VALUES (?1, ?2)
                      ON CONFLICT DO UPDATE SET until = excluded.until WHERE until <= ?3 RETURNING act";
        let row = (&self.act, until, now.as_millis() as i64);
        let taken: Option<String> = self.step(|step| step.query_row(put_up, row, |row| row.get(0)).optional())?;
        Ok(taken.is_some())
    }

    async fn take_down_sign(&self) -> Outcome<()> {
        self.step(|step| step.execute("DELETE FROM sign WHERE act = ?1", [&self.act]))?;
        Ok(())
    }

    async fn clear(&self) -> Outcome<()> {
        for end in ["", "-wal", "-shm"] {
            let mut file = self.path.clone().into_os_string();
            file.push(end);
            match std::fs::remove_file(file) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error.into()),
                _ => {}
            }
        }
        Ok(())
    }
}

fn refusal(error: FenceError) -> StoreError {
    match error {
        FenceError::Stale(stale) => StoreError::Stale(stale),
        error => error.into(),
    }
}
