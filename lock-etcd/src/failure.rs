//! What can go wrong with the server, and what to tell the caller.

use etcd_client::Error;
use lock_core::LockError;
use lock_transport::error_chain;
use tonic::{Code, Status};

/// What etcd says when it has no room.
const FULL: &str = "database space exceeded";

/// What a member without a leader means, and what to do.
pub(crate) const NO_LEADER: &str = "it has no leader: most members of the cluster are down or cut off from it, so nothing is granted; \
                                    start them again";

/// Why an operation failed.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The server or the connection said so.
    Etcd(Box<Error>),
    /// The connection ended under the request.
    Broken,
    /// The member did not answer in time.
    Silent,
    /// The leader changed, and the request was not answered after that.
    LeaderChanged,
    /// Nothing was done: the server has come to ask for users, and the connection was made before. The next one logs in.
    Nameless,
    /// The answer is of another state of the cluster than those before it on the same connection.
    OtherState(String),
    /// The lease ended under the request.
    LeaseGone,
    /// This member cannot be worked with now; another one may.
    Member(String),
    /// Tokens have become too large.
    NoTokens,
    /// The base of the tokens is none that fencelock wrote.
    ForeignBase,
    /// The answer is none to what was asked.
    Nonsense,
    /// Known in the caller's words already.
    Known(LockError),
}

impl Failure {
    /// There was no connection for another request; an earlier one may have been carried out.
    pub(crate) fn maybe_sent(self) -> Self {
        match self {
            Self::Known(error) => Self::Known(error.maybe_sent()),
            other => other,
        }
    }

    /// What the caller is told.
    pub(crate) fn explain(self, operation: &'static str) -> LockError {
        match self {
            Self::Etcd(error) => explain(operation, *error),
            Self::Broken => unavailable(operation, "the connection to etcd ended"),
            Self::Silent => unavailable(operation, "the member of etcd that is used does not answer"),
            Self::LeaderChanged => unavailable(
                operation,
                "the leader of etcd changed, and the request was not answered after that",
            ),
            Self::Nameless => unavailable(operation, "etcd has just come to ask for users"),
            Self::OtherState(why) => unavailable(operation, &why),
            Self::LeaseGone => unavailable(operation, "etcd ended the lease meanwhile"),
            Self::Member(why) => unavailable(operation, &format!("this member of etcd cannot be used: {why}")),
            Self::NoTokens => LockError::configuration(
                "the tokens of this namespace have reached 2^53, which they can only by a clock that was wrong by \
                 centuries; choose another namespace",
            ),
            Self::ForeignBase => LockError::configuration(
                "the key that ends with \":base\" in this namespace holds something that fencelock did not write; restore \
                 it, or choose another namespace",
            ),
            Self::Nonsense => unavailable(operation, "etcd answered with something else than what was asked for"),
            Self::Known(error) => error,
        }
    }
}

impl Failure {
    /// Whether a request whose connection it ended is repeated on another one.
    pub(crate) fn is_worth_another_connection(&self) -> bool {
        // Behind a proxy that leads to one member after the other, every connection ends in that way.
        !matches!(self, Self::OtherState(_))
    }

    /// Whether the server has no room.
    pub(crate) fn is_full(&self) -> bool {
        matches!(self, Self::Etcd(error) if says(error, FULL))
    }
}

/// Whether there was no connection because no member that can be reached has a leader.
pub(crate) fn awaits_an_election(failure: &Failure) -> bool {
    matches!(failure, Failure::Known(LockError::Unavailable(error)) if error.message.contains(NO_LEADER))
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        if says(&error, "requested lease not found") || says(&error, "lease not found") {
            return Self::LeaseGone;
        }
        Self::Etcd(Box::new(error))
    }
}

impl From<LockError> for Failure {
    fn from(error: LockError) -> Self {
        Self::Known(error)
    }
}

/// Whether the connection is of no more use after that: it is broken, or its member lacks a leader.
pub(crate) fn ends_connection(error: &Error) -> bool {
    match error {
        Error::TransportError(_) | Error::IoError(_) => true,
        Error::GRpcStatus(status) => match status.code() {
            Code::Unavailable => true,
            Code::Unknown | Code::Internal | Code::Cancelled | Code::DeadlineExceeded => !is_the_servers(status),
            _ => false,
        },
        _ => false,
    }
}

/// Whether the member has no leader.
pub(crate) fn lacks_a_leader(error: &Error) -> bool {
    says(error, "etcdserver: no leader")
}

/// Whether the server has authentication turned off.
pub(crate) fn knows_no_users(error: &Error) -> bool {
    says(error, "authentication is not enabled")
}

/// Whether the server has authentication turned on and was told no user.
pub(crate) fn wants_user(error: &Error) -> bool {
    says(error, "user name is empty")
}

/// Whether the user lacks the right to that.
fn is_denied(error: &Error) -> bool {
    code(error) == Some(Code::PermissionDenied) || says(error, "permission denied")
}

/// Whether a member tells its status to nobody but root.
///
/// In exactly these words and with that code. Versions around 3.1, which lack half of what locks need, refuse it as well, with
/// another code; and whatever lies between may refuse anything.
pub(crate) fn keeps_its_status_to_itself(error: &Error) -> bool {
    matches!(error, Error::GRpcStatus(status)
        if status.code() == Code::PermissionDenied && status.message() == "etcdserver: permission denied")
}

/// Whether users or rights have changed since the login. etcd takes no login with a signed token from before that; one
/// with a token that it keeps itself, only if the change comes between a request and its being carried out.
pub(crate) fn logged_in_before_a_change(error: &Error) -> bool {
    says(error, "revision of auth store is old")
}

/// Whether etcd wrote it, and not what lies between.
fn is_the_servers(status: &Status) -> bool {
    status.message().starts_with("etcdserver:") || status.message().starts_with("auth:")
}

fn explain(operation: &'static str, error: Error) -> LockError {
    let configuration = |message: String, error: Error| LockError::configuration(message).with_source(error);
    if says(&error, "authentication failed") || says(&error, "invalid user ID or password") {
        return configuration(
            "etcd refused the user name or the password; correct them in the address".to_owned(),
            error,
        );
    }
    if wants_user(&error) {
        return configuration(
            "this etcd wants a user and a password; write them before the host, as in etcd://USER:PASSWORD@HOST"
                .to_owned(),
            error,
        );
    }
    if is_denied(&error) {
        return configuration(
            "the etcd user lacks a right that locks need: to read and write what begins with the namespace and a colon; \
             grant what docs/etcd.md lists"
                .to_owned(),
            error,
        );
    }
    if says(&error, "too large lease TTL") {
        return configuration(
            "the ttl is larger than etcd allows; choose a shorter one".to_owned(),
            error,
        );
    }
    if says(&error, FULL) {
        return LockError::unavailable(
            operation,
            "etcd is full: compact and defragment it, or raise its quota, then disarm its alarm. Locks that are \
                      held can be renewed and released"
                .to_owned(),
        )
        .with_source(error);
    }
    match lacks_a_leader(&error) {
        true => LockError::unavailable(operation, format!("this member of etcd cannot be used: {NO_LEADER}"))
            .with_source(error),
        false => LockError::failed(operation, error),
    }
}

/// Why the member at that endpoint ended the connection before it let us in.
pub(crate) fn not_let_in(endpoint: &str, tls: bool, error: &Error) -> Failure {
    let shown = shown(error);
    let hint = if tls {
        ""
    } else {
        ", or want TLS: then use an etcds: address"
    };
    Failure::Member(format!(
        "{endpoint} ended the connection ({shown}); it may be starting or stopping{hint}"
    ))
}

/// One error for all endpoints: the one that a person can do something about, or all of them together.
pub(crate) fn no_endpoint(mut failures: Vec<LockError>) -> LockError {
    let telling = |error: &LockError| !matches!(error, LockError::Unavailable { .. });
    if let Some(at) = failures.iter().position(telling) {
        return failures.swap_remove(at);
    }
    if failures.len() == 1 {
        return failures.swap_remove(0);
    }
    let shown: Vec<_> = failures
        .iter()
        .map(|error| match error {
            LockError::Unavailable(info) if !info.message.is_empty() => match &info.source {
                Some(source) => format!("{}: {}", info.message, error_chain(&**source)),
                None => info.message.clone(),
            },
            other => format!("{other:#}"),
        })
        .collect();
    LockError::unavailable(
        "connecting",
        format!("no endpoint of etcd can be used: {}", shown.join("; ")),
    )
}

/// What went wrong, without what the client library wraps it in.
pub(crate) fn shown(error: &Error) -> String {
    match error {
        Error::GRpcStatus(status) => {
            let cause = std::error::Error::source(status).map(error_chain);
            cause.map_or_else(
                || status.message().to_owned(),
                |cause| format!("{}: {cause}", status.message()),
            )
        }
        other => error_chain(other),
    }
}

fn code(error: &Error) -> Option<Code> {
    match error {
        Error::GRpcStatus(status) => Some(status.code()),
        _ => None,
    }
}

fn says(error: &Error, words: &str) -> bool {
    match error {
        Error::GRpcStatus(status) => status.message().contains(words),
        Error::LeaseKeepAliveError(message) => message.contains(words),
        _ => false,
    }
}

pub(crate) fn unavailable(operation: &'static str, message: &str) -> LockError {
    LockError::unavailable(operation, message.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_that_leads_to_several_members_is_not_made_again_for_the_same_request() {
        assert!(!Failure::OtherState("two members".to_owned()).is_worth_another_connection());
        assert!(Failure::Broken.is_worth_another_connection());
        assert!(Failure::Nameless.is_worth_another_connection());
    }

    #[test]
    fn only_etcd_itself_can_keep_its_status_to_itself() {
        let says = |code, words: &str| Error::GRpcStatus(Status::new(code, words));
        let denied = says(Code::PermissionDenied, "etcdserver: permission denied");
        assert!(keeps_its_status_to_itself(&denied));
        for other in [
            // etcd 3.1
            says(Code::Unknown, "auth: permission denied"),
            says(Code::PermissionDenied, "RBAC: access denied"),
            says(Code::Unauthenticated, "etcdserver: permission denied"),
        ] {
            assert!(!keeps_its_status_to_itself(&other), "{other:?}");
        }
    }
}
