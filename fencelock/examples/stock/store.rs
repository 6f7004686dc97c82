//! What the lock protects: how much is left, and what was sold. It lies on the same backend as the lock.

#[cfg(feature = "etcd")]
mod etcd;
#[cfg(feature = "postgres")]
mod postgres;
#[cfg(feature = "redis")]
mod redis;
mod sqlite;

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use fencelock::FencingToken;
use fencelock::fence::StaleToken;

use crate::Outcome;

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
        "memory" => return Err("locks in memory exclude within one process, and the tills are processes".into()),
        _ => return Err(format!("this example has no store for \"{scheme}:\" addresses").into()),
    })
}
