//! Waiting in the server's queue.

use lock_core::{Attempt, Busy, Claim, Grant, LockError, Stamp, Wait};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use crate::failure::Failure;
use crate::listeners::{Push, Ticket};
use crate::requests::{Answer, OnBusy, Waiting};
use crate::session::Session;

impl Session {
    /// Waits until the claim is granted, or the wait is over.
    ///
    /// The place in the queue survives a broken connection, as long as another is there within a third of the ttl.
    pub(crate) async fn wait(&self, claim: &Claim, mut wait: Wait, mut on_busy: OnBusy) -> Result<Attempt, LockError> {
        // Before anything is sent, so that no push is missed.
        let mut ticket = self.listeners().wait(claim.owner());
        loop {
            let (answer, link) = self
                .limited("acquire", async {
                    let link = self.link().await?;
                    let answer = match self.ask_for(&link, claim, on_busy).await? {
                        (Answer::Granted(grant), sent) => (Answer::Granted(self.replicated(grant).await?), sent),
                        busy => busy,
                    };
                    Ok((answer, link))
                })
                .await?;
            let (waiting, sent) = match answer {
                (Answer::Granted(grant), _) => return Ok(Attempt::Granted(grant)),
                (Answer::Busy(waiting), sent) => (waiting, sent),
            };
            wait.busy(&waiting.busy);
            on_busy = OnBusy::Queue;
            match self
                .next(claim, wait.deadline(), &link.ending(), &mut ticket, &waiting, sent)
                .await
            {
                Next::Ask => {}
                Next::Granted(grant) => {
                    let grant = self.limited("acquire", self.replicated(grant)).await?;
                    return Ok(Attempt::Granted(grant));
                }
                Next::Ended => return Ok(waiting.busy.into()),
                Next::Closed => return Err(LockError::closed()),
                Next::GiveUp => return self.give_up(claim, waiting.busy).await,
            }
        }
    }

    /// What happens first after the answer "busy" to the request that was sent at `sent`. After `ending` no push comes any more.
    pub(crate) async fn next(
        &self,
        claim: &Claim,
        deadline: Option<Stamp>,
        ending: &CancellationToken,
        ticket: &mut Ticket,
        waiting: &Waiting,
        sent: Stamp,
    ) -> Next {
        let refresh = sent - claim.ttl().saturating_sub(waiting.life) + claim.ttl() / 3;
        let refresh = refresh.max(sent + claim.ttl() / 6);
        let mut look = self.clock().now() + waiting.turn + LEEWAY;
        loop {
            let next = look.min(refresh);
            tokio::select! {
                biased;
                push = ticket.next() => match push {
                    None => return Next::Ended,
                    // An older one answers a request that has been answered "busy" since.
                    Some(Push::Granted { token, sent: answered, life, tokens }) if answered >= self.micros(sent) => {
                        return Next::Granted(self.grant(claim, (token, tokens), self.stamp(answered), life));
                    }
                    Some(Push::Granted { .. }) => {}
                    Some(Push::First(lease)) => look = self.clock().now() + lease + LEEWAY,
                },
                () = ending.cancelled() => return if self.is_closed() { Next::Closed } else { Next::Ask },
                () = self.until(deadline) => return Next::GiveUp,
                () = self.until(Some(next)) => return Next::Ask,
            }
        }
    }

    /// Leaves the queue. Should the lock have been granted meanwhile, it is given on.
    async fn give_up(&self, claim: &Claim, busy: Busy) -> Result<Attempt, LockError> {
        self.limited("acquire", async {
            let link = self.link().await?;
            self.release_on(&link, claim, None).await?;
            Ok::<_, Failure>(busy.into())
        })
        .await
    }

    async fn until(&self, stamp: Option<Stamp>) {
        let Some(stamp) = stamp else {
            return std::future::pending().await;
        };
        loop {
            let left = stamp.since(self.clock().now());
            if left.is_zero() {
                return;
            }
            sleep(left).await;
        }
    }
}

/// The server says in whole milliseconds what is left of a lease, and ends a key after the last one.
const LEEWAY: std::time::Duration = std::time::Duration::from_millis(2);

pub(crate) enum Next {
    /// Time to ask again.
    Ask,
    Granted(Grant),
    GiveUp,
    /// The claim was released.
    Ended,
    Closed,
}
