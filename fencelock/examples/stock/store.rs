//! What the lock protects: how much is left, and what was sold. It lies on the same backend as the lock.

#[cfg(feature = "etcd")]
mod etcd;
#[cfg(feature = "postgres")]
mod postgres;
#[cfg(feature = "redis")]
mod redis;
mod sqlite;

use std::cmp::Reverse;
use std::error::Error;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use fencelock::fence::StaleToken;
use fencelock::{FencingToken, OwnerId};
use percent_encoding::{NON_ALPHANUMERIC, percent_encode};
use tempfile::TempDir;

use crate::Outcome;
use crate::folder::folder;

/// One product, its books, and the sign at the door that some acts use for a lock.
#[async_trait]
pub(crate) trait Store: Send + Sync {
    /// Opens the books: that many are left and none is sold.
    async fn open(&self, stock: u32) -> Outcome<()>;

    /// Shuts out every holder before this one. For whoever reads in order to write.
    async fn admit(&self, token: FencingToken) -> Result<(), StoreError>;

    /// How many are left.
    async fn left(&self) -> Outcome<u32>;

    /// Writes how many are left and notes the sale, in one step. With `fenced`, only if the token is not stale.
    async fn sell(&self, sale: &Sale, fenced: bool) -> Result<(), StoreError>;

    async fn books(&self) -> Outcome<Books>;

    /// Sets a key if it is absent; it goes away after the ttl if there is one. False if it was there.
    async fn put_up_sign(&self, ttl: Option<Duration>) -> Outcome<bool>;

    /// Deletes the key, whoever has set it.
    async fn take_down_sign(&self) -> Outcome<()>;

    /// Removes everything.
    async fn clear(&self) -> Outcome<()>;
}

/// What a till writes: who bought, how many are left then by its account, and its token if it has one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sale {
    pub(crate) buyer: u32,
    pub(crate) left: u32,
    pub(crate) token: Option<FencingToken>,
}

/// The books at the end.
#[derive(Debug)]
pub(crate) struct Books {
    pub(crate) left: u32,
    /// In no order.
    pub(crate) sales: Vec<Sale>,
}

impl Books {
    /// Whether each sale has a higher token than the one before, in the order in which the stock fell.
    pub(crate) fn tokens_rise(&self) -> bool {
        let mut sales = self.sales.clone();
        sales.sort_unstable_by_key(|sale| Reverse(sale.left));
        let higher = |pair: &[Sale]| pair[0].left > pair[1].left && pair[0].token < pair[1].token;
        sales.iter().all(|sale| sale.token.is_some()) && sales.windows(2).all(higher)
    }
}

#[derive(Debug)]
pub(crate) enum StoreError {
    Stale(StaleToken),
    Broken(Box<dyn Error + Send + Sync>),
}

impl<E: Into<Box<dyn Error + Send + Sync>>> From<E> for StoreError {
    fn from(error: E) -> Self {
        Self::Broken(error.into())
    }
}

/// The address that was given, or that of a SQLite file in a temporary folder.
pub(crate) fn address(given: Option<&str>, prefix: &str) -> Outcome<(String, Option<TempDir>)> {
    if let Some(url) = given {
        return Ok((url.to_owned(), None));
    }
    let folder = folder(prefix)?;
    let path = folder.path().join("locks.db");
    let path = percent_encode(path.as_os_str().as_bytes(), NON_ALPHANUMERIC);
    Ok((format!("sqlite:{path}"), Some(folder)))
}

/// A name that no other run has.
pub(crate) fn new_run() -> String {
    let run = OwnerId::random().to_string();
    run.split('-').next().unwrap_or(&run).to_owned()
}

/// The part of the store at that address that one act of one run has to itself.
pub(crate) async fn connect(url: &str, run: &str, act: usize) -> Outcome<Arc<dyn Store>> {
    let (scheme, _) = url.split_once(':').unwrap_or_default();
    Ok(match scheme.to_ascii_lowercase().as_str() {
        "sqlite" => Arc::new(sqlite::Sqlite::open(url, run, act)?),
        #[cfg(feature = "etcd")]
        "etcd" => Arc::new(etcd::Etcd::connect(url, run, act).await?),
        #[cfg(feature = "postgres")]
        "postgres" | "postgresql" => Arc::new(postgres::Postgres::connect(url, run, act).await?),
        #[cfg(feature = "redis")]
        "redis" | "valkey" => Arc::new(redis::Redis::connect(url, run, act).await?),
        "memory" => return Err("locks in memory exclude within one process, and this example starts several".into()),
        _ => return Err(format!("this example has no store for \"{scheme}:\" addresses").into()),
    })
}
