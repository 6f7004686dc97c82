//! A connection that is made again when it breaks.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use lock_core::LockError;
use lock_transport::Connect;
use tokio::runtime::Handle;

use crate::connection::{Connection, Feed, Socket};
use crate::error::Failure;
use crate::sentinel::Sentinels;
use crate::settings::Settings;
use crate::transport::Place;

/// How long a node of several is not tried again after it could not be reached. The majority goes on without it, and an attempt with each
/// request makes lock + release slower for as long as the node is down.
const REST: Duration = Duration::from_millis(50);

/// As many connections to a server as it takes, one at a time. Each is subscribed to the same channel. Clones share them.
#[derive(Clone)]
pub(crate) struct Reconnecting(lock_transport::Reconnecting<Opening>);

struct Opening {
    discovery: Discovery,
    settings: Arc<Settings>,
    feed: Feed,
    /// Whether the client has found a primary before.
    was_primary: AtomicBool,
}

/// How the server is found.
pub(crate) enum Discovery {
    /// It is always at this place.
    Fixed(Place),
    /// Sentinels name the place of the primary.
    Sentinels(Arc<Sentinels>),
}

impl Reconnecting {
    /// Starts without a connection; the first request makes one.
    pub(crate) fn new(discovery: Discovery, settings: Arc<Settings>, feed: Feed) -> Self {
        let (executor, op_timeout) = (settings.executor.clone(), settings.op_timeout);
        let rest = settings.node.as_ref().map_or(Duration::ZERO, |_| REST);
        let opening = Opening {
            discovery,
            settings,
            feed,
            was_primary: AtomicBool::new(false),
        };
        Self(lock_transport::Reconnecting::new(opening, executor, op_timeout).with_rest(rest))
    }

    /// The connection; if there is none, or it is broken, a new one. All callers meanwhile get the same.
    pub(crate) async fn connection(&self) -> Result<Connection, Failure> {
        Ok(Connection::new(self.0.get().await?))
    }

    /// The connection that there is.
    pub(crate) fn current(&self) -> Option<Connection> {
        self.0.current().map(Connection::new)
    }

    /// Closes the connection; no other is made.
    pub(crate) fn close(&self) {
        self.0.close();
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.0.is_closed()
    }
}

impl Connect for Opening {
    type Connection = Socket;

    async fn connect(&self, _: Handle) -> Result<Socket, LockError> {
        let open = |place: Place| async move {
            let opened = Socket::open(&place, &self.settings, self.feed.clone(), &self.was_primary).await;
            opened.map_err(|failure| failure.explain("connecting"))
        };
        match &self.discovery {
            Discovery::Fixed(place) => open(place.clone()).await,
            Discovery::Sentinels(sentinels) => Arc::clone(sentinels).connect(open).await,
        }
    }

    fn is_broken(socket: &Socket) -> bool {
        socket.is_broken()
    }

    fn close(socket: &Socket) {
        socket.close();
    }
}

impl fmt::Debug for Reconnecting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reconnecting").finish_non_exhaustive()
    }
}
