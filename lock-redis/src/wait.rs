//! Waiting in the server's queue.
//!
//! A waiter repeats its request every third of its ttl, which shows that it is there. The first in line also does so when the lease of the
//! holder ends, which a message tells it if it was not the first before, and the others when that and the place of the first in line have ended. In all other cases the server pushes the grant.

use std::time::Duration;

use lock_core::{Attempt, Claim, LockError, Stamp, Wait};
use tokio::time::sleep;

use crate::client::Client;
use crate::commands::{Answer, OnBusy};
use crate::subscriptions::Push;

/// The server says in whole milliseconds what is left of a lease, and ends a key after the last one.
const LEEWAY: Duration = Duration::from_millis(2);

impl Client {
    /// Waits until the claim is granted, or the wait is over.
    ///
    /// The place in the queue survives a broken connection, as long as another is there within a third of the ttl. In a cluster it moves
    /// with the slot of the name.
    pub(crate) async fn wait(&self, claim: &Claim, mut wait: Wait) -> Result<Attempt, LockError> {
        let settings = &*self.settings;
        // Before anything is sent, so that no push is missed.
        let mut ticket = settings.subscriptions.wait(claim.owner());
        loop {
            let asking = self.call("acquire", claim.name(), |connection, _| async move {
                let (answer, sent) = settings.acquire(&connection, claim, OnBusy::Queue).await?;
                Ok((answer, sent, connection.ending()))
            });
            // After `ending` no push comes any more.
            let (waiting, sent, ending) = match asking.await? {
                (Answer::Granted(grant), ..) => return Ok(Attempt::Granted(grant)),
                (Answer::Busy(waiting), sent, ending) => (waiting, sent, ending),
            };
            wait.busy(&waiting.busy);
            let refresh = sent - claim.ttl().saturating_sub(waiting.life) + claim.ttl() / 3;
            let refresh = refresh.max(sent + claim.ttl() / 6);
            let mut look = settings.clock.now() + waiting.turn + LEEWAY;
            loop {
                tokio::select! {
                    biased;
                    push = ticket.next() => match push {
                        // The claim was released.
                        None => return Ok(waiting.busy.into()),
                        // An older one answers a request that has been answered "busy" since.
                        Some(Push::Granted { token, sent: answered, life, tokens }) if answered >= settings.micros(sent) => {
                            let grant = settings.grant(claim, (token, tokens), settings.stamp(answered), life);
                            return Ok(Attempt::Granted(grant));
                        }
                        Some(Push::Granted { .. }) => {}
                        Some(Push::First(lease)) => look = settings.clock.now() + lease + LEEWAY,
                        Some(Push::Taken(_)) => break,
                    },
                    () = ending.cancelled() => break,
                    () = self.until(wait.deadline()) => {
                        // Should the lock have been granted meanwhile, it is given on.
                        let leaving = |connection, _| async move { settings.release(&connection, claim, None).await };
                        self.call("acquire", claim.name(), leaving).await?;
                        return Ok(waiting.busy.into());
                    }
                    () = self.until(Some(look.min(refresh))) => break,
                }
            }
            // Also if only the server of the name has left the cluster.
            if self.router.is_closed() {
                return Err(LockError::closed());
            }
        }
    }

    async fn until(&self, stamp: Option<Stamp>) {
        let Some(stamp) = stamp else {
            return std::future::pending().await;
        };
        loop {
            let left = stamp.since(self.settings.clock.now());
            if left.is_zero() {
                return;
            }
            sleep(left).await;
        }
    }
}
