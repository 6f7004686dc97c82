//! Messages that the server sends without being asked: `NOTIFY` on channels that the session listens to.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::mpsc;
use tokio_postgres::Notification;

/// How many unread notifications a subscription keeps. Every user of the database may notify any channel, so what comes
/// beyond that is dropped: a notification is a hint to look at the server, and one of them is enough.
const UNREAD: usize = 64;

/// The subscriptions of one connection, by channel.
#[derive(Clone, Default)]
pub(crate) struct Subscriptions(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    ended: bool,
    last: u64,
    by_channel: HashMap<String, Vec<(u64, mpsc::Sender<Notification>)>>,
}

/// Receives what is notified on one channel; unsubscribes on drop. The server has to be told separately, by `LISTEN`.
pub(crate) struct Subscription {
    channel: String,
    id: u64,
    received: mpsc::Receiver<Notification>,
    subscriptions: Subscriptions,
}

impl Subscriptions {
    pub(crate) fn subscribe(&self, channel: impl Into<String>) -> Subscription {
        self.subscribe_to(channel, UNREAD)
    }

    /// The same, with room for that many that are not read yet.
    pub(crate) fn subscribe_to(&self, channel: impl Into<String>, unread: usize) -> Subscription {
        let channel = channel.into();
        let (sender, received) = mpsc::channel(unread);
        let mut state = self.lock();
        state.last += 1;
        let id = state.last;
        // Without its sender a subscription has ended.
        if !state.ended {
            state.by_channel.entry(channel.clone()).or_default().push((id, sender));
        }
        drop(state);
        Subscription {
            channel,
            id,
            received,
            subscriptions: self.clone(),
        }
    }

    pub(crate) fn deliver(&self, notification: &Notification) {
        let state = self.lock();
        for (_, sender) in state.by_channel.get(notification.channel()).into_iter().flatten() {
            let _ = sender.try_send(notification.clone());
        }
    }

    /// The connection has ended, and all subscriptions with it.
    pub(crate) fn end(&self) {
        let mut state = self.lock();
        state.ended = true;
        state.by_channel.clear();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing here panics while holding the mutex.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Subscription {
    /// Whether something has come that was not looked at.
    pub(crate) fn has_more(&self) -> bool {
        !self.received.is_empty()
    }

    /// The next notification; `None` once the connection has ended. Dropping the future loses nothing.
    pub(crate) async fn next(&mut self) -> Option<Notification> {
        self.received.recv().await
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        let mut state = self.subscriptions.lock();
        if let Some(senders) = state.by_channel.get_mut(&self.channel) {
            senders.retain(|(id, _)| *id != self.id);
            if senders.is_empty() {
                state.by_channel.remove(&self.channel);
            }
        }
    }
}
