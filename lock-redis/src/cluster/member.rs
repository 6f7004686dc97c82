//! What a session has more if its server is a node of a cluster.

use crate::cluster::Subscriptions;
use crate::feed::Feed;
use crate::line::Line;
use crate::link::Link;
use crate::session::Identity;

/// A node's part of a client of a cluster.
///
/// Messages come over a connection of their own: the node ends subscriptions by itself when a slot leaves it, and the `redis` crate
/// takes that message for the answer to the request that it sent first.
#[derive(Clone)]
pub(crate) struct Member {
    asking: bool,
    subscriptions: Subscriptions,
    messages: Line,
}

impl Member {
    pub(crate) fn new(identity: &Identity, line: impl FnOnce(Feed) -> Line) -> Self {
        let subscriptions = Subscriptions::default();
        let feed = Feed::Names {
            subscriptions: subscriptions.clone(),
            listeners: identity.listeners.clone(),
        };
        Self {
            asking: false,
            subscriptions,
            messages: line(feed),
        }
    }

    /// The same, for names whose slot is only being moved to the node.
    pub(crate) fn asking(&self) -> Self {
        Self {
            asking: true,
            ..self.clone()
        }
    }

    pub(crate) fn is_asking(&self) -> bool {
        self.asking
    }

    pub(super) fn subscriptions(&self) -> &Subscriptions {
        &self.subscriptions
    }

    pub(super) fn messages(&self) -> &Line {
        &self.messages
    }

    /// What the client is called in requests over `link` for a name with those channels: `CLIENT/RUN-ID` if it is subscribed to its
    /// channel there, or else `CLIENT/-`.
    pub(crate) fn client_at(&self, client: &str, link: &Link, channels: &str) -> String {
        let here = name_at(client, link);
        match self.subscriptions.has(&format!("{channels}{here}")) {
            true => here,
            false => format!("{client}/-"),
        }
    }

    /// Ends the connection for messages for good.
    pub(crate) fn close(&self) {
        self.messages.close();
    }
}

/// What a client is called at a node at which it is subscribed.
pub(super) fn name_at(client: &str, link: &Link) -> String {
    format!("{client}/{}", link.run_id())
}
