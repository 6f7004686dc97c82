//! What a node answers that is not, or not now, the one to ask.

use lock_core::LockError;
use lock_transport::Endpoint;
use redis::{ErrorKind, RedisError, ServerErrorKind};

use crate::error::Failure;

/// What to do after a failure.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Redirect {
    /// Ask the node at that place, which serves the slot from now on.
    Moved(Endpoint),
    /// Ask the node at that place once: the slot is being moved to it, and the keys are there already.
    Moving(Endpoint),
    /// Ask again: the slot is being moved, and some keys are here and some there.
    Again,
    /// Find out which node serves the slot, and ask again.
    Refused,
    /// Nothing; the caller gets the failure.
    Fail,
}

impl Redirect {
    /// What to do after that failure of a request to the node at `asked`.
    pub(super) fn after(failure: &Failure, asked: Option<&Endpoint>) -> Self {
        match failure {
            Failure::Redis(error) => Self::after_error(error, asked),
            // While connecting. A connection is closed when its node has left the cluster.
            Failure::Broken | Failure::Known(LockError::Unavailable { .. } | LockError::Closed { .. }) => Self::Refused,
            _ => Self::Fail,
        }
    }

    fn after_error(error: &RedisError, asked: Option<&Endpoint>) -> Self {
        let there = || error.redirect_node().and_then(|(address, _)| read(address, asked?));
        match error.kind() {
            ErrorKind::Server(ServerErrorKind::Moved) => there().map_or(Self::Refused, Self::Moved),
            ErrorKind::Server(ServerErrorKind::Ask) => there().map_or(Self::Refused, Self::Moving),
            ErrorKind::Server(ServerErrorKind::TryAgain) => Self::Again,
            ErrorKind::Server(
                ServerErrorKind::ClusterDown
                | ServerErrorKind::MasterDown
                | ServerErrorKind::ReadOnly
                | ServerErrorKind::BusyLoading,
            ) => Self::Refused,
            _ if error.is_connection_dropped() || error.is_io_error() => Self::Refused,
            _ => Self::Fail,
        }
    }
}

/// Reads an address as a node tells it, which has no host if that is the one that was asked.
fn read(address: &str, asked: &Endpoint) -> Option<Endpoint> {
    let (host, port) = address.rsplit_once(':')?;
    let host = match host {
        "" => &asked.host,
        // Its node does not announce one.
        "?" => return None,
        host => host,
    };
    Some(Endpoint::new(host, port.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(line: &str) -> Redirect {
        let value = redis::parse_redis_value(format!("-{line}\r\n").as_bytes()).unwrap();
        let error = value.extract_error().unwrap_err();
        Redirect::after(&error.into(), Some(&Endpoint::new("seed", 1)))
    }

    #[test]
    fn what_nodes_answer_is_understood() {
        let there = Endpoint::new("10.0.0.1", 7001);
        assert_eq!(after("MOVED 1421 10.0.0.1:7001"), Redirect::Moved(there.clone()));
        assert_eq!(after("MOVED 1421 :7001"), Redirect::Moved(Endpoint::new("seed", 7001)));
        assert_eq!(after("ASK 1421 10.0.0.1:7001"), Redirect::Moving(there));
        assert_eq!(
            after("MOVED 1421 ::1:7001"),
            Redirect::Moved(Endpoint::new("::1", 7001))
        );
        assert_eq!(after("MOVED 1421 a:x"), Redirect::Refused);
        assert_eq!(after("MOVED 1421"), Redirect::Refused);
        assert_eq!(
            after("TRYAGAIN Multiple keys request during rehashing of slot"),
            Redirect::Again
        );
        for line in [
            "CLUSTERDOWN Hash slot not served",
            "LOADING Redis is loading",
            "READONLY You can't write",
        ] {
            assert_eq!(after(line), Redirect::Refused, "{line}");
        }
        for line in [
            "NOPERM no",
            "OOM command not allowed",
            "ERR other",
            "WRONGTYPE Operation",
        ] {
            assert_eq!(after(line), Redirect::Fail, "{line}");
        }
        let broken: RedisError = std::io::Error::from(std::io::ErrorKind::BrokenPipe).into();
        assert_eq!(
            Redirect::after(&broken.into(), Some(&Endpoint::new("seed", 1))),
            Redirect::Refused
        );
    }
}
