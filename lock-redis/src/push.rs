//! What the server sends without being asked.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use lock_core::{Clock, Stamp};
use redis::{PushInfo, PushKind};
use tokio_util::sync::CancellationToken;

use crate::feed::Feed;

/// Receives the pushes of one connection.
pub(crate) struct PushHandler {
    pub(crate) feed: Feed,
    /// Cancelled when the connection ends.
    pub(crate) broken: CancellationToken,
    pub(crate) heard: Arc<AtomicU64>,
    pub(crate) clock: Clock,
    pub(crate) opened: Stamp,
}

impl redis::aio::AsyncPushSender for PushHandler {
    fn send(&self, push: PushInfo) -> Result<(), redis::aio::SendError> {
        note(&self.heard, self.clock.now().since(self.opened));
        match push.kind {
            PushKind::Disconnection => self.broken.cancel(),
            _ => self.feed.hear(&push, &self.broken),
        }
        Ok(())
    }
}

/// Takes note that the server was heard so long after the connection was opened.
pub(crate) fn note(heard: &AtomicU64, since_opened: Duration) {
    let nanos = u64::try_from(since_opened.as_nanos()).unwrap_or(u64::MAX);
    heard.fetch_max(nanos, Ordering::AcqRel);
}
