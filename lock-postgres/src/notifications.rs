//! Messages that the server sends without being asked: `NOTIFY` on channels that the session listens to.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::mpsc;
use tokio_postgres::Notification;

/// How many unread notifications a subscription keeps. Every user of the database may notify any channel, so what comes
/// beyond that is dropped: a notification is a hint to look at the server, and one of them is enough.
const UNREAD: usize = 64;

/// The channels of a connection that are subscribed to. `None` once the connection has ended.
type Channels = Option<Vec<(String, mpsc::Sender<Notification>)>>;

/// The subscriptions of one connection.
#[derive(Clone)]
pub(crate) struct Subscriptions(Arc<Mutex<Channels>>);

/// Receives what is notified on one channel; unsubscribes on drop. The server has to be told separately, by `LISTEN`.
pub(crate) struct Subscription(mpsc::Receiver<Notification>);

impl Subscriptions {
    pub(crate) fn new() -> Self {
        Self(Arc::new(Mutex::new(Some(Vec::new()))))
    }

    pub(crate) fn subscribe(&self, channel: impl Into<String>) -> Subscription {
        self.subscribe_to(channel, UNREAD)
    }

    /// The same, with room for that many that are not read yet.
    pub(crate) fn subscribe_to(&self, channel: impl Into<String>, unread: usize) -> Subscription {
        let (sender, received) = mpsc::channel(unread);
        // Without its sender a subscription has ended.
        if let Some(subscriptions) = &mut *self.lock() {
            subscriptions.retain(|(_, sender)| !sender.is_closed());
            subscriptions.push((channel.into(), sender));
        }
        Subscription(received)
    }

    pub(crate) fn deliver(&self, notification: &Notification) {
        for (channel, sender) in self.lock().iter().flatten() {
            if channel == notification.channel() {
                let _ = sender.try_send(notification.clone());
            }
        }
    }

    /// The connection has ended, and all subscriptions with it.
    pub(crate) fn end(&self) {
        *self.lock() = None;
    }

    fn lock(&self) -> MutexGuard<'_, Channels> {
        // Nothing here panics while holding the mutex.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Subscription {
    /// Whether something has come that was not looked at.
    pub(crate) fn has_more(&self) -> bool {
        !self.0.is_empty()
    }

    /// The next notification; `None` once the connection has ended. Dropping the future loses nothing.
    pub(crate) async fn next(&mut self) -> Option<Notification> {
        self.0.recv().await
    }
}
