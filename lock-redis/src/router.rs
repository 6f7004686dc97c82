//! Which server a request goes to.

use std::fmt;

use async_trait::async_trait;
use lock_core::{LockError, LockName};

use crate::connection::Connection;
use crate::error::Failure;
use crate::reconnect::Reconnecting;

/// Finds the server of each name.
#[async_trait]
pub(crate) trait Router: fmt::Debug + Send + Sync {
    /// A connection to the server of the name, made if there is none.
    async fn connection(&self, name: &LockName) -> Result<Connection, Failure>;

    /// A connection to each server that stores locks.
    async fn all(&self) -> Result<Vec<Connection>, Failure>;

    /// A connection to any of them.
    async fn any(&self) -> Result<Connection, Failure> {
        let connection = self.all().await?.into_iter().next();
        connection.ok_or(Failure::Nonsense)
    }

    /// Decides what to do after a request about the name has failed. `at` is `None` if there was no connection to send it on.
    async fn failed(&self, operation: &'static str, name: &LockName, at: Option<&Connection>, failure: Failure)
    -> Next;

    /// Completes when another server has taken the name over from the one that `at` leads to, which need not say so.
    async fn moved(&self, name: &LockName, at: &Connection) {
        let _ = (name, at);
        std::future::pending().await
    }

    /// An open connection, if there is one.
    fn current(&self) -> Option<Connection>;

    /// Why no other server is found for requests that the present one does not answer, if that is known.
    fn trouble(&self) -> Option<LockError> {
        None
    }

    /// How many slots of a cluster no node serves.
    fn unserved(&self) -> usize {
        0
    }

    /// Closes all connections; no others are made.
    fn close(&self);

    fn is_closed(&self) -> bool;
}

/// What to do after a failure.
pub(crate) enum Next {
    /// Ask for the connection again and repeat the request. The error is for a caller that has no time left.
    Retry(LockError),
    /// Repeat the request once on this connection.
    Ask(Connection),
    Fail(LockError),
}

/// All names are at one server, which one connection leads to.
#[derive(Debug)]
pub(crate) struct SingleServer(pub(crate) Reconnecting);

#[async_trait]
impl Router for SingleServer {
    async fn connection(&self, _: &LockName) -> Result<Connection, Failure> {
        self.0.connection().await
    }

    async fn all(&self) -> Result<Vec<Connection>, Failure> {
        Ok(vec![self.0.connection().await?])
    }

    async fn failed(&self, operation: &'static str, _: &LockName, at: Option<&Connection>, failure: Failure) -> Next {
        // The connection has been closed.
        let is_gone = failure.is_lost_connection() || failure.is_demotion();
        let error = failure.explain(operation);
        match at.is_some() && is_gone {
            true => Next::Retry(error),
            false => Next::Fail(error),
        }
    }

    fn current(&self) -> Option<Connection> {
        self.0.current()
    }

    fn close(&self) {
        self.0.close();
    }

    fn is_closed(&self) -> bool {
        self.0.is_closed()
    }
}
