//! What can go wrong with the server, and what to tell the caller.

use std::error::Error as _;
use std::io;

use lock_core::LockError;
use lock_transport::error_chain;
use tokio_postgres::error::{Error, SqlState};

use crate::proof::elsewhere;

/// Why an operation failed.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The server or the connection said so.
    Postgres(Error),
    /// The session ended under the request.
    Ended,
    /// The answer is none to what was asked.
    Nonsense,
    /// Known in the caller's words already.
    Known(LockError),
    /// The server is a standby: locks would seem to be free there that are held on the primary.
    Standby,
    /// None of several servers can be used: where each is, and why not.
    Several(Vec<(String, Failure)>),
}

impl Failure {
    /// The server did not let the client in. If that is for who the client is, it is marked as such.
    pub(crate) fn refused(self) -> Self {
        let codes = [
            SqlState::INVALID_PASSWORD,
            SqlState::INVALID_AUTHORIZATION_SPECIFICATION,
            SqlState::INVALID_CATALOG_NAME,
        ];
        match self {
            Self::Postgres(error) if error.code().is_some_and(|code| codes.contains(code)) => {
                Self::Known(explain("connecting", error).unsent())
            }
            other => other,
        }
    }

    /// What the caller is told.
    pub(crate) fn explain(self, operation: &'static str) -> LockError {
        match self {
            Self::Postgres(error) => explain(operation, error),
            Self::Standby => LockError::unsafe_configuration(
                "this Postgres is a standby, or still recovering, and its locks are not those of the primary; connect \
                          to the primary"
                    .to_owned(),
            ),
            Self::Ended => unavailable(operation, "the session on the Postgres server ended"),
            Self::Nonsense => unavailable(
                operation,
                "Postgres answered with something else than what was asked for",
            ),
            Self::Known(error) => error,
            Self::Several(failures) => explain_all(operation, failures),
        }
    }

    /// The same failure for a client that has found a primary at its address before: a standby in its place is a failover
    /// under way, or a former primary, and may be another server the next time.
    pub(crate) fn during_failover(self) -> Self {
        match self {
            Self::Standby => Self::Known(unavailable(
                "connecting",
                "this Postgres is a standby now: a failover is under way, or the address leads to a former primary",
            )),
            Self::Several(failures) => {
                let failures = failures.into_iter();
                Self::Several(
                    failures
                        .map(|(place, failure)| (place, failure.during_failover()))
                        .collect(),
                )
            }
            other => other,
        }
    }

    /// The error code that the server gave.
    pub(crate) fn code(&self) -> Option<&SqlState> {
        match self {
            Self::Postgres(error) => error.code(),
            _ => None,
        }
    }

    /// Whether the server has no room for another session.
    pub(crate) fn is_about_room(&self) -> bool {
        if let Self::Several(failures) = self {
            return failures.iter().any(|(_, failure)| failure.is_about_room());
        }
        self.code() == Some(&SqlState::TOO_MANY_CONNECTIONS)
    }

    /// Whether the same statement may fare better later: it was cancelled, or the server's table of locks is full.
    pub(crate) fn may_pass(&self) -> bool {
        self.is_limit() || self.code() == Some(&SqlState::OUT_OF_MEMORY)
    }

    /// Whether a statement named, by its number, something that is not there any more.
    pub(crate) fn is_about_what_is_gone(&self) -> bool {
        matches!(
            self.code(),
            Some(&SqlState::INTERNAL_ERROR | &SqlState::UNDEFINED_TABLE)
        )
    }

    /// Whether a statement ran into one of the limits of its session.
    pub(crate) fn is_limit(&self) -> bool {
        matches!(
            self.code(),
            Some(&SqlState::LOCK_NOT_AVAILABLE | &SqlState::QUERY_CANCELED)
        )
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Postgres(error)
    }
}

impl From<LockError> for Failure {
    fn from(error: LockError) -> Self {
        Self::Known(error)
    }
}

/// Whether the session is over after this error.
pub(crate) fn is_final(error: &Error) -> bool {
    match error.as_db_error() {
        Some(error) => matches!(error.severity(), "FATAL" | "PANIC"),
        None => true,
    }
}

fn explain(operation: &'static str, error: Error) -> LockError {
    let Some(code) = error.code().cloned() else {
        return match reason(&error) {
            Some(reason) => LockError::configuration(reason).with_source(error),
            None => LockError::failed(operation, error),
        };
    };
    let shown = shown(&error);
    let configuration = |message: &str| LockError::configuration(message);
    let unavailable = |message: &str| unavailable(operation, message);
    let explained = match code {
        SqlState::INVALID_AUTHORIZATION_SPECIFICATION if shown.contains("client certificate") => {
            configuration("Postgres wants to see a certificate of the client; give one with cert=FILE and key=FILE")
                .lasting()
        }
        // The server names the file in every language.
        SqlState::INVALID_AUTHORIZATION_SPECIFICATION if shown.contains("pg_hba.conf") => configuration(
            "Postgres does not admit this connection; change sslmode in the address (require is encrypted, disable is not), or add a line \
             to pg_hba.conf",
        ),
        SqlState::INVALID_PASSWORD | SqlState::INVALID_AUTHORIZATION_SPECIFICATION => configuration(
            "Postgres refused the user or the password; correct them in the address, in PGPASSWORD or in .pgpass",
        ),
        SqlState::INVALID_CATALOG_NAME => {
            configuration("the database does not exist; correct it in the address, or create it")
        }
        // Nothing else of ours divides.
        SqlState::DIVISION_BY_ZERO => return elsewhere(),
        SqlState::T_R_DEADLOCK_DETECTED => return LockError::deadlock(error),
        SqlState::INSUFFICIENT_PRIVILEGE => configuration(
            "the Postgres role lacks a right that locks need; grant what `fencelock schema postgres --role ROLE` prints",
        ),
        SqlState::UNDEFINED_TABLE | SqlState::UNDEFINED_COLUMN | SqlState::INVALID_SCHEMA_NAME => {
            configuration("the schema of fencelock is missing or damaged; run what `fencelock schema postgres` prints")
        }
        SqlState::TOO_MANY_CONNECTIONS => {
            unavailable("Postgres has no connection left; raise max_connections, or close some")
        }
        SqlState::OUT_OF_MEMORY => unavailable(
            "Postgres has no room for another lock: raise max_locks_per_transaction. Locks that are held can be renewed and released",
        ),
        SqlState::CANNOT_CONNECT_NOW => unavailable("Postgres is starting, stopping or recovering"),
        SqlState::FEATURE_NOT_SUPPORTED => configuration("the server lacks what locks need"),
        _ => return LockError::failed(operation, error),
    };
    explained.with_source(error)
}

/// What each of several servers said. Worth a retry if it is for one of them: that may be the one to be used.
fn explain_all(operation: &'static str, failures: Vec<(String, Failure)>) -> LockError {
    let errors = failures.into_iter().map(|(place, failure)| {
        let error = failure.explain(operation);
        let said = match &error {
            LockError::Unavailable(info) | LockError::UnsafeConfiguration(info) if !info.message.is_empty() => {
                with_causes(&info.message, error.source())
            }
            error => format!("{error:#}"),
        };
        let said = if said.contains(&place) {
            said
        } else {
            format!("{place}: {said}")
        };
        (said, error)
    });
    let (said, errors): (Vec<_>, Vec<_>) = errors.unzip();
    let message = said.join("; ");
    if errors.iter().any(LockError::is_retryable) {
        return unavailable(operation, &message);
    }
    if errors
        .iter()
        .any(|error| matches!(error, LockError::UnsafeConfiguration { .. }))
    {
        return LockError::unsafe_configuration(message);
    }
    LockError::configuration(message)
}

/// What is wrong with the settings, where that is what an error without a code means.
fn reason(error: &Error) -> Option<&'static str> {
    let source = error.source();
    // A certificate that is not trusted comes as data that is not valid.
    let broken = |error: &io::Error| error.kind() != io::ErrorKind::InvalidData;
    if source.and_then(|s| s.downcast_ref::<io::Error>()).is_some_and(broken) {
        return None;
    }
    let text = error.to_string();
    if text.starts_with("error performing TLS handshake") {
        return Some("TLS with Postgres failed; correct sslmode: require is encrypted, disable is not");
    }
    if text.starts_with("invalid configuration") || text.starts_with("authentication error") {
        return Some("Postgres cannot be logged in to; give user and password");
    }
    None
}

/// Why no connection was made, to whoever knows where it should have led.
pub(crate) fn not_connected(place: &str, error: Error) -> Failure {
    if error.code().is_some() || reason(&error).is_some() {
        return error.into();
    }
    let told = LockError::unavailable("connecting", format!("Postgres cannot be reached at {place}"));
    // What the driver wraps the cause in says no more than that.
    let shown = error.to_string();
    Failure::Known(match error.into_source() {
        Some(cause) => told.with_source(cause),
        None => told.with_source(shown),
    })
}

/// The error with its causes. The server's own words, never what was sent.
fn shown(error: &Error) -> String {
    if let Some(error) = error.as_db_error() {
        return error.message().to_owned();
    }
    with_causes(&error.to_string(), error.source())
}

fn with_causes(message: &str, cause: Option<&(dyn std::error::Error + 'static)>) -> String {
    match cause {
        Some(cause) => format!("{message}: {}", error_chain(cause)),
        None => message.to_owned(),
    }
}

fn unavailable(operation: &'static str, message: &str) -> LockError {
    LockError::unavailable(operation, message.to_owned())
}
