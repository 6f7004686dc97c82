//! A database file of a test's own, and what tests do with it.

use std::path::PathBuf;
use std::pin::Pin;
use std::task::{Context, Waker};
use std::time::Duration;

use lock_core::{Attempt, Busy, Claim, DistributedLock, Grant, LockError, LockName, Mode};
use lock_sqlite::{SqliteConfig, SqliteLock};
use rusqlite::Connection;
use tempfile::TempDir;

/// Longer than any test.
pub(crate) const LONG: Duration = Duration::from_secs(120);
/// Limit for everything that is to happen. Only a test that hangs reaches it.
pub(crate) const HANG_LIMIT: Duration = Duration::from_secs(60);

/// A path in a directory that is removed at the end.
pub(crate) struct File(TempDir);

impl File {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.beside("locks.db")
    }

    pub(crate) fn beside(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub(crate) async fn client(&self) -> SqliteLock {
        SqliteLock::open(self.path()).await.unwrap()
    }

    /// A client that connects with its first request, with that limit for requests.
    pub(crate) fn client_within(&self, op_timeout: Duration) -> SqliteLock {
        let config = SqliteConfig::new(self.path()).op_timeout(op_timeout);
        config.connect_lazy().unwrap()
    }

    pub(crate) fn reader(&self) -> SqliteLock {
        let config = SqliteConfig::new(self.path()).read_only(true);
        config.connect_lazy().unwrap()
    }

    /// Changes the file behind the backend's back.
    pub(crate) fn sql(&self, sql: &str) {
        self.connection().execute_batch(sql).unwrap();
    }

    /// The first value that `sql` yields.
    pub(crate) fn number(&self, sql: &str) -> i64 {
        self.connection().query_row(sql, [], |row| row.get(0)).unwrap()
    }

    pub(crate) fn connection(&self) -> Connection {
        let conn = Connection::open(self.path()).unwrap();
        conn.busy_timeout(HANG_LIMIT).unwrap();
        conn
    }

    pub(crate) fn rows(&self) -> i64 {
        self.number("SELECT count(*) FROM lock")
    }

    /// Copies the database as a whole to the file `copy`.
    pub(crate) fn copy(&self) -> PathBuf {
        let copy = self.beside("copy");
        let path = copy.to_str().unwrap();
        self.connection().execute("VACUUM INTO ?1", [path]).unwrap();
        copy
    }

    /// The names of the files in the directory.
    pub(crate) fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.0.path()).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = names.collect();
        names.sort();
        names
    }
}

pub(crate) fn claim(name: &str) -> Claim {
    Claim::new(name.parse().unwrap(), LONG)
}

pub(crate) fn claim_as(name: &str, mode: Mode) -> Claim {
    claim(name).with_mode(mode)
}

pub(crate) fn name(name: &str) -> LockName {
    name.parse().unwrap()
}

pub(crate) async fn granted(lock: &SqliteLock, claim: &Claim) -> Grant {
    let attempt = lock.try_acquire(claim).await.unwrap();
    attempt.granted().expect("the lock is free")
}

pub(crate) async fn busy(lock: &SqliteLock, claim: &Claim) -> Busy {
    match lock.try_acquire(claim).await.unwrap() {
        Attempt::Busy(busy) => busy,
        other => panic!("granted although held: {other:?}"),
    }
}

/// What is said of a request that is refused for good.
pub(crate) fn refusal<T: std::fmt::Debug>(done: Result<T, LockError>) -> String {
    match done {
        Err(error @ LockError::Configuration { .. }) => format!("{error:#}"),
        other => panic!("not refused as a wrong configuration: {other:?}"),
    }
}

pub(crate) async fn in_time<T>(work: impl Future<Output = T>) -> T {
    tokio::time::timeout(HANG_LIMIT, work).await.expect("it ends in time")
}

/// For a thread of its own.
pub(crate) fn runtime() -> tokio::runtime::Runtime {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_all().build().unwrap()
}

/// Drives an `acquire` of a name that is held to where it waits: its client works requests in order.
pub(crate) async fn until_waiting<T>(lock: &SqliteLock, mut acquire: Pin<&mut impl Future<Output = T>>) {
    let mut context = Context::from_waker(Waker::noop());
    for _ in 0..2 {
        assert!(acquire.as_mut().poll(&mut context).is_pending());
        lock.holders(&name("any")).await.unwrap().pop();
    }
}
