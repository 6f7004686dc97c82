//! A database file of a test's own, and what tests do with it.

use std::path::PathBuf;
use std::pin::Pin;
use std::task::{Context, Waker};
use std::time::Duration;

use lock_core::{Attempt, Busy, Claim, DistributedLock, Grant, LockError, LockName, Wait};
use lock_sqlite::SqliteLock;
use rusqlite::Connection;
use tempfile::TempDir;

/// Longer than any test.
pub(crate) const LONG: Duration = Duration::from_secs(120);
/// Limit for everything that is to happen. Only a test that hangs reaches it.
pub(crate) const HANG_LIMIT: Duration = Duration::from_secs(60);
/// The shortest ttl.
pub(crate) const SHORT: Duration = Duration::from_millis(100);

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

    /// Changes the file behind the backend's back.
    pub(crate) fn sql(&self, sql: &str) {
        Connection::open(self.path()).unwrap().execute_batch(sql).unwrap();
    }

    /// The first value that `sql` yields.
    pub(crate) fn number(&self, sql: &str) -> i64 {
        let conn = Connection::open(self.path()).unwrap();
        conn.query_row(sql, [], |row| row.get(0)).unwrap()
    }

    pub(crate) fn rows(&self) -> i64 {
        self.number("SELECT count(*) FROM lock")
    }

    /// Copies the database as a whole to another file.
    pub(crate) fn copy_to(&self, path: PathBuf) {
        let conn = Connection::open(self.path()).unwrap();
        conn.execute("VACUUM INTO ?1", [path.to_str().unwrap()]).unwrap();
        // A copy of this kind loses the journal mode, which the backend sets again.
    }
}

pub(crate) fn claim(name: &str, ttl: Duration) -> Claim {
    Claim::new(name.parse().unwrap(), ttl)
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

/// Waits for the lock, which it has to get.
pub(crate) async fn waited(lock: &SqliteLock, claim: &Claim) -> Grant {
    let attempt = tokio::time::timeout(HANG_LIMIT, lock.acquire(claim, Wait::until(None))).await;
    let attempt = attempt.expect("the lock becomes free").unwrap();
    attempt.granted().expect("a wait without end")
}

/// For a thread of its own.
pub(crate) fn runtime() -> tokio::runtime::Runtime {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_all().build().unwrap()
}

/// Repeats a request until it is done, for a client whose limit for one is so short that a busy machine can miss it.
pub(crate) async fn until_done<T>(mut request: impl AsyncFnMut() -> Result<T, LockError>) -> T {
    let repeating = async {
        loop {
            match request().await {
                Ok(done) => return done,
                Err(error) => assert!(matches!(error, LockError::Unavailable { .. }), "{error}"),
            }
        }
    };
    tokio::time::timeout(HANG_LIMIT, repeating)
        .await
        .expect("it is done in time")
}

/// Drives an `acquire` of a name that is held to where it waits.
///
/// Requests of one client are worked in order, so once a later one is answered the ones before it are done: first the
/// attempt, then the entry among those who wait.
pub(crate) async fn until_waiting<T>(lock: &SqliteLock, mut acquire: Pin<&mut impl Future<Output = T>>) {
    let mut context = Context::from_waker(Waker::noop());
    for _ in 0..2 {
        assert!(acquire.as_mut().poll(&mut context).is_pending());
        lock.holders(&name("any")).await.unwrap().pop();
    }
}
