//! What can go wrong with the server, and what to tell the caller.

use lock_core::LockError;
use redis::{ErrorKind, RedisError};

/// Why an operation failed.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The server or the connection said so.
    Redis(RedisError),
    /// The connection ended under the request.
    Broken,
    /// One of these keys is not of the type that the scripts give it.
    Foreign(String),
    /// The answer is none that the scripts give.
    Nonsense,
    /// For the reason that is told.
    Told(String),
    /// Known in the caller's words already.
    Known(LockError),
}

impl Failure {
    /// Whether the connection ended under a request, which may have been carried out.
    pub(crate) fn is_lost_connection(&self) -> bool {
        match self {
            Self::Redis(error) => error.is_connection_dropped() || error.is_io_error(),
            Self::Broken => true,
            _ => false,
        }
    }

    /// Whether the server has become a replica, and did nothing.
    pub(crate) fn is_demotion(&self) -> bool {
        matches!(self, Self::Redis(error) if is_demotion(error))
    }

    /// Whether the user lacks a right.
    pub(crate) fn is_denied(&self) -> bool {
        matches!(self, Self::Redis(error) if is_denied(error))
    }

    /// What the caller is told.
    pub(crate) fn explain(self, operation: &'static str) -> LockError {
        let unavailable = |message: &str| LockError::unavailable(operation, message);
        match self {
            Self::Redis(error) => explain(operation, error),
            Self::Broken => unavailable("the connection to Redis ended"),
            Self::Foreign(keys) => LockError::configuration(foreign(&keys)),
            Self::Nonsense => unavailable("Redis answered with something else than what was asked for"),
            Self::Told(reason) => unavailable(&reason),
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
    let (code, words) = said(error);
    matches!(code, "READONLY" | "MASTERDOWN") || words.starts_with("Can not execute the command on a stale replica")
}

/// Whether a key was of another type; the server does not say which.
pub(crate) fn is_wrong_type(error: &RedisError) -> bool {
    said(error).0 == "WRONGTYPE"
}

/// Whether the user lacks a right.
pub(crate) fn is_denied(error: &RedisError) -> bool {
    let (code, words) = said(error);
    // What a script is refused is worded differently by each version.
    let denied = ["ACL failure in script", "The user executing the script can't"];
    code == "NOPERM" || denied.iter().any(|denied| words.starts_with(denied))
}

fn foreign(what: &str) -> String {
    format!(
        "a key of the lock holds something that fencelock did not write ({what}); remove it, or choose another namespace. \
         Nothing was changed"
    )
}

/// The codes that a server older than 7.0 may wrap, as [`said`] describes.
const WRAPPED: [&str; 7] = [
    "READONLY",
    "MASTERDOWN",
    "WRONGTYPE",
    "OOM",
    "MISCONF",
    "NOREPLICAS",
    "NOPERM",
];

/// The code of an error of the server, and the words behind it. Further words may come from the name of a key, and mean nothing.
///
/// An error inside of a script has its place before its words. A server older than 7.0 gives it the code "ERR", and puts its own
/// behind the place.
fn said(error: &RedisError) -> (&str, &str) {
    let (code, mut words) = (error.code().unwrap_or_default(), error.detail().unwrap_or_default());
    if code != "ERR" {
        return (code, words);
    }
    if words.starts_with("Error running script (call to f_") {
        words = words.split_once("): ").map_or(words, |(_, rest)| rest);
    }
    while let Some(rest) = behind_place(words) {
        words = rest;
    }
    let wrapped = words.strip_prefix('-').unwrap_or(words).split_once(' ');
    wrapped
        .filter(|(code, _)| WRAPPED.contains(code))
        .unwrap_or((code, words))
}

/// What follows a place in a script, such as `@user_script: 12: `.
fn behind_place(words: &str) -> Option<&str> {
    let words = words.strip_prefix('@').unwrap_or(words);
    let line = words.strip_prefix("user_script:")?.trim_start();
    let rest = line.trim_start_matches(|c: char| c.is_ascii_digit());
    rest.strip_prefix(": ").filter(|_| rest.len() < line.len())
}

/// A primary became a replica.
pub(crate) const DEMOTED: &str = "Redis became a read-only replica: a failover is under way, or the address leads to a former primary. \
                                  Waits and renewals try again until their deadlines";

/// What the server says of itself while it cannot serve, the code first. All of it passes or can be mended.
const TRANSIENT: [(&str, &str); 8] = [
    (
        "OOM",
        "Redis is out of memory: raise its maxmemory, or free some. Locks that are held can be renewed and released",
    ),
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
    (
        "TRYAGAIN",
        "the slot of this name is being moved to another node of the Redis Cluster, and until that is done its locks can only be \
         renewed; try again, or finish the move (redis-cli --cluster fix)",
    ),
    (
        "MOVED",
        "another node of the Redis Cluster serves the slot of this name now; try again",
    ),
    (
        "ASK",
        "the slot of this name is being moved to another node of the Redis Cluster; try again",
    ),
    (
        "CLUSTERDOWN",
        "the Redis Cluster is down: look at CLUSTER INFO of its nodes",
    ),
];

fn explain(operation: &'static str, error: RedisError) -> LockError {
    let shown = error.to_string();
    let (code, words) = said(&error);
    let configuration = |message: String, error: RedisError| LockError::configuration(message).with_source(error);
    let unavailable =
        |message: String, error: RedisError| LockError::unavailable(operation, message).with_source(error);
    if matches!(code, "WRONGPASS" | "NOAUTH") || error.kind() == ErrorKind::AuthenticationFailed {
        return configuration(
            "Redis refused the user name or the password; correct them in the address".to_owned(),
            error,
        );
    }
    if is_denied(&error) {
        return configuration(
            "the Redis user lacks a right that locks need; grant what docs/redis.md lists".to_owned(),
            error,
        );
    }
    if words.starts_with("fencelock: foreign value") || is_wrong_type(&error) {
        return configuration(foreign(&shown), error);
    }
    let no_database = ["DB index is out of range", "SELECT is not allowed"];
    if no_database.iter().any(|refused| words.starts_with(refused)) {
        return configuration("Redis has no database of that number; choose another".to_owned(), error);
    }
    if error.kind() == ErrorKind::RESP3NotSupported || words.starts_with("unknown command 'HELLO'") {
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
    if is_demotion(&error) {
        return unavailable(DEMOTED.to_owned(), error);
    }
    match TRANSIENT.iter().find(|(transient, _)| *transient == code) {
        Some((_, meaning)) => unavailable((*meaning).to_owned(), error),
        None => LockError::failed(operation, error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(line: &str) -> RedisError {
        let value = redis::parse_redis_value(format!("-{line}\r\n").as_bytes()).unwrap();
        value.extract_error().unwrap_err()
    }

    #[test]
    fn an_error_of_a_script_has_the_code_that_the_server_gave_it() {
        let old = "ERR Error running script (call to f_b085978451f560271f890f5fe5c8c00279a1ffe1): @user_script:1:";
        for (line, code) in [
            ("READONLY You can't write against a read only replica.", "READONLY"),
            (
                "WRONGTYPE Operation against a key script: b08597, on @user_script:1.",
                "WRONGTYPE",
            ),
            (
                &format!("{old} @user_script: 12: -READONLY You can't write."),
                "READONLY",
            ),
            (&format!("{old} -MISCONF Redis is configured to save"), "MISCONF"),
            (&format!("{old} WRONGTYPE Operation against a key"), "WRONGTYPE"),
            (
                "ERR user_script:7: fencelock: foreign value in {fencelock:READONLY x}:lock",
                "ERR",
            ),
            (
                &format!("{old} user_script:7: fencelock: foreign value in {{n:x: -OOM x}}:lock"),
                "ERR",
            ),
            ("ERR user_script: -READONLY of nobody", "ERR"),
        ] {
            let error = error(line);
            assert_eq!(said(&error).0, code, "{line}");
            assert_eq!(is_demotion(&error), code == "READONLY", "{line}");
        }
    }

    #[test]
    fn a_right_that_lacks_is_known_by_the_words_of_each_version() {
        let place = "script: b08597, on @user_script:1.";
        for line in [
            format!("ERR The user executing the script can't run this command or subcommand {place}"),
            format!("ERR ACL failure in script: User joe has no permissions to run the 'get' command {place}"),
            "NOPERM this user has no permissions to run the 'get' command".to_owned(),
        ] {
            let told = explain("acquire", error(&line)).to_string();
            assert!(told.contains("lacks a right"), "{told}");
        }
    }
}
