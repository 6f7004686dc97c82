//! Changes of holders, announced over a channel of the name.

use std::sync::{Arc, Weak};
use std::time::Duration;

use lock_core::{ChangeSender, Changes, LockError, LockName};
use redis::RedisError;
use tokio::sync::{oneshot, watch};
use tokio::time::{sleep, timeout};

use crate::failure::Failure;
use crate::link::Link;
use crate::session::Session;

/// Before the next attempt to reconnect after one that failed.
const RETRY: Duration = Duration::from_secs(1);

impl Session {
    /// Announces that the holder of the name has changed.
    pub(crate) async fn announce(&self, name: &LockName) -> Result<(), Failure> {
        let mut publish = redis::cmd("PUBLISH");
        publish.arg(self.settings().keys.changes(name)).arg("");
        self.link().await?.ask(&publish).await?;
        Ok(())
    }

    /// Observes the announcements; `None` if the user of the server may not subscribe to them.
    pub(crate) async fn changes(self: &Arc<Self>, name: &LockName) -> Result<Option<Changes>, Failure> {
        let link = self.link().await?;
        if link.cannot_observe() {
            return Ok(None);
        }
        let (sender, changes) = Changes::channel();
        let observer = Observer {
            session: Arc::downgrade(self),
            channel: self.settings().keys.changes(name),
            sender,
            limit: self.settings().op_timeout,
        };
        let (tell, told) = oneshot::channel();
        // In a task of its own: if this future is dropped, so is `changes`, and the task unsubscribes.
        let work = observer.serve(Arc::clone(&link), tell);
        self.settings().executor.spawn(Box::pin(work))?;
        match told.await {
            Ok(Ok(())) => Ok(Some(changes)),
            Ok(Err(failure)) if failure.is_denied() => {
                if link.observing_was_refused() {
                    tracing::warn!(
                        target: "fencelock",
                        "changes of leaders are found out by polling: the Redis user may not subscribe to their channels; grant what \
                         docs/redis.md lists"
                    );
                }
                Ok(None)
            }
            Ok(Err(failure)) => Err(failure),
            Err(_) => Err(LockError::closed().into()),
        }
    }
}

/// An observer of a name, over as many connections as it takes. All observers of one client share its connection, and those of one
/// name its subscription.
struct Observer {
    /// Keeps neither the client nor its connection.
    session: Weak<Session>,
    channel: String,
    sender: ChangeSender,
    /// For each request.
    limit: Duration,
}

impl Observer {
    /// Observes until [`Changes`] is dropped or the client ends. Tells once whether it has begun.
    async fn serve(self, link: Arc<Link>, tell: oneshot::Sender<Result<(), Failure>>) {
        let Some(session) = self.session.upgrade() else { return };
        // Before the subscription, so that no push is missed.
        let mut told = session.listeners().observe(&self.channel);
        drop(session);
        let subscribed = self.subscribe(&link).await;
        let began = subscribed.is_ok();
        let _ = tell.send(subscribed);
        if began {
            tokio::select! {
                biased;
                () = self.sender.closed() => {}
                () = self.follow(link, &mut told) => {}
            }
        }
        self.end(told).await;
    }

    /// Passes changes on, from one connection after the other.
    async fn follow(&self, mut link: Arc<Link>, told: &mut watch::Receiver<()>) {
        loop {
            let ending = link.ending();
            drop(link);
            tokio::select! {
                biased;
                () = ending.cancelled() => {}
                () = self.pass_on(told) => {}
            }
            // What changes from now on is not pushed.
            self.sender.send();
            match self.resubscribe().await {
                Some(next) => link = next,
                None => return,
            }
            self.sender.send();
        }
    }

    async fn pass_on(&self, told: &mut watch::Receiver<()>) {
        while told.changed().await.is_ok() {
            self.sender.send();
        }
    }

    async fn subscribe(&self, link: &Arc<Link>) -> Result<(), Failure> {
        self.limited(link.subscribe(&self.channel)).await
    }

    async fn limited(&self, request: impl Future<Output = Result<(), RedisError>>) -> Result<(), Failure> {
        let answer = timeout(self.limit, request).await;
        Ok(answer.map_err(|_| Failure::Broken)??)
    }

    /// Subscribes on the next connection. `None` once the client has ended, or may not subscribe any more.
    async fn resubscribe(&self) -> Option<Arc<Link>> {
        loop {
            let session = self.session.upgrade().filter(|session| !session.is_closed())?;
            if let Ok(link) = session.link().await {
                match self.subscribe(&link).await {
                    Ok(()) => return Some(link),
                    Err(failure) if failure.is_denied() => return None,
                    Err(_) => {}
                }
            }
            drop(session);
            sleep(RETRY).await;
        }
    }

    /// Unsubscribes, unless the client has other observers of the name.
    async fn end(&self, told: watch::Receiver<()>) {
        drop(told);
        let Some(session) = self.session.upgrade() else { return };
        let listeners = session.listeners();
        while !listeners.is_observed(&self.channel) {
            let Some(link) = session.current_link() else { return };
            let unsubscribed = self.limited(link.unsubscribe(&self.channel)).await;
            if unsubscribed.is_err() || !listeners.is_observed(&self.channel) {
                return;
            }
            // Another observer has come meanwhile. Its subscription may have been sent before the end of this one.
            if self.subscribe(&link).await.is_err() {
                return;
            }
            listeners.changed(self.channel.as_bytes());
        }
    }
}
