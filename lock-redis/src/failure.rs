//! What can go wrong with the server, and what to tell the caller.

use lock_core::LockError;
use redis::{ErrorKind, RedisError, ServerErrorKind};

/// Why an operation failed.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The server or the connection said so.
    Redis(RedisError),
    /// The connection ended under the request.
    Broken,
    /// The request took so long to arrive, twice, that it was not to be carried out any more.
    Late,
    /// Fewer replicas than wanted had the grant in time.
    TooFew { reached: u32, wanted: u32 },
    /// The answer is none that the scripts give.
    Nonsense,
    /// Known in the caller's words already.
    Known(LockError),
}

impl Failure {
    /// What the caller is told.
    pub(crate) fn explain(self, operation: &'static str) -> LockError {
        match self {
            Self::Redis(error) => explain(operation, error),
            Self::Broken => unavailable(operation, "the connection to Redis ended"),
            Self::Late => unavailable(
                operation,
                "the request took more than half of its ttl to arrive; choose a longer ttl if this goes on",
            ),
            Self::TooFew { reached, wanted } => unavailable(
                operation,
                &format!(
                    "{reached} of {wanted} replicas had the lock in time; look after the replicas, or ask for fewer"
                ),
            ),
            Self::Nonsense => unavailable(operation, "Redis answered with something else than what was asked for"),
            Self::Known(error) => error,
        }
    }
}

impl From<RedisError> for Failure {
    fn from(error: RedisError) -> Self {
        Self::Redis(error)
    }
}

impl From<LockError> for Failure {
    fn from(error: LockError) -> Self {
        Self::Known(error)
    }
}

/// Whether the server, having become a replica, should be asked who it is before it is used again.
pub(crate) fn is_demotion(error: &RedisError) -> bool {
    error.kind() == ErrorKind::Server(ServerErrorKind::ReadOnly) || mentions(error, "READONLY")
}

fn explain(operation: &'static str, error: RedisError) -> LockError {
    let shown = error.to_string();
    let code = error.code().unwrap_or_default();
    let configuration = |message: String, error: RedisError| LockError::Configuration {
        message,
        source: Some(error.into()),
    };
    let unavailable = |message: String, error: RedisError| LockError::Unavailable {
        operation,
        message,
        source: Some(error.into()),
    };
    if matches!(code, "WRONGPASS" | "NOAUTH") || error.kind() == ErrorKind::AuthenticationFailed {
        return configuration(
            "Redis refused the user name or the password; correct them in the address".to_owned(),
            error,
        );
    }
    // What a script is refused is worded differently by each version.
    let denied = ["NOPERM", "can't run this command", "ACL failure"];
    if code == "NOPERM" || denied.iter().any(|words| mentions(&error, words)) {
        return configuration(
            format!("the Redis user lacks a right that locks need ({shown}); grant what docs/redis.md lists"),
            error,
        );
    }
    if code == "WRONGTYPE" || mentions(&error, "WRONGTYPE") || mentions(&error, "fencelock: foreign value") {
        return configuration(
            format!(
                "a key of the lock holds something that fencelock did not write ({shown}); remove it, or choose another \
                 namespace. Nothing was changed"
            ),
            error,
        );
    }
    if mentions(&error, "DB index is out of range") || mentions(&error, "SELECT is not allowed") {
        return configuration("Redis has no database of that number; choose another".to_owned(), error);
    }
    if error.kind() == ErrorKind::RESP3NotSupported || mentions(&error, "unknown command 'HELLO'") {
        return LockError::UnsafeConfiguration {
            message: "this Redis is older than 6.2, which locks need; update the server".to_owned(),
        };
    }
    if error.kind() == ErrorKind::Parse {
        return configuration(
            "what answers at that address does not speak the protocol of Redis; correct host, port, or the scheme \
             (rediss: for TLS)"
                .to_owned(),
            error,
        );
    }
    if code == "OOM" || mentions(&error, "OOM command not allowed") {
        return unavailable(
            "Redis is out of memory: raise its maxmemory, or free some. Locks that are held can be renewed and released"
                .to_owned(),
            error,
        );
    }
    if is_demotion(&error) {
        return unavailable("Redis became a read-only replica".to_owned(), error);
    }
    unavailable(shown, error)
}

/// Errors that come out of a script carry the original's code somewhere in their text.
fn mentions(error: &RedisError, words: &str) -> bool {
    error.detail().is_some_and(|detail| detail.contains(words)) || error.to_string().contains(words)
}

fn unavailable(operation: &'static str, message: &str) -> LockError {
    LockError::Unavailable {
        operation,
        message: message.to_owned(),
        source: None,
    }
}

/// The same error once more, for the next who waited for the same thing.
pub(crate) fn again(error: &LockError) -> LockError {
    match error {
        LockError::Configuration { message, .. } => LockError::configuration(message.clone()),
        LockError::UnsafeConfiguration { message } => LockError::UnsafeConfiguration {
            message: message.clone(),
        },
        LockError::Closed => LockError::Closed,
        LockError::Unavailable { operation, message, .. } => unavailable(operation, message),
        other => unavailable("connecting", &other.to_string()),
    }
}
