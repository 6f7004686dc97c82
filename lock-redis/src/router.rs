//! Which server a request goes to.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use async_trait::async_trait;
use lock_core::{LockError, LockName};
use lock_transport::{Connect, Reconnecting};
use tokio::runtime::Handle;

use crate::connection::{Connection, Socket};
use crate::error::Failure;
use crate::sentinel::Sentinels;
use crate::settings::Settings;
use crate::transport::Place;

/// How long a node of several is not tried again after it could not be reached. The majority goes on without it, and an attempt with each
/// request makes lock + release slower for as long as the node is down.
const REST: Duration = Duration::from_millis(50);

/// Finds the server of each name.
#[async_trait]
pub(crate) trait Router: Send + Sync {
    /// A connection to the server of the name, made if there is none.
    async fn connection(&self, name: &LockName) -> Result<Connection, Failure>;

    /// A connection to each server that stores locks.
    async fn all(&self) -> Result<Vec<Connection>, Failure>;

    /// Decides what to do after a request about the name has failed. `at` is `None` if there was no connection to send it on.
    async fn failed(&self, operation: &'static str, name: &LockName, at: Option<&Connection>, failure: Failure)
    -> Next;

    /// Completes when another server has taken the name over from the one that `at` leads to, which need not say so.
    async fn moved(&self, name: &LockName, at: &Connection) {
        let _ = (name, at);
        std::future::pending().await
    }

    /// The open connection to the one server, if there is one.
    fn current(&self) -> Option<Connection> {
        None
    }

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

/// How a server is found and connected to.
pub(crate) struct Opening {
    discovery: Discovery,
    settings: Arc<Settings>,
    /// Whether the client has found a primary before.
    was_primary: AtomicBool,
}

pub(crate) enum Discovery {
    /// The server is always at this place.
    Fixed(Place),
    /// Sentinels name the place of the primary.
    Sentinels(Arc<Sentinels>),
}

impl Opening {
    /// Starts without a connection; the first request makes one.
    pub(crate) fn reconnecting(discovery: Discovery, settings: &Arc<Settings>) -> Reconnecting<Self> {
        let opening = Self {
            discovery,
            settings: Arc::clone(settings),
            was_primary: AtomicBool::new(false),
        };
        let rest = settings.node.as_ref().map_or(Duration::ZERO, |_| REST);
        Reconnecting::new(opening, settings.executor.clone(), settings.config.op_timeout).with_rest(rest)
    }
}

impl Connect for Opening {
    type Connection = Socket;

    async fn connect(&self, _: Handle) -> Result<Socket, LockError> {
        let open = |place: Place| async move {
            let opened = Socket::open(&place, &self.settings, &self.was_primary).await;
            opened.map_err(|failure| failure.explain("connecting"))
        };
        match &self.discovery {
            Discovery::Fixed(place) => open(place.clone()).await,
            Discovery::Sentinels(sentinels) => Arc::clone(sentinels).connect(open).await,
        }
    }

    fn is_broken(socket: &Socket) -> bool {
        socket.ending().is_cancelled()
    }

    fn close(socket: &Socket) {
        socket.close();
    }
}

/// All names are at one server, which one connection leads to.
pub(crate) struct SingleServer(pub(crate) Reconnecting<Opening>);

#[async_trait]
impl Router for SingleServer {
    async fn connection(&self, _: &LockName) -> Result<Connection, Failure> {
        Ok(Connection::new(self.0.get().await?))
    }

    async fn all(&self) -> Result<Vec<Connection>, Failure> {
        Ok(vec![Connection::new(self.0.get().await?)])
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
        self.0.current().map(Connection::new)
    }

    fn close(&self) {
        self.0.close();
    }

    fn is_closed(&self) -> bool {
        self.0.is_closed()
    }
}
