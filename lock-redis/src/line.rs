//! A connection that is made again when it breaks.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use lock_core::LockError;
use lock_transport::{Connect, Reconnecting};
use tokio::runtime::Handle;

use crate::failure::Failure;
use crate::feed::Feed;
use crate::link::Link;
use crate::session::Settings;

/// The way to the server, through as many connections as it takes, one at a time. Each is subscribed to the same. Clones share them.
#[derive(Clone)]
pub(crate) struct Line(Reconnecting<Opening>);

struct Opening {
    settings: Arc<Settings>,
    feed: Feed,
    /// Whether the client has found a primary before.
    was_primary: Arc<AtomicBool>,
}

/// How long a node of several is not tried again after it could not be reached. The majority goes on without it, and an attempt with
/// each request makes lock + release slower for as long as the node is down.
const REST: Duration = Duration::from_millis(50);

impl Line {
    /// Starts without a connection; the first request makes one.
    pub(crate) fn new(settings: Arc<Settings>, feed: Feed, was_primary: Arc<AtomicBool>) -> Self {
        let (executor, op_timeout) = (settings.executor.clone(), settings.op_timeout);
        let rest = settings.node.as_ref().map_or(Duration::ZERO, |_| REST);
        let opening = Opening {
            settings,
            feed,
            was_primary,
        };
        Self(Reconnecting::new(opening, executor, op_timeout).with_rest(rest))
    }

    /// The connection; if there is none, or it is broken, a new one. Whoever asks meanwhile gets the same.
    pub(crate) async fn link(&self) -> Result<Arc<Link>, Failure> {
        Ok(self.0.get().await?)
    }

    /// The connection that there is.
    pub(crate) fn current(&self) -> Option<Arc<Link>> {
        self.0.current()
    }

    /// Ends it for good.
    pub(crate) fn close(&self) {
        self.0.close();
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.0.is_closed()
    }
}

impl Connect for Opening {
    type Connection = Link;

    async fn connect(&self, runtime: Handle) -> Result<Link, LockError> {
        let opened = Link::open(&self.settings, self.feed.clone(), &self.was_primary, runtime).await;
        opened.map_err(|failure| failure.explain("connecting"))
    }

    fn is_broken(link: &Link) -> bool {
        link.is_broken()
    }

    fn close(link: &Link) {
        link.close();
    }
}
