//! Telling that the holder of a name has changed.

use std::sync::{Arc, Weak};
use std::time::Duration;

use lock_core::{ChangeSender, Changes, LockError, LockName};
use tokio::time::sleep;

use crate::failure::Failure;
use crate::link::Link;
use crate::session::{PAUSE, Session};
use crate::watches::Waiting;

/// Before the next attempt to listen after one that failed.
const RETRY: Duration = Duration::from_secs(1);

impl Session {
    /// Listens for changes of the holder. All listeners of one name share one watch, on the stream that waiters use.
    pub(crate) async fn changes(self: &Arc<Self>, name: &LockName) -> Result<Changes, LockError> {
        let queue = self.settings().keys.queue(name);
        let (watching, link) = self.watch_queue(&queue).await?;
        let (sender, changes) = Changes::channel();
        let session = Arc::downgrade(self);
        link.runtime().spawn(async move {
            tokio::select! {
                () = sender.closed() => {}
                () = tell(&session, &queue, watching, &sender) => {}
            }
        });
        Ok(changes)
    }

    /// Watches a queue from the return of this call on.
    async fn watch_queue(&self, queue: &str) -> Result<(Waiting, Arc<Link>), LockError> {
        let watching = |link: Arc<Link>| async move {
            loop {
                let mut watching = link.watches().queue(queue);
                tokio::select! {
                    () = link.broken() => return Err(Failure::Broken),
                    begun = watching.begun() => if begun {
                        return Ok((watching, link));
                    },
                }
                // The stream has ended, as with a login that has expired; the next one is opened by the next watch.
                sleep(PAUSE).await;
            }
        };
        self.on_link("listening", watching).await
    }
}

/// Tells what the watch sees, through as many connections as it takes, until the client is closed or dropped.
async fn tell(session: &Weak<Session>, queue: &str, mut watching: Waiting, sender: &ChangeSender) {
    loop {
        while watching.changed().await {
            sender.send();
        }
        watching = loop {
            // Not kept for longer: listeners must not keep a client alive that was dropped.
            let Some(session) = session.upgrade() else { return };
            match session.watch_queue(queue).await {
                Ok((watching, _)) => break watching,
                Err(_) if session.is_closed() => return,
                Err(_) => {
                    drop(session);
                    sleep(RETRY).await;
                }
            }
        };
        // What has changed between the two watches was not seen.
        sender.send();
    }
}
