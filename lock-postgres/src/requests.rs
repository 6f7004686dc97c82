//! What is asked of the server for one claim.

use std::sync::{Arc, PoisonError};
use std::time::{Duration, SystemTime};

use lock_core::{Attempt, Busy, Claim, Grant, Lease, LeaseId, Released, Renewal};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use crate::carried::{Carried, Share};
use crate::failure::Failure;
use crate::holdings::{Holding, Turn};
use crate::session::Session;
use crate::sessions::Sessions;
use crate::tokens::Drawn;

/// How long a client that has woken another one for a lock leaves it to that one.
const GIVE_WAY: Duration = Duration::from_millis(10);

impl Sessions {
    pub(crate) async fn try_acquire(
        self: &Arc<Self>,
        claim: &Claim,
        unwanted: &CancellationToken,
    ) -> Result<Attempt, Failure> {
        let key = self.settings.keys.of(claim.name());
        let mut turn = self.holdings.turn(key).await;
        let attempt = self.try_in(&mut turn, key, claim).await?;
        self.if_wanted(&mut turn, key, claim, attempt, unwanted).await
    }

    /// The attempt; without the lock if its caller has gone. The release that follows may have overtaken it on another
    /// thread, and another attempt for the same claim may be next: so before the turn ends.
    async fn if_wanted(
        self: &Arc<Self>,
        turn: &mut Turn,
        key: i64,
        claim: &Claim,
        attempt: Attempt,
        unwanted: &CancellationToken,
    ) -> Result<Attempt, Failure> {
        if matches!(attempt, Attempt::Granted(_)) && unwanted.is_cancelled() {
            self.release_in(turn, key, claim).await?;
            return Ok(Attempt::busy());
        }
        Ok(attempt)
    }

    async fn try_in(self: &Arc<Self>, turn: &mut Turn, key: i64, claim: &Claim) -> Result<Attempt, Failure> {
        if let Some(attempt) = self.known(turn, claim).await? {
            return Ok(attempt);
        }
        self.let_others_come_first(key).await;
        match self.try_once(turn, key, claim).await {
            // A session that had ended unnoticed, with all that the attempt came to. Another one has not.
            Err((_, true)) => self.try_once(turn, key, claim).await.map_err(|(failure, _)| failure),
            tried => tried.map_err(|(failure, _)| failure),
        }
    }

    /// One attempt. A failure says too whether its session is over.
    async fn try_once(self: &Arc<Self>, turn: &mut Turn, key: i64, claim: &Claim) -> Result<Attempt, (Failure, bool)> {
        let alone = claim.own_lease();
        let session = if alone {
            self.own(claim.ttl()).await
        } else {
            self.shared(claim.ttl()).await
        };
        let session = session.map_err(|failure| (failure, false))?;
        let tried = self.try_lock(&session, key, claim.label(), claim.tokens_wanted()).await;
        match tried {
            Ok(Ok(drawn)) if alone => {
                let lease = own_lease(&session, claim, &drawn);
                Ok(held(turn, claim, &drawn, lease, session, None))
            }
            Ok(Ok(drawn)) => {
                let (lease, share) = session.share(drawn.sent);
                Ok(held(turn, claim, &drawn, lease, session, Some(share)))
            }
            Ok(Err(busy)) => {
                if alone {
                    self.spare(session);
                }
                Ok(busy.into())
            }
            Err(failure) => {
                let over = !session.is_useful();
                if alone || over {
                    self.spare(session);
                }
                Err((failure, over))
            }
        }
    }

    /// The answer that needs no attempt: this client holds it, for that claim or for another.
    ///
    /// Sessions are re-entrant: the server would grant it again.
    pub(crate) async fn known(&self, turn: &mut Turn, claim: &Claim) -> Result<Option<Attempt>, Failure> {
        let Some(holding) = turn.held() else { return Ok(None) };
        if holding.claim.owner() != claim.owner() {
            return Ok(Some(Busy::default().with_holder(holding.holder()).into()));
        }
        // Asked again for what it has: a full ttl again.
        match holding.session.beat().await {
            Ok(()) => Ok(turn.held().map(|holding| Attempt::Granted(holding.grant()))),
            Err(_) if holding.session.is_over() => Ok(None),
            Err(failure) => Err(failure),
        }
    }

    pub(crate) async fn renew(&self, lease: &Lease) -> Result<Renewal, Failure> {
        let session = match lease.id() {
            LeaseId::Shared(_) => self.by_lease(lease),
            LeaseId::Claim(claim) => {
                let key = self.settings.keys.of(claim.name());
                let mut turn = self.holdings.turn(key).await;
                let mine = turn.held().filter(|holding| holding.claim.owner() == claim.owner());
                mine.map(|holding| Arc::clone(&*holding.session))
            }
            _ => None,
        };
        let Some(session) = session.filter(|session| !session.is_over()) else {
            return Ok(Renewal::NotHeld);
        };
        // The core takes note of it, if it hears of it in time.
        match session.prove().await {
            Ok(()) => Ok(Renewal::Renewed),
            Err(_) if session.is_over() => Ok(Renewal::NotHeld),
            Err(failure) => Err(failure),
        }
    }

    pub(crate) async fn release(self: &Arc<Self>, claim: &Claim) -> Result<Released, Failure> {
        let key = self.settings.keys.of(claim.name());
        let mut turn = self.holdings.turn(key).await;
        self.release_in(&mut turn, key, claim).await
    }

    /// Unlocks, and ends the reservation, if there is one. What is left of it after a failure, the next release ends.
    pub(crate) async fn release_in(
        self: &Arc<Self>,
        turn: &mut Turn,
        key: i64,
        claim: &Claim,
    ) -> Result<Released, Failure> {
        // Before the lock is free, or the next one would find it reserved.
        let withdrawn = self.withdraw(turn, key, claim.owner()).await;
        let released = self.unlock_in(turn, key, claim).await;
        withdrawn.and(released)
    }

    /// Unlocks, and leaves a reservation as it is.
    pub(crate) async fn unlock_in(&self, turn: &mut Turn, key: i64, claim: &Claim) -> Result<Released, Failure> {
        let mine = turn
            .held()
            .is_some_and(|holding| holding.claim.owner() == claim.owner());
        // What is another's stays where it is.
        let Some(holding) = (if mine { turn.take() } else { None }) else {
            return Ok(Released::NotHeld);
        };
        match holding.session.release(key).await {
            Ok(unlocked) => {
                if unlocked.woke {
                    self.give_way(key);
                }
                let Holding { session, share, .. } = holding;
                drop(share);
                if session.carries() <= 1 {
                    self.spare(session);
                }
                Ok(if unlocked.was_held {
                    Released::Released
                } else {
                    Released::NotHeld
                })
            }
            // With the session everything that it carried has gone.
            Err(_) if holding.session.is_over() => Ok(Released::NotHeld),
            Err(failure) => {
                turn.put(holding);
                Err(failure)
            }
        }
    }

    /// Others were woken for that lock, and are on their way: this client would always be faster.
    fn give_way(&self, key: i64) {
        let now = self.clock.now();
        let mut gave_way = self.gave_way.lock().unwrap_or_else(PoisonError::into_inner);
        gave_way.retain(|_, until| *until > now);
        gave_way.insert(key, now + GIVE_WAY);
    }

    async fn let_others_come_first(&self, key: i64) {
        let until = self
            .gave_way
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&key);
        if let Some(until) = until {
            sleep(until.since(self.clock.now())).await;
        }
    }
}

/// The lease of a claim that has the session to itself, by the message that was granted.
fn own_lease(session: &Session, claim: &Claim, drawn: &Drawn) -> Lease {
    let lease = Lease::for_claim(claim, drawn.sent);
    session.fall_silent();
    session.wire.keep(Some(lease.clone()));
    lease
}

/// Takes note of a lock that was granted.
fn held(
    turn: &mut Turn,
    claim: &Claim,
    drawn: &Drawn,
    lease: Lease,
    session: Carried,
    share: Option<Share>,
) -> Attempt {
    let granted = Grant::new(claim.clone(), drawn.token, lease.clone()).with_first_token(drawn.first);
    let holding = Holding {
        claim: claim.clone(),
        token: drawn.token,
        lease,
        granted: granted.clone(),
        since: SystemTime::now(),
        share,
        session,
    };
    turn.put(holding);
    Attempt::Granted(granted)
}
