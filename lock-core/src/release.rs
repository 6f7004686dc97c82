//! How a lock is let go of: handed to the next in line here, or released at the server, and never forgotten.

use std::sync::Arc;
use std::time::Duration;

use crate::ask::ask;
use crate::engine::Core;
use crate::pending::{Outcome, Pending};
use crate::queue::{Next, Turn, Waiter};
use crate::release_slots::ReleaseSlots;
use crate::sync::time;
use crate::{Claim, LockError, Outage, Released, Stamp};

/// How long a client may keep a contended lock to itself where the server has no queue.
const STINT: Duration = Duration::from_millis(100);
const FIRST_RETRY: Duration = Duration::from_millis(50);
const LAST_RETRY: Duration = Duration::from_secs(1);

/// What the server may have reserved for a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reservation {
    /// Nothing.
    None,
    /// It was asked for, and not answered: whatever it came to, it is to be ended.
    Asked,
    /// It was made, and stays until then.
    Until(Stamp),
}

impl Core {
    /// Lets go of a lock that was held, in favour of the next in the local queue if there is one. If the name is reserved, nobody gets
    /// it before that is over.
    pub(crate) async fn let_go(
        self: &Arc<Self>,
        claim: Claim,
        turn: Turn,
        reservation: Reservation,
    ) -> Result<Released, LockError> {
        let unreleased = Unreleased::new(self, &claim, reservation);
        turn.releasing();
        let next = match self.rest(reservation) {
            Some(_) => None,
            None => self.next_here(&turn),
        };
        let outcome = match next {
            Some(waiter) => self.hand_over(&claim, turn, waiter).await,
            None => {
                let outcome = self.release_once(&claim, reservation, &self.release_slots).await;
                self.pass_on(turn);
                outcome
            }
        };
        if let Ok(released) = outcome {
            unreleased.done();
            if released == Released::Released {
                self.stats.released.add();
                tracing::debug!(target: "fencelock", name = %claim.name(), "released");
            }
        }
        outcome
    }

    /// Undoes whatever the server may have done with a claim that nobody waits for any more.
    pub(crate) fn clean_up(self: &Arc<Self>, claim: Claim, turn: Turn) {
        turn.releasing();
        self.stats.abandoned.add();
        let core = Arc::clone(self);
        let work = async move {
            let unreleased = Unreleased::new(&core, &claim, Reservation::None);
            let outcome = core.release_once(&claim, Reservation::None, &core.release_slots).await;
            drop(turn);
            if outcome.is_ok() {
                unreleased.done();
            }
        };
        if let Err(error) = self.spawn_release(self.releasing(), work) {
            tracing::warn!(target: "fencelock", error = format_args!("{error:#}"), "an abandoned claim could not be cleaned up");
        }
    }

    /// The next in the local queue, unless it is other processes' turn.
    fn next_here(&self, turn: &Turn) -> Option<Waiter> {
        if self.must_give_way(turn) {
            None
        } else {
            turn.take_next()
        }
    }

    fn must_give_way(&self, turn: &Turn) -> bool {
        !self.capabilities.fair && turn.stint.is_some_and(|since| self.clock.now().since(since) >= STINT)
    }

    /// Passes the turn on. After a long stint the next one here waits a little first: others poll for this lock, and
    /// would always come too late.
    fn pass_on(self: &Arc<Self>, turn: Turn) {
        let pause = self.capabilities.give_way;
        if pause.is_zero() || !self.must_give_way(&turn) {
            return;
        }
        // If nothing can be spawned any more, the turn is dropped, which passes it on.
        let _ = self.spawn(async move {
            time::sleep(pause).await;
            drop(turn);
        });
    }

    async fn hand_over(self: &Arc<Self>, from: &Claim, mut turn: Turn, waiter: Waiter) -> Result<Released, LockError> {
        turn.stint.get_or_insert_with(|| self.clock.now());
        let Waiter { wish, reply, .. } = waiter;
        let mut to = Pending::new(Arc::clone(self), wish.claim(), turn);
        to.send();
        let handed = ask("hand-over", self.op_timeout, async {
            self.backend.hand_over(from, to.claim()).await
        })
        .await;
        let (released, accepted) = match handed {
            Ok(handed) => (Ok(handed.from), to.answered(true, Ok(handed.to), &wish)),
            // Nothing is known of either claim: the caller sees to `from`, the waiter to its own.
            Err(error) => (Err(error.clone()), to.answered(false, Err(error), &wish)),
        };
        let next = match accepted {
            Ok(Outcome::Guard(guard)) => {
                self.stats.handed_over.add();
                Next::Handed(guard)
            }
            Ok(Outcome::Busy(busy)) => Next::Asked {
                pending: to,
                answer: Ok(busy),
            },
            Err(error) => Next::Asked {
                pending: to,
                answer: Err(error),
            },
        };
        // A waiter that went away meanwhile hands it back, and the drop passes it on.
        let _ = reply.send(next);
        released
    }

    /// What is left of a reservation that was made; `None` if that is nothing.
    fn rest(&self, reservation: Reservation) -> Option<Duration> {
        let Reservation::Until(until) = reservation else {
            return None;
        };
        let rest = until.since(self.clock.now());
        Some(rest).filter(|rest| !rest.is_zero())
    }

    async fn release_once(
        &self,
        claim: &Claim,
        reservation: Reservation,
        slots: &ReleaseSlots,
    ) -> Result<Released, LockError> {
        let _slot = slots.take(self.op_timeout).await?;
        let outcome = ask("release", self.op_timeout, async {
            match self.rest(reservation) {
                Some(rest) => self.backend.release_reserved(claim, rest).await,
                None => self.backend.release(claim).await,
            }
        })
        .await;
        if outcome.is_ok() {
            slots.answered();
        }
        outcome
    }

    /// Goes on trying until it works, or until the server must have let go by itself.
    fn retry_release(self: &Arc<Self>, claim: Claim, reservation: Reservation) {
        let core = Arc::clone(self);
        // For how long the server may keep what is not released.
        let kept = match reservation {
            Reservation::Asked => claim.ttl().max(claim.at_least().unwrap_or_default()),
            Reservation::None | Reservation::Until(_) => claim.ttl(),
        };
        let until = self.clock.now() + kept;
        let work = async move {
            let unreleased = Unreleased::new(&core, &claim, reservation);
            let mut pause = FIRST_RETRY;
            let mut outage: Option<Outage> = None;
            loop {
                core.stats.release_errors.add();
                if core.clock.now() >= until {
                    return unreleased.done();
                }
                // At the end nobody waits for a whole ttl.
                if core.closing.is_cancelled() {
                    core.stats.unreleased.add();
                    return unreleased.done();
                }
                tokio::select! {
                    () = time::sleep(pause.mul_f64(0.5 + fastrand::f64())) => {}
                    () = core.closing.cancelled() => {}
                }
                match core.release_once(&claim, reservation, &core.retry_slots).await {
                    Ok(_) => {
                        outage.into_iter().for_each(Outage::end);
                        return unreleased.done();
                    }
                    Err(error) => {
                        outage.get_or_insert_with(|| core.release_outages.begin(&error));
                    }
                }
                pause = (pause * 2).min(LAST_RETRY);
            }
        };
        if let Err(error) = self.spawn_release(self.releasing(), work) {
            tracing::warn!(target: "fencelock", error = format_args!("{error:#}"), "a failed release could not be tried again");
        }
    }
}

/// A claim whose release has not been acknowledged. Dropping it has the release tried again, also when a task is dropped with its
/// runtime.
struct Unreleased {
    core: Arc<Core>,
    claim: Option<Claim>,
    reservation: Reservation,
}

impl Unreleased {
    fn new(core: &Arc<Core>, claim: &Claim, reservation: Reservation) -> Self {
        Self {
            core: Arc::clone(core),
            claim: Some(claim.clone()),
            reservation,
        }
    }

    /// The server keeps the claim no longer, or nothing more can be done about it.
    fn done(mut self) {
        self.claim = None;
    }
}

impl Drop for Unreleased {
    fn drop(&mut self) {
        if let Some(claim) = self.claim.take() {
            self.core.retry_release(claim, self.reservation);
        }
    }
}
