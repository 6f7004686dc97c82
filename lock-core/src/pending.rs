//! A claim that is at the server and not a guard yet.

use std::sync::Arc;

use crate::engine::{Core, runtime_ended};
use crate::guard::{Held, LockGuard};
use crate::queue::Turn;
use crate::request::Wish;
use crate::{Attempt, Busy, Claim, LockError};

pub(crate) enum Outcome {
    Guard(LockGuard),
    Busy(Busy),
}

/// A claim that is at the server and not a guard yet. Dropping it cleans up: whatever the server may have done with the
/// claim is undone before the turn passes on.
pub(crate) struct Pending {
    core: Arc<Core>,
    claim: Claim,
    turn: Option<Turn>,
    /// Whether the server may know of the claim.
    sent: bool,
}

impl Pending {
    pub(crate) fn new(core: Arc<Core>, claim: Claim, turn: Turn) -> Self {
        Self {
            core,
            claim,
            turn: Some(turn),
            sent: false,
        }
    }

    pub(crate) fn claim(&self) -> &Claim {
        &self.claim
    }

    /// The server may know of the claim from now on, also if the request is dropped. Returns whether it might before, for
    /// [`answered`](Self::answered).
    pub(crate) fn send(&mut self) -> bool {
        std::mem::replace(&mut self.sent, true)
    }

    /// The request has ended so.
    pub(crate) fn answered(
        &mut self,
        before: bool,
        answer: Result<Attempt, LockError>,
        wish: &Wish,
    ) -> Result<Outcome, LockError> {
        if answer.as_ref().is_err_and(LockError::is_unsent) {
            self.sent = before;
        }
        self.accept(self.core.heard(answer)?, wish)
    }

    /// The server's answer is busy, which leaves nothing behind.
    pub(crate) fn busy(&mut self, busy: &Busy) {
        self.sent = false;
        self.told(busy);
    }

    /// The server said busy, and the claim may wait there.
    pub(crate) fn told(&self, busy: &Busy) {
        if let Some(turn) = &self.turn {
            turn.busy(busy);
        }
    }

    /// The request failed; `is_final` if the others that wait for a first answer fail with it.
    pub(crate) fn failed(&self, error: &LockError, is_final: bool) {
        if let Some(turn) = &self.turn {
            turn.failed(error, is_final);
        }
    }

    /// Makes a guard of a grant.
    ///
    /// A grant whose lease has run out by the time it is looked at does not count; the claim stays to be cleaned up.
    pub(crate) fn accept(&mut self, attempt: Attempt, wish: &Wish) -> Result<Outcome, LockError> {
        let grant = match attempt {
            Attempt::Busy(busy) => return Ok(Outcome::Busy(busy)),
            Attempt::Granted(grant) => grant,
        };
        if grant.claim != self.claim {
            return Err(LockError::unavailable(
                "acquire",
                "the backend granted another claim; please report it to its authors".to_owned(),
            ));
        }
        let now = self.core.clock.now();
        if !grant.lease.is_valid(now) {
            return Err(LockError::unavailable(
                "acquire",
                format!(
                    "the grant arrived after its lease of {:?} had run out; if round trips to the server take that long, raise \
                     the ttl",
                    grant.lease.ttl()
                ),
            ));
        }
        if let Some(reason) = grant.revoked() {
            return Err(LockError::unavailable(
                "acquire",
                format!("the lock was granted and lost at once: {reason}"),
            ));
        }
        let Some(turn) = self.turn.take() else {
            return Err(runtime_ended());
        };
        self.sent = false;
        turn.held(&self.claim, grant.token);
        let held = Held::new(Arc::clone(&self.core), grant, turn, wish, now);
        let guard = LockGuard::new(held);
        // A shutdown that began meanwhile may not have seen this one; dropping it releases.
        if self.core.closing.is_cancelled() {
            Err(LockError::closed())
        } else {
            Ok(Outcome::Guard(guard))
        }
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if self.sent
            && let Some(turn) = self.turn.take()
        {
            self.core.clean_up(self.claim.clone(), turn);
        }
    }
}
