//! How transactions read the keys of a name.

use etcd_client::{GetOptions, KeyValue, SortOrder, SortTarget, TxnOp, TxnOpResponse, TxnResponse};
use lock_core::Claim;

use crate::error::Failure;
use crate::record;

/// How many keys are asked for at a time: an answer has to fit into four mebibytes.
pub(crate) const PAGE: i64 = 500;

/// What the operation at that place of a transaction found.
pub(crate) fn kvs(answer: &TxnResponse, at: usize) -> Result<Vec<KeyValue>, Failure> {
    match answer.op_responses().into_iter().nth(at) {
        Some(TxnOpResponse::Get(mut found)) => Ok(found.take_kvs()),
        _ => Err(Failure::Nonsense),
    }
}

/// The same for an operation that finds one key at most.
pub(crate) fn kv(answer: &TxnResponse, at: usize) -> Result<Option<KeyValue>, Failure> {
    Ok(kvs(answer, at)?.into_iter().next())
}

/// What the transaction came to that is the first operation of another one.
pub(crate) fn nested(answer: &TxnResponse) -> Option<TxnResponse> {
    match answer.op_responses().into_iter().next() {
        Some(TxnOpResponse::Txn(nested)) => Some(nested),
        _ => None,
    }
}

/// Whether the key is that of the claim's owner.
pub(crate) fn is_of(found: &KeyValue, claim: &Claim) -> bool {
    record::owner(found.value()) == Some(claim.owner())
}

/// Whether the name is only reserved by that key.
pub(crate) fn is_reserved(found: &KeyValue) -> bool {
    record::is_reserved(found.value())
}

pub(crate) fn text(key: &[u8]) -> Result<&str, Failure> {
    std::str::from_utf8(key).map_err(|_| Failure::Nonsense)
}

/// Reads the first key of a queue, which is that of the holder.
pub(crate) fn head(queue: &str) -> TxnOp {
    TxnOp::get(queue, Some(oldest(1)))
}

pub(crate) fn oldest(limit: i64) -> GetOptions {
    GetOptions::new()
        .with_prefix()
        .with_sort(SortTarget::Create, SortOrder::Ascend)
        .with_limit(limit)
}

/// Reads the last keys of a queue.
pub(crate) fn youngest(queue: &str, options: GetOptions, limit: i64) -> TxnOp {
    let options = options
        .with_prefix()
        .with_sort(SortTarget::Create, SortOrder::Descend)
        .with_limit(limit);
    TxnOp::get(queue, Some(options))
}
