//! A claim that is at the server and not a guard yet.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use crate::ask::{ask, unbroken};
use crate::engine::{Core, runtime_ended};
use crate::guard::{Held, LockGuard};
use crate::queue::Turn;
use crate::request::Wish;
use crate::sync::oneshot;
use crate::{Attempt, Busy, BusySignal, Claim, LockError, Outage, Stamp};

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

    /// The claim is about to be sent.
    pub(crate) fn send(&mut self) {
        self.sent = true;
    }

    pub(crate) async fn try_acquire(&mut self, limit: Duration) -> Result<Attempt, LockError> {
        self.send();
        ask("acquire", limit, async {
            self.core.backend.try_acquire(&self.claim).await
        })
        .await
    }

    /// Waits at the server. During an outage nobody here knows that the name is busy, so that is told again then.
    pub(crate) async fn acquire(
        &mut self,
        deadline: Option<Stamp>,
        outage: &mut Option<Outage>,
    ) -> Result<Attempt, LockError> {
        self.send();
        let backend = &self.core.backend;
        if outage.is_none() {
            return unbroken("acquire", async { backend.acquire(&self.claim, deadline).await }).await;
        }
        let (busy, mut told) = signal();
        let request = async { backend.try_then_wait(&self.claim, deadline, busy).await };
        let mut request = pin!(unbroken("acquire", request));
        tokio::select! {
            biased;
            done = &mut request => {
                self.hears(&mut told);
                return done;
            }
            Ok(busy) = &mut told => {
                self.told(&busy);
                outage.take().into_iter().for_each(Outage::end);
            }
        }
        request.await
    }

    /// Whether the server said busy in the meantime, which is passed on.
    pub(crate) fn hears(&self, told: &mut oneshot::Receiver<Busy>) -> bool {
        let busy = told.try_recv();
        if let Ok(busy) = &busy {
            self.told(busy);
        }
        busy.is_ok()
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

    /// The request failed; `is_final` if it was the first one and is not repeated.
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
        if !grant.lease.is_valid(now) || grant.revoked().is_some() {
            return Err(LockError::unavailable(
                "acquire",
                format!(
                    "the grant arrived after its lease of {:?} had run out; if round trips to the server take that long, raise \
                     the ttl",
                    grant.lease.ttl()
                ),
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

/// What tells that the name is busy, and what hears it.
pub(crate) fn signal() -> (BusySignal, oneshot::Receiver<Busy>) {
    let (tell, told) = oneshot::channel();
    // Nobody listens any more if the answer came at the same time.
    (BusySignal::new(move |busy| drop(tell.send(busy))), told)
}
