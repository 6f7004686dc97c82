//! Waiting in the server's own queue for a lock.

use std::sync::Arc;
use std::time::Duration;

use lock_core::{Attempt, Claim, Stamp};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::failure::Failure;
use crate::requests::{held, own_lease};
use crate::sessions::Sessions;

const FIRST_POLL: Duration = Duration::from_millis(5);
const LAST_POLL: Duration = Duration::from_millis(250);

impl Sessions {
    /// Waits until the claim is granted, or for `deadline`, or until nobody wants it any more.
    ///
    /// A session that waits holds nothing else; once granted it carries this one lock until it is released.
    pub(crate) async fn wait(
        self: &Arc<Self>,
        claim: &Claim,
        deadline: Option<Stamp>,
        unwanted: &CancellationToken,
    ) -> Result<Attempt, Failure> {
        let key = self.settings.keys.of(claim.name());
        let mut pause = FIRST_POLL;
        let mut is_new = false;
        'place: loop {
            // A place among those who wait at the server, or else a look now and then.
            let limit = self.left(deadline).min(pause);
            pause = (pause * 3 / 2).min(LAST_POLL);
            let Ok(Ok(place)) = timeout(limit, Arc::clone(&self.waiting).acquire_owned()).await else {
                if let Some(attempt) = self.look(claim, deadline, unwanted).await? {
                    return Ok(attempt);
                }
                continue;
            };
            loop {
                let mut turn = self.holdings.turn(key).await;
                if unwanted.is_cancelled() {
                    return Ok(Attempt::busy());
                }
                if let Some(attempt) = self.known(&mut turn, claim).await? {
                    let attempt = self.if_wanted(&mut turn, key, claim, attempt, unwanted).await?;
                    if matches!(attempt, Attempt::Granted(_)) || self.ends(deadline, unwanted) {
                        return Ok(attempt);
                    }
                    // A sibling holds it, which the caller should have seen to: look again later.
                    drop((turn, place));
                    sleep(limit).await;
                    continue 'place;
                }
                let session = match self.own(claim.ttl()).await {
                    Ok(session) => session.carry(),
                    // The session that this client has already can still take it.
                    Err(failure) if failure.is_about_room() => {
                        drop((turn, place));
                        if let Some(attempt) = self.look(claim, deadline, unwanted).await? {
                            return Ok(attempt);
                        }
                        sleep(limit).await;
                        continue 'place;
                    }
                    Err(failure) => return Err(failure),
                };
                match session
                    .wait_lock(key, claim.label(), self.left(deadline), &self.seen)
                    .await
                {
                    Ok(Some(drawn)) => {
                        let lease = own_lease(&session, claim, &drawn);
                        let granted = held(&mut turn, claim, &drawn, lease, session, None);
                        return self.if_wanted(&mut turn, key, claim, granted, unwanted).await;
                    }
                    Ok(None) => self.leave(session),
                    Err(failure) => {
                        let over = !session.is_useful();
                        self.leave(session);
                        // One that had ended unnoticed, with all that the wait came to. Another one has not.
                        if !over || is_new {
                            return Err(failure);
                        }
                        is_new = true;
                        continue;
                    }
                }
                is_new = false;
                drop(turn);
                if self.ends(deadline, unwanted) {
                    return Ok(Attempt::busy());
                }
                // Others who wait take their turn.
                if self.waiting.available_permits() == 0 {
                    break;
                }
            }
            drop(place);
        }
    }

    /// One attempt; `None` if it is to be waited for on.
    async fn look(
        self: &Arc<Self>,
        claim: &Claim,
        deadline: Option<Stamp>,
        unwanted: &CancellationToken,
    ) -> Result<Option<Attempt>, Failure> {
        let attempt = self.try_acquire(claim, unwanted).await?;
        let is_over = matches!(attempt, Attempt::Granted(_)) || self.ends(deadline, unwanted);
        Ok(is_over.then_some(attempt))
    }

    fn ends(&self, deadline: Option<Stamp>, unwanted: &CancellationToken) -> bool {
        let over = deadline.is_some_and(|deadline| deadline <= self.clock.now());
        over || unwanted.is_cancelled() || self.is_closed()
    }

    fn left(&self, deadline: Option<Stamp>) -> Duration {
        deadline.map_or(Duration::MAX, |deadline| deadline.since(self.clock.now()))
    }
}
