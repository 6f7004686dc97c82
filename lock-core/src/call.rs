//! One request to the backend, with a time limit; a panic in it becomes an error.

use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use tokio::time;

use crate::LockError;

/// Waits for the response of the backend for at most `limit`.
pub(crate) async fn call<T>(
    operation: &'static str,
    limit: Duration,
    request: impl Future<Output = Result<T, LockError>>,
) -> Result<T, LockError> {
    let mut request = pin!(catch_panic(operation, request));
    // What is there at once needs no timer.
    if let Poll::Ready(done) = poll_fn(|cx| Poll::Ready(request.as_mut().poll(cx))).await {
        return done;
    }
    time::timeout(limit, request)
        .await
        .unwrap_or_else(|_| Err(LockError::no_answer(operation, limit)))
}

/// Waits for the response of the backend without a limit.
pub(crate) async fn catch_panic<T>(
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
