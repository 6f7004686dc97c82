//! The keys of a queue, and how answers of the server show them.

use etcd_client::{GetOptions, KeyValue, SortOrder, SortTarget, TxnOp, TxnOpResponse, TxnResponse};
use lock_core::Claim;

use crate::failure::Failure;
use crate::keys;
use crate::record;

/// How many keys are asked for at a time: an answer has to fit into four mebibytes.
pub(crate) const PAGE: i64 = 500;

/// How many of the oldest keys in a queue are read to know the first: it can have a reservation beside it.
const FRONT: i64 = 2;

/// What the operation at that place of a transaction found.
pub(crate) fn kvs(answer: &TxnResponse, at: usize) -> Result<Vec<KeyValue>, Failure> {
    match answer.op_responses().into_iter().nth(at) {
        Some(TxnOpResponse::Get(mut found)) => Ok(found.take_kvs()),
        _ => Err(Failure::Nonsense),
    }
}

/// What the transaction came to that a transaction was made up of.
pub(crate) fn nested(answer: &TxnResponse) -> Option<TxnResponse> {
    match answer.op_responses().into_iter().next() {
        Some(TxnOpResponse::Txn(nested)) => Some(nested),
        _ => None,
    }
}

/// Whether it is that claim's owner who is in the queue there.
pub(crate) fn is_of(found: &KeyValue, claim: &Claim) -> bool {
    record::owner(found.value()) == Some(claim.owner())
}

/// The key of the reservation of a claim whose own key is `beside` it, if it announces one.
pub(crate) fn reservation_of(beside: &str, claim: &Claim) -> Option<String> {
    claim.at_least().map(|_| keys::reservation(beside, claim.owner()))
}

pub(crate) fn is_reserved(found: &KeyValue) -> bool {
    keys::is_reservation(found.key())
}

/// The first of a queue, among the oldest keys that were found in it. A reservation was created together with the key of its claim, and
/// comes after that.
pub(crate) fn front<'a>(found: impl IntoIterator<Item = &'a KeyValue>) -> Option<&'a KeyValue> {
    found.into_iter().min_by_key(|kv| place(kv))
}

/// How the keys of a queue are ordered.
pub(crate) fn place(kv: &KeyValue) -> (i64, bool) {
    (kv.create_revision(), is_reserved(kv))
}

pub(crate) fn text(key: &[u8]) -> Result<&str, Failure> {
    std::str::from_utf8(key).map_err(|_| Failure::Nonsense)
}

/// Reads the oldest keys of a queue.
pub(crate) fn head(queue: &str) -> TxnOp {
    TxnOp::get(queue, Some(oldest(FRONT)))
}

pub(crate) fn oldest(limit: i64) -> GetOptions {
    GetOptions::new()
        .with_prefix()
        .with_sort(SortTarget::Create, SortOrder::Ascend)
        .with_limit(limit)
}
