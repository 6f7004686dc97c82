//! What a connection is subscribed to.

use redis::{PushInfo, PushKind, Value};
use tokio_util::sync::CancellationToken;

use crate::cluster::Subscriptions;
use crate::listeners::Listeners;

/// What a connection is subscribed to, and where the messages go.
#[derive(Clone)]
pub(crate) enum Feed {
    /// Nothing.
    None,
    /// The client's own channel.
    Client { channel: String, listeners: Listeners },
    /// The channels of the names that the client waits for in a cluster.
    Names {
        subscriptions: Subscriptions,
        listeners: Listeners,
    },
}

impl Feed {
    /// The channel to subscribe to from the beginning.
    pub(crate) fn channel(&self) -> Option<&str> {
        match self {
            Self::Client { channel, .. } => Some(channel),
            Self::None | Self::Names { .. } => None,
        }
    }

    /// Passes on what came over the connection, which has ended when `broken` is cancelled.
    pub(crate) fn hear(&self, push: &PushInfo, broken: &CancellationToken) {
        match (self, &push.kind, &*push.data) {
            (
                Self::Client { channel, listeners },
                PushKind::Message,
                [Value::BulkString(heard), Value::BulkString(message)],
            ) if *heard == channel.as_bytes() => listeners.hear(message),
            (Self::Names { listeners, .. }, PushKind::SMessage, [_, Value::BulkString(message)]) => {
                listeners.hear(message);
            }
            (Self::Names { subscriptions, .. }, PushKind::SSubscribe, [Value::BulkString(channel), ..]) => {
                subscriptions.began(channel, broken);
            }
            (Self::Names { subscriptions, .. }, PushKind::SUnsubscribe, [Value::BulkString(channel), ..]) => {
                subscriptions.ended(channel);
            }
            _ => {}
        }
    }
}
