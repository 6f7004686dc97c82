//! What can go wrong, and what to do about it.

use std::error::Error;
use std::time::Duration;

use crate::{Holder, Lost};

/// The source of an error, kept for whoever wants to look further.
pub type Source = Box<dyn Error + Send + Sync>;

/// Why a lock operation failed.
///
/// "Busy" and "broken" are never confused: a lock that somebody else held to the end of the wait is
/// [`TimedOut`](Self::TimedOut), a server that did not answer is [`Unavailable`](Self::Unavailable).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LockError {
    /// The lock stayed busy until the wait was over.
    #[error("the lock was still held after {waited:.1?}{}", by(holder.as_deref()))]
    TimedOut {
        /// How long it was waited for.
        waited: Duration,
        /// Who held it, as far as known.
        holder: Option<Box<Holder>>,
    },

    /// The backend could not be reached, or did not answer in time. Nothing is held. Worth a retry.
    #[error("{operation} failed: {message}")]
    Unavailable {
        /// What was tried.
        operation: &'static str,
        /// What happened.
        message: String,
        /// The cause, if there is one.
        source: Option<Source>,
    },

    /// The lock was held and is not any more.
    #[error(transparent)]
    Lost(#[from] Lost),

    /// The name cannot be used.
    #[error("the lock name \"{name}\" is not usable: {reason}")]
    InvalidName {
        /// The name, escaped and shortened.
        name: String,
        /// What is wrong with it.
        reason: &'static str,
    },

    /// The ttl is outside of what the backend can keep.
    #[error("a ttl of {ttl:?} is not possible here; choose one from {min:?} to {max:?}")]
    InvalidTtl {
        /// The ttl asked for.
        ttl: Duration,
        /// The shortest possible.
        min: Duration,
        /// The longest possible.
        max: Duration,
    },

    /// The server found that this wait and another could only wait for each other.
    #[error("deadlock: {message}; take locks in the same order everywhere")]
    Deadlock {
        /// What the server said.
        message: String,
    },

    /// The server is set up in a way under which locks would not exclude.
    #[error("unsafe configuration: {message}")]
    UnsafeConfiguration {
        /// What is unsafe and what to change.
        message: String,
    },

    /// The address, the credentials, the permissions or the file are wrong. A retry will not help.
    #[error("{message}")]
    Configuration {
        /// What is wrong and what to change.
        message: String,
        /// The cause, if there is one.
        source: Option<Source>,
    },

    /// This backend cannot do that.
    #[error("this backend does not support {operation}")]
    NotSupported {
        /// What was asked for.
        operation: &'static str,
    },

    /// The client was shut down.
    #[error("the lock client was shut down; connect a new one")]
    Closed,
}

impl LockError {
    /// The backend failed to do `operation`.
    pub fn unavailable(operation: &'static str, source: impl Into<Source>) -> Self {
        let source = source.into();
        Self::Unavailable {
            operation,
            message: source.to_string(),
            source: Some(source),
        }
    }

    /// The backend did not answer `operation` within `limit`.
    #[must_use]
    pub fn no_answer(operation: &'static str, limit: Duration) -> Self {
        Self::Unavailable {
            operation,
            message: format!("no answer within {limit:?}"),
            source: None,
        }
    }

    /// Something is wrong that only a person can change; `message` says what.
    pub fn configuration(message: impl Into<String>) -> Self {
        Self::Configuration {
            message: message.into(),
            source: None,
        }
    }

    /// What failed, and how: for a second caller that waited for the same request. `operation` if the error names none.
    pub(crate) fn operation_and_message(&self, operation: &'static str) -> (&'static str, String) {
        match self {
            Self::Unavailable { operation, message, .. } => (operation, message.clone()),
            other => (operation, other.to_string()),
        }
    }

    /// Whether the same call may succeed later without anyone changing anything.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(
            self,
            Self::TimedOut { .. } | Self::Unavailable { .. } | Self::Lost(_) | Self::Deadlock { .. }
        )
    }
}

fn by(holder: Option<&Holder>) -> String {
    holder.map(|h| format!(" by {h}")).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_say_what_to_do() {
        let ttl = LockError::InvalidTtl {
            ttl: Duration::ZERO,
            min: Duration::from_millis(100),
            max: Duration::from_secs(60),
        };
        assert_eq!(
            ttl.to_string(),
            "a ttl of 0ns is not possible here; choose one from 100ms to 60s"
        );
        let busy = LockError::TimedOut {
            waited: Duration::from_millis(5040),
            holder: None,
        };
        assert_eq!(busy.to_string(), "the lock was still held after 5.0s");
    }

    #[test]
    fn the_source_is_kept() {
        let error = LockError::unavailable("renew", std::io::Error::other("broken pipe"));
        assert_eq!(error.source().unwrap().to_string(), "broken pipe");
        assert!(error.is_retryable());
        assert!(!LockError::Closed.is_retryable());
    }
}
