//! One request to the backend: it ends in time, and a panic in it is an error like any other.

use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use crate::LockError;
use crate::sync::time;

/// Waits for the answer, at most for `limit`.
pub(crate) async fn ask<T>(
    operation: &'static str,
    limit: Duration,
    request: impl Future<Output = Result<T, LockError>>,
) -> Result<T, LockError> {
    time::timeout(limit, unbroken(operation, request))
        .await
        .unwrap_or_else(|_| Err(LockError::no_answer(operation, limit)))
}

/// Waits for the answer for as long as it takes.
pub(crate) async fn unbroken<T>(
    operation: &'static str,
    request: impl Future<Output = Result<T, LockError>>,
) -> Result<T, LockError> {
    let mut request = pin!(request);
    // A request that panicked is not polled again, so whatever it left half done is not seen by anyone.
    poll_fn(
        |cx| match catch_unwind(AssertUnwindSafe(|| request.as_mut().poll(cx))) {
            Ok(polled) => polled,
            Err(_) => Poll::Ready(Err(LockError::unavailable(
                operation,
                "the backend panicked; please report it to its authors".to_owned(),
            ))),
        },
    )
    .await
}
