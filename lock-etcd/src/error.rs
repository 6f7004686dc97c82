//! What can go wrong with the server, and what to tell the caller.

use etcd_client::Error;
use lock_core::LockError;
use lock_transport::error_chain;
use tonic::{Code, Status};

/// What etcd says when it has no room.
const FULL: &str = "database space exceeded";

/// Why a member that was reached cannot be worked with until the cluster has a leader: the source of such an error.
#[derive(Debug, thiserror::Error)]
#[error("most members of the cluster are down or cut off from it, so nothing is granted; start them again")]
struct NoMajority;

/// Why an operation failed.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The server or the connection said so.
    Etcd(Box<Error>),
    /// The connection ended under the request.
    Broken,
    /// The member did not answer in time.
    Silent,
    /// The member has no leader.
    NoLeader,
    /// Nothing was done: the server wants another login than that of the connection. The next one logs in.
    Login,
    /// The answer is of another state of the cluster than those before it on the same connection.
    OtherState(String),
    /// The lease ended under the request.
    LeaseGone,
    /// This member cannot be worked with now; another one may.
    Member(String),
    /// A request to release was repeated, as its connection had ended, and the name is not held now.
    PerhapsReleased,
    /// Tokens have become too large.
    NoTokens,
    /// The base of the tokens is none that fencelock wrote.
    ForeignBase,
    /// fencelock did not write this key, which is the first under the name.
    ForeignKey(String),
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
            Self::NoLeader => unavailable(operation, "this member of etcd has no leader").with_source(NoMajority),
            Self::Login => unavailable(operation, "etcd has just come to want another login"),
            Self::OtherState(why) => unavailable(operation, &why),
            Self::LeaseGone => unavailable(operation, "etcd ended the lease meanwhile"),
            Self::Member(why) => unavailable(operation, &format!("this member of etcd cannot be used: {why}")),
            Self::PerhapsReleased => unavailable(
                operation,
                "the connection to etcd ended before the answer came, and the lock is not held now: it was released, or was lost before that",
            ),
            Self::NoTokens => LockError::configuration(
                "the tokens of this namespace have reached 2^53, which they can only by a clock that was wrong by \
                 centuries; choose another namespace",
            ),
            Self::ForeignBase => LockError::configuration(
                "the key that ends with \":base\" in this namespace holds something that fencelock did not write; restore \
                 it, or choose another namespace",
            ),
            Self::ForeignKey(key) => LockError::configuration(format!(
                "the key {key:?} is in the way, which fencelock did not write; remove it, or choose another namespace"
            )),
            Self::Nonsense => unavailable(operation, "etcd answered with something else than what was asked for"),
            Self::Known(error) => error,
        }
    }

    /// Whether a request whose connection it ended is repeated on another one.
    pub(crate) fn is_worth_another_connection(&self) -> bool {
        // Behind a proxy that leads to one member after the other, every connection ends in that way.
        !matches!(self, Self::OtherState(_))
    }

    /// Whether the server refused the request and did nothing.
    pub(crate) fn is_refusal(&self) -> bool {
        matches!(self, Self::Login)
    }

    /// Whether the server has no room.
    pub(crate) fn is_full(&self) -> bool {
        matches!(self, Self::Etcd(error) if says(error, FULL))
    }

    /// Whether a lease was not granted because there is one of that number.
    pub(crate) fn is_lease_there(&self) -> bool {
        matches!(self, Self::Etcd(error) if says(error, "lease already exists"))
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        if says(&error, "etcdserver: requested lease not found") {
            return Self::LeaseGone;
        }
        if lacks_a_leader(&error) {
            return Self::NoLeader;
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
fn lacks_a_leader(error: &Error) -> bool {
    says(error, "etcdserver: no leader")
}

/// Whether the server has authentication turned off.
pub(crate) fn knows_no_users(error: &Error) -> bool {
    says(error, "authentication is not enabled")
}

/// Whether a member shows its status to root only.
///
/// In exactly these words and with that code. Versions around 3.1, which lack half of what locks need, refuse it as well, with
/// another code; and whatever lies between may refuse anything.
pub(crate) fn is_status_kept_from_users(error: &Error) -> bool {
    matches!(error, Error::GRpcStatus(status)
        if status.code() == Code::PermissionDenied && status.message() == "etcdserver: permission denied")
}

/// Whether the server refused the login that a request was sent with, or that there was none. Also if users or rights have changed since
/// the login: etcd takes no login with a signed token from before that; one with a token that it keeps itself, only if the change comes
/// between a request and its being carried out.
pub(crate) fn wants_another_login(error: &Error) -> bool {
    says(error, "user name is empty")
        || says(error, "revision of auth store is old")
        || says(error, "invalid auth token")
}

/// Whether etcd wrote it, and not what lies between.
fn is_the_servers(status: &Status) -> bool {
    status.message().starts_with("etcdserver:") || status.message().starts_with("auth:")
}

/// What etcd says to what only a person can change, and what that is.
const CONFIGURATION: [(&str, &str); 5] = [
    (
        "authentication failed",
        "etcd refused the user name or the password; correct them in the address",
    ),
    (
        "user name is empty",
        "this etcd wants a user and a password; write them before the host, as in etcd://USER:PASSWORD@HOST",
    ),
    ("permission denied", DENIED),
    ("access denied", DENIED),
    (
        "too large lease TTL",
        "the ttl is larger than etcd allows; choose a shorter one",
    ),
];

const DENIED: &str = "the etcd user lacks a right that locks need: to read and write what begins with the namespace and a colon; \
                      grant what docs/etcd.md lists";

fn explain(operation: &'static str, error: Error) -> LockError {
    if let Some((_, message)) = CONFIGURATION.iter().find(|(words, _)| says(&error, words)) {
        return LockError::configuration(*message).with_source(error);
    }
    if says(&error, FULL) {
        let message = "etcd is full: compact and defragment it, or raise its quota, then disarm its alarm. Locks that are held can be \
                       renewed and released";
        return unavailable(operation, message).with_source(error);
    }
    LockError::failed(operation, error)
}

/// Why the member at that endpoint did not let us in.
pub(crate) fn not_let_in(endpoint: &str, tls: bool, error: Error) -> Failure {
    if lacks_a_leader(&error) || !ends_connection(&error) {
        return error.into();
    }
    let shown = shown(&error);
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
    let shown = |error: &LockError| match awaits_election(error) {
        // Its source is that of the whole error.
        true => error.to_string(),
        false => error_chain(error),
    };
    let said: Vec<_> = failures.iter().map(shown).collect();
    let all = unavailable(
        "connecting",
        &format!("no endpoint of etcd can be used: {}", said.join("; ")),
    );
    match failures.iter().any(awaits_election) {
        true => all.with_source(NoMajority),
        false => all,
    }
}

/// Whether a member was reached that has no leader: there may be one a moment later.
pub(crate) fn awaits_election(error: &LockError) -> bool {
    std::error::Error::source(error).is_some_and(|source| source.is::<NoMajority>())
}

/// What went wrong, without what the client library wraps it in.
fn shown(error: &Error) -> String {
    match error {
        Error::GRpcStatus(status) => match std::error::Error::source(status) {
            Some(cause) => format!("{}: {}", status.message(), error_chain(cause)),
            None => status.message().to_owned(),
        },
        other => error_chain(other),
    }
}

fn says(error: &Error, words: &str) -> bool {
    match error {
        Error::GRpcStatus(status) => status.message().contains(words),
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
        assert!(Failure::Login.is_worth_another_connection() && Failure::Login.is_refusal());
    }

    #[test]
    fn an_election_is_waited_for_if_one_of_the_members_that_failed_has_no_leader() {
        let refused = || unavailable("connecting", "refused");
        let leaderless = || Failure::NoLeader.explain("connecting");
        for (failures, awaits) in [
            (vec![leaderless()], true),
            (vec![refused(), leaderless(), refused()], true),
            (vec![refused(), refused()], false),
        ] {
            let error = no_endpoint(failures).unsent();
            assert_eq!(awaits_election(&error), awaits, "{error}");
            assert_eq!(
                error_chain(&error).matches("start them again").count(),
                usize::from(awaits)
            );
        }
    }

    #[test]
    fn only_etcd_itself_can_keep_its_status_to_itself() {
        let says = |code, words: &str| Error::GRpcStatus(Status::new(code, words));
        let denied = says(Code::PermissionDenied, "etcdserver: permission denied");
        assert!(is_status_kept_from_users(&denied));
        for other in [
            // etcd 3.1
            says(Code::Unknown, "auth: permission denied"),
            says(Code::PermissionDenied, "RBAC: access denied"),
            says(Code::Unauthenticated, "etcdserver: permission denied"),
        ] {
            assert!(!is_status_kept_from_users(&other), "{other:?}");
        }
    }
}
