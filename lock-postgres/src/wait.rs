//! Waiting in the server's own queue for a lock.

use std::sync::Arc;
use std::time::Duration;

use lock_core::{Attempt, Claim, Stamp};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::failure::Failure;
use crate::requests::{held, own_lease};
use crate::sessions::Sessions;

/// How long one statement waits at most. A longer one would keep the vacuum, and the making of indexes, waiting with it;
/// and from a second on the server would look for deadlocks.
const SLICE: Duration = Duration::from_millis(500);

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
        loop {
            let attempt = self.try_acquire(claim).await?;
            if matches!(attempt, Attempt::Granted(_)) || self.ends(deadline, unwanted) {
                return Ok(attempt);
            }
            // A place among those who wait at the server, or else another look a little later.
            let limit = self.left(deadline).min(pause);
            pause = (pause * 3 / 2).min(LAST_POLL);
            let Ok(Ok(place)) = timeout(limit, Arc::clone(&self.waiting).acquire_owned()).await else {
                continue;
            };
            loop {
                let mut turn = self.holdings.turn(key).await;
                if let Some(attempt) = self.known(&mut turn, claim).await? {
                    if matches!(attempt, Attempt::Granted(_)) || self.ends(deadline, unwanted) {
                        return Ok(attempt);
                    }
                    // A sibling holds it, which the caller should have seen to: look again later.
                    break;
                }
                let session = self.own(claim.ttl()).await?.carry();
                let slice = (claim.ttl() / 5).min(SLICE).min(self.left(deadline));
                match session.wait_lock(key, slice, &self.seen).await {
                    Ok(Some(drawn)) => {
                        let lease = own_lease(&session, claim, &drawn);
                        let granted = held(&mut turn, claim, &drawn, lease, session, None);
                        drop(turn);
                        if unwanted.is_cancelled() {
                            self.release(claim).await?;
                            return Ok(Attempt::busy());
                        }
                        return Ok(granted);
                    }
                    Ok(None) => self.leave(session),
                    Err(failure) => {
                        self.leave(session);
                        return Err(failure);
                    }
                }
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

    fn ends(&self, deadline: Option<Stamp>, unwanted: &CancellationToken) -> bool {
        let over = deadline.is_some_and(|deadline| deadline <= self.clock.now());
        over || unwanted.is_cancelled() || self.is_closed()
    }

    fn left(&self, deadline: Option<Stamp>) -> Duration {
        deadline.map_or(Duration::MAX, |deadline| deadline.since(self.clock.now()))
    }
}
