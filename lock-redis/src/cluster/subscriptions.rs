//! Subscriptions to the channels of names, on one node.
//!
//! A node can end a subscription at any time, and the `redis` crate takes that message for the answer to the oldest request. So an answer
//! says nothing here but that there was one: what counts are the messages about the channel itself.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lock_core::LockName;
use redis::RedisError;
use tokio_util::sync::CancellationToken;

use super::member::{Member, name_at};
use super::redirect::slot_in;
use super::slots::slot;
use crate::failure::Failure;
use crate::line::Line;
use crate::session::Session;

/// The channels that the client is subscribed to on one node, or is about to be.
#[derive(Clone, Default)]
pub(crate) struct Subscriptions(Arc<Mutex<HashMap<String, Channel>>>);

#[derive(Default)]
struct Channel {
    /// How many waits need it.
    waits: usize,
    /// Whether the node has been asked for it.
    asked: bool,
    /// Cancelled when the subscription ends. None before it begins.
    ending: Option<CancellationToken>,
    /// Held while a subscription begins or ends.
    changing: Arc<tokio::sync::Mutex<()>>,
}

impl Channel {
    fn is_subscribed(&self) -> bool {
        self.ending.as_ref().is_some_and(|ending| !ending.is_cancelled())
    }
}

impl Subscriptions {
    /// Whether the client is subscribed to the channel.
    pub(super) fn has(&self, channel: &str) -> bool {
        self.lock().get(channel).is_some_and(Channel::is_subscribed)
    }

    /// The node has confirmed a subscription, which ends with the connection at the latest.
    pub(crate) fn began(&self, channel: &[u8], broken: &CancellationToken) {
        if let Some(channel) = std::str::from_utf8(channel).ok()
            && let Some(channel) = self.lock().get_mut(channel)
            && !channel.is_subscribed()
        {
            channel.ending = Some(broken.child_token());
        }
    }

    /// The node has ended a subscription, perhaps because it was asked to.
    pub(crate) fn ended(&self, channel: &[u8]) {
        if let Some(channel) = std::str::from_utf8(channel).ok()
            && let Some(channel) = self.lock().get_mut(channel)
            && let Some(ending) = channel.ending.take()
        {
            ending.cancel();
        }
    }

    fn ending(&self, channel: &str) -> Option<CancellationToken> {
        let channels = self.lock();
        let ending = channels.get(channel)?.ending.as_ref()?;
        (!ending.is_cancelled()).then(|| ending.clone())
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Channel>> {
        // Nothing here panics while holding the mutex.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A subscription of one wait. When the last one to a channel is dropped, the client unsubscribes.
pub(super) struct Subscription {
    session: Arc<Session>,
    channel: String,
    ending: CancellationToken,
}

impl Subscription {
    /// Cancelled when messages do not come any more.
    pub(super) fn ending(&self) -> &CancellationToken {
        &self.ending
    }

    /// Finds out whether the node is there at all if nothing was heard from it for `limit`. If it is not, the subscription ends.
    pub(super) fn probe(&self, limit: Duration) {
        let messages = self.session.member().map(Member::messages);
        if let Some(link) = messages.and_then(Line::current) {
            link.probe_if_silent(limit);
        }
    }
}

impl Session {
    /// Subscribes to the channel of the name, and waits for the confirmation. Shares the subscription with other waits.
    ///
    /// Dropping the future unsubscribes.
    pub(super) async fn subscribe(self: &Arc<Self>, name: &LockName) -> Result<Subscription, Failure> {
        let Some(member) = self.member() else {
            return Err(Failure::Nonsense);
        };
        let link = member.messages().link().await?;
        let channel = format!("{}{}", self.channels(name), name_at(&self.identity().client, &link));
        let changing = {
            let mut channels = member.subscriptions().lock();
            let entry = channels.entry(channel.clone()).or_default();
            entry.waits += 1;
            Arc::clone(&entry.changing)
        };
        let mut subscription = Subscription {
            session: Arc::clone(self),
            channel,
            ending: CancellationToken::new(),
        };
        let _changing = changing.lock().await;
        loop {
            if let Some(ending) = member.subscriptions().ending(&subscription.channel) {
                subscription.ending = ending;
                return Ok(subscription);
            }
            if let Some(channel) = member.subscriptions().lock().get_mut(&subscription.channel) {
                channel.asked = true;
            }
            let mut command = redis::cmd("SSUBSCRIBE");
            command.arg(&subscription.channel);
            match link.ask(&command).await {
                // It may be about another channel, or the answer to another command. Then this channel is asked for once more.
                Ok(_) => {}
                Err(error) if is_of_other(&error, name, self) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// Whether an error was the answer to another subscription.
fn is_of_other(error: &RedisError, name: &LockName, session: &Session) -> bool {
    slot_in(error).is_some_and(|other| other != slot(&session.settings().keys.lock(name)))
}

impl Drop for Subscription {
    fn drop(&mut self) {
        let Some(member) = self.session.member() else { return };
        let changing = {
            let mut channels = member.subscriptions().lock();
            let Some(channel) = channels.get_mut(&self.channel) else {
                return;
            };
            channel.waits -= 1;
            if channel.waits > 0 {
                return;
            }
            Arc::clone(&channel.changing)
        };
        let (session, channel) = (Arc::clone(&self.session), std::mem::take(&mut self.channel));
        let executor = session.settings().executor.clone();
        // Without a background thread the subscription ends with the connection.
        let _ = executor.spawn(Box::pin(async move {
            let _changing = changing.lock().await;
            session.unsubscribe(&channel).await;
        }));
    }
}

impl Session {
    /// Unsubscribes, unless another wait has come meanwhile.
    async fn unsubscribe(&self, channel: &str) {
        let Some(member) = self.member() else { return };
        let asked = {
            let mut channels = member.subscriptions().lock();
            let Some(entry) = channels.get_mut(channel).filter(|entry| entry.waits == 0) else {
                return;
            };
            // From now on it does not count, although messages may still come.
            entry.ending = None;
            entry.asked
        };
        if asked && let Some(link) = member.messages().current() {
            let mut command = redis::cmd("SUNSUBSCRIBE");
            command.arg(channel);
            let unsubscribing = async { Ok(link.ask(&command).await?) };
            // If it fails, the connection has ended, or messages come that nothing waits for.
            let _ = self.limited("unsubscribing", unsubscribing).await;
        }
        let mut channels = member.subscriptions().lock();
        if channels.get(channel).is_some_and(|entry| entry.waits == 0) {
            channels.remove(channel);
        }
    }
}
