//! What the network backends of fencelock share below the lock protocol, and `lock-core` may not know.
//!
//! - [`url`]: addresses and their parameters, which have the same names on every backend.
//! - [`Secret`], [`Endpoint`], [`Namespace`], [`TlsFiles`]: what addresses hold.
//! - [`tcp`] and, with the feature `tls`, [`tls`]: connections, and why there is none.
//! - [`Reconnecting`]: a connection that is made again when it breaks.
//! - [`holder`]: the record that names a holder to people.

#![cfg_attr(test, allow(clippy::expect_used, clippy::unwrap_used, reason = "a test may fail"))]

mod endpoint;
mod files;
pub mod holder;
mod namespace;
mod reconnecting;
mod secret;
pub mod tcp;
#[cfg(feature = "tls")]
pub mod tls;
pub mod url;

use std::error::Error;
use std::time::Duration;

use lock_core::LockError;

pub use endpoint::Endpoint;
pub use files::{Pin, TlsFiles};
pub use namespace::Namespace;
pub use reconnecting::{Connect, Reconnecting};
pub use secret::Secret;

/// Limits `future` to the time that one operation may take.
///
/// # Errors
///
/// Those of the future, and [`LockError::no_answer`] if it takes longer.
pub async fn within<T, E: From<LockError>>(
    op_timeout: Duration,
    operation: &'static str,
    future: impl Future<Output = Result<T, E>>,
) -> Result<T, E> {
    let done = tokio::time::timeout(op_timeout, future).await;
    done.unwrap_or_else(|_| Err(LockError::no_answer(operation, op_timeout).into()))
}

/// Returns the text of an error with those of its causes, separated by colons. A cause whose text the error repeats is left out.
pub fn error_chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let shown = cause.to_string();
        if !text.ends_with(&shown) {
            text = format!("{text}: {shown}");
        }
        next = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_is_told_once() {
        let error = LockError::unavailable("connecting", "no way").with_source(std::io::Error::other("no cable"));
        assert_eq!(error_chain(&error), "connecting failed: no way: no cable");
        let repeated = LockError::failed("connecting", std::io::Error::other("no cable"));
        assert_eq!(error_chain(&repeated).matches("no cable").count(), 1);
    }
}
