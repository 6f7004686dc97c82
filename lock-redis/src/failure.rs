//! What can go wrong with the server, and what to tell the caller.

use std::time::Duration;

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
    Late { round_trip: Duration, ttl: Duration },
    /// Fewer replicas than wanted had the grant or the renewal in time.
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
            Self::Late { round_trip, ttl } => unavailable(
                operation,
                &format!(
                    "a round trip to Redis took {round_trip:.1?}, which is too long for a ttl of {ttl:?}; raise the ttl if \
                     this goes on"
                ),
            ),
            Self::TooFew { reached, wanted } => unavailable(
                operation,
                &format!(
                    "{reached} of {wanted} replicas confirmed it in time; look after the replicas, or ask for fewer. Perhaps \
                     one of them was promoted, and this server is no longer the primary"
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
    let replica = [ServerErrorKind::ReadOnly, ServerErrorKind::MasterDown];
    replica.iter().any(|kind| error.kind() == ErrorKind::Server(*kind))
        || ["READONLY", "MASTERDOWN", "stale replica"]
            .iter()
            .any(|words| mentions(error, words))
}

/// A primary became a replica.
pub(crate) const DEMOTED: &str = "Redis became a read-only replica: a failover is under way, or the address leads to a former primary. \
                                  Waits and renewals try again until their deadlines";

/// What the server says of itself while it cannot serve, the words to know it by first. All of it passes or can be mended.
const TRANSIENT: [(&str, &str); 3] = [
    ("LOADING", "Redis has been restarted and is still loading its data"),
    (
        "MISCONF",
        "Redis refuses all writes, renewals and releases too, because its last background save failed \
         (stop-writes-on-bgsave-error): see its log, and make room where it saves. Locks that are held end with their ttl",
    ),
    (
        "NOREPLICAS",
        "Redis refuses all writes because it has fewer replicas than its min-replicas-to-write: look after the replicas. \
         Locks that are held end with their ttl",
    ),
];

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
        return configuration(
            "what answers at that address does not know the command HELLO, which locks need: it is older than Redis 6.2, or \
             its configuration renames the command (rename-command), or it is a proxy that does not pass it on"
                .to_owned(),
            error,
        );
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
        return unavailable(DEMOTED.to_owned(), error);
    }
    for (words, meaning) in TRANSIENT {
        if code == words || mentions(&error, words) {
            return unavailable(meaning.to_owned(), error);
        }
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
