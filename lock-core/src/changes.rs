//! Changes of a holder, as a server pushes them.

use std::fmt;

use tokio::sync::mpsc;

/// Changes of the holder of one name, from [`DistributedLock::changes`](crate::DistributedLock::changes). Dropping it ends the listening.
///
/// Changes that come before the last one was received count as one.
pub struct Changes(mpsc::Receiver<()>);

/// The side of [`Changes`] that the backend keeps.
#[derive(Clone)]
pub struct ChangeSender(mpsc::Sender<()>);

impl Changes {
    /// Both sides.
    #[must_use]
    pub fn channel() -> (ChangeSender, Self) {
        let (sender, receiver) = mpsc::channel(1);
        (ChangeSender(sender), Self(receiver))
    }

    /// Waits for the next change. `None` if the backend has stopped listening. Cancellation-safe.
    pub async fn next(&mut self) -> Option<()> {
        self.0.recv().await
    }
}

impl ChangeSender {
    /// Tells that the holder has changed. False if the other side was dropped.
    pub fn send(&self) -> bool {
        !matches!(self.0.try_send(()), Err(mpsc::error::TrySendError::Closed(())))
    }

    /// Waits until the other side is dropped. Cancellation-safe.
    pub async fn closed(&self) {
        self.0.closed().await;
    }
}

impl fmt::Debug for Changes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Changes").finish_non_exhaustive()
    }
}

impl fmt::Debug for ChangeSender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChangeSender")
            .field("closed", &self.0.is_closed())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn changes_that_nobody_has_received_count_as_one() {
        let (sender, mut changes) = Changes::channel();
        assert!(sender.send() && sender.send());
        assert_eq!(changes.next().await, Some(()));
        drop(sender);
        assert_eq!(changes.next().await, None);
    }

    #[tokio::test]
    async fn a_dropped_listener_is_noticed() {
        let (sender, changes) = Changes::channel();
        drop(changes);
        sender.closed().await;
        assert!(!sender.send());
    }
}
