//! The resource's side for data in etcd: what refuses a stale holder.
//!
//! The data may lie in any etcd of yours, whichever backend the lock itself is on. The rule is that of
//! [`lock_core::fence`]. The mark of a resource is kept in a key of its own, [`mark_key`], and must be restored together with
//! the data that it protects.
//!
//! ```no_run
//! use lock_core::LockGuard;
//! use lock_etcd::etcd_client::{Client, Txn, TxnOp};
//! use lock_etcd::fence;
//!
//! # async fn example(mut etcd: Client, guard: LockGuard) -> Result<(), Box<dyn std::error::Error>> {
//! // Before reading what the write depends on:
//! fence::admit(&etcd, "stock/10000", guard.token()).await?;
//! let left = etcd.get("stock/10000", None).await?;
//! # let less = left.count().to_string();
//! // Checked again, and written, in one step:
//! let write = TxnOp::put("stock/10000", less, None);
//! fence::write(&etcd, "stock/10000", guard.token(), [write]).await?;
//!
//! // The same with a transaction of your own, once the token is admitted:
//! let admitted = fence::compare("stock/10000", guard.token());
//! let txn = Txn::new().when([admitted]).and_then([TxnOp::put("stock/10000", "98", None)]);
//! let written = etcd.txn(txn).await?.succeeded();
//! # Ok(()) }
//! ```
//!
//! Data in the same cluster as its lock can be tied to the lock itself instead: see
//! [`EtcdLock::compares`](crate::EtcdLock::compares).

use etcd_client::{Client, Compare, CompareOp, KeyValue, Txn, TxnOp, TxnOpResponse, TxnResponse};
use lock_core::FencingToken;
use lock_core::fence::StaleToken;

/// Why a holder was not admitted, or its operations not carried out.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FenceError {
    /// A later holder has been here. Stop, and lock again.
    #[error(transparent)]
    Stale(#[from] StaleToken),
    /// etcd failed. Whether the holder is stale, or the operations were carried out, is not known unless the error says so.
    #[error(transparent)]
    Etcd(#[from] etcd_client::Error),
    /// The mark is not a token: another program wrote to its key.
    #[error("the mark of {resource} is not a fencing token; remove or repair its key")]
    Mark {
        /// Whose mark it is.
        resource: String,
    },
}

/// The key that holds the mark of a resource. It never expires by itself.
#[must_use]
pub fn mark_key(resource: &str) -> String {
    format!("{resource}:fence")
}

/// What must be true in a transaction of your own: that `token` was [admitted](admit), and no later one since.
#[must_use]
pub fn compare(resource: &str, token: FencingToken) -> Compare {
    Compare::value(mark_key(resource), CompareOp::Equal, token.to_string())
}

/// Raises the mark of `resource` to `token`, so that no older holder can write from now on. Call it before reading what a
/// later [`write()`] depends on.
///
/// # Errors
///
/// [`FenceError::Stale`] if a later holder has been here.
///
/// # Cancellation
///
/// The mark may have been raised, which harms no holder that is still to write.
pub async fn admit(etcd: &Client, resource: &str, token: FencingToken) -> Result<(), FenceError> {
    let answer = etcd.kv_client().get(mark_key(resource), None).await?;
    raise(etcd, resource, token, answer.kvs().first().cloned()).await
}

/// Raises the mark from what was `found`.
async fn raise(
    etcd: &Client,
    resource: &str,
    token: FencingToken,
    mut found: Option<KeyValue>,
) -> Result<(), FenceError> {
    let key = mark_key(resource);
    loop {
        let mark = found.as_ref().map(|found| read(resource, found)).transpose()?;
        match mark {
            Some(mark) if mark > token => return Err(StaleToken::new(resource, token, mark).into()),
            Some(mark) if mark == token => return Ok(()),
            _ => {}
        }
        let written = found.as_ref().map_or(0, KeyValue::mod_revision);
        let txn = Txn::new()
            .when([Compare::mod_revision(key.clone(), CompareOp::Equal, written)])
            .and_then([TxnOp::put(key.clone(), token.to_string(), None)])
            .or_else([TxnOp::get(key.clone(), None)]);
        let answer = etcd.kv_client().txn(txn).await?;
        if answer.succeeded() {
            return Ok(());
        }
        found = got(&answer);
    }
}

/// Admits `token` and carries out `operations`, in one step that nothing comes between.
///
/// # Errors
///
/// [`FenceError::Stale`] if a later holder has been here; nothing is carried out then.
///
/// # Cancellation
///
/// The operations may have been carried out.
pub async fn write(
    etcd: &Client,
    resource: &str,
    token: FencingToken,
    operations: impl Into<Vec<TxnOp>>,
) -> Result<TxnResponse, FenceError> {
    // The same answer has the mark that refuses the holder.
    let txn = Txn::new()
        .when([compare(resource, token)])
        .and_then(operations)
        .or_else([TxnOp::get(mark_key(resource), None)]);
    loop {
        let answer = etcd.kv_client().txn(txn.clone()).await?;
        if answer.succeeded() {
            return Ok(answer);
        }
        raise(etcd, resource, token, got(&answer)).await?;
    }
}

/// The highest token that `resource` has admitted.
///
/// # Errors
///
/// [`FenceError::Etcd`] if etcd failed.
pub async fn mark(etcd: &Client, resource: &str) -> Result<Option<FencingToken>, FenceError> {
    let answer = etcd.kv_client().get(mark_key(resource), None).await?;
    answer.kvs().first().map(|found| read(resource, found)).transpose()
}

/// The mark that a transaction read because its compares did not hold.
fn got(answer: &TxnResponse) -> Option<KeyValue> {
    answer.op_responses().into_iter().find_map(|answer| match answer {
        TxnOpResponse::Get(answer) => answer.kvs().first().cloned(),
        _ => None,
    })
}

fn read(resource: &str, found: &KeyValue) -> Result<FencingToken, FenceError> {
    let mark = found.value_str().ok().and_then(|mark| mark.parse().ok());
    mark.ok_or_else(|| FenceError::Mark {
        resource: resource.to_owned(),
    })
}
