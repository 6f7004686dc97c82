//! The state of a guard: the hold of a claim, which the watchdog shares.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::acquire_options::{AcquireOptions, Renew};
use crate::client::ClientInner;
use crate::release::{Release, Releasing, Reply, Reservation};
use crate::{FencingToken, Grant, Lease, LockError, LossReason, LossSignal, Mode, Released, Revocation, Stamp};

/// How long after a grant by the server other waiters of the client get its claim without a request. Those of other clients wait for that much
/// longer at most.
const LONGEST_RUN: Duration = Duration::from_millis(5);

/// A hold of a claim.
pub(crate) struct Held {
    pub(crate) core: Arc<ClientInner>,
    pub(crate) grant: Grant,
    /// One of the grant's block.
    pub(crate) token: FencingToken,
    /// Revocation of this hold. It is the grant's if no other hold of the grant can follow.
    pub(crate) own: Revocation,
    /// The key under which the client queues for the name.
    pub(crate) key: Arc<str>,
    terms: Terms,
    /// No guard has it: the client keeps the claim for the next one, until this is cancelled.
    idle: Option<CancellationToken>,
    /// The owner of the claim may be known as that of this hold.
    pub(crate) owner_shown: AtomicBool,
    reservation: Mutex<Reservation>,
    has_ended: AtomicBool,
}

/// What was agreed for a hold.
#[derive(Clone, Copy)]
struct Terms {
    renews: bool,
    may_linger: bool,
    /// Until when its claim may go from one guard to another without a request.
    run_until: Stamp,
    /// The client has begun to keep the claim while no guard has it.
    lingers: bool,
    /// When the hold ends whatever the server says, and why.
    limit: Option<(Stamp, LossReason)>,
}

impl Terms {
    fn new(options: &AcquireOptions, lease: &Lease, now: Stamp) -> Self {
        let mut limit = options.max_hold.map(|longest| (now + longest, LossReason::MaxHold));
        // Also if the backend gave it a lease that others keep alive.
        let end = (lease.deadline(), LossReason::Expired);
        if options.renew == Renew::Never && limit.is_none_or(|(at, _)| end.0 < at) {
            limit = Some(end);
        }
        Self {
            renews: options.renew == Renew::UntilReleased,
            may_linger: options.may_linger,
            run_until: now + LONGEST_RUN,
            lingers: false,
            limit,
        }
    }
}

impl Held {
    /// The first hold of a grant.
    pub(crate) fn new(
        core: &Arc<ClientInner>,
        grant: Grant,
        key: &Arc<str>,
        options: &AcquireOptions,
        now: Stamp,
    ) -> Arc<Self> {
        let own = if grant.first_token() == grant.token {
            grant.revocation().clone()
        } else {
            grant.revocation().child()
        };
        let terms = Terms::new(options, &grant.lease, now);
        let token = grant.first_token();
        Self::of(core, grant, token, own, key, terms, None)
    }

    /// The hold after this one, by the same grant.
    pub(crate) fn next(&self, token: FencingToken, options: &AcquireOptions, now: Stamp) -> Arc<Self> {
        let Terms { run_until, lingers, .. } = self.terms;
        let terms = Terms {
            run_until,
            lingers,
            ..Terms::new(options, &self.grant.lease, now)
        };
        let (grant, own) = (self.grant.clone(), self.grant.revocation().child());
        Self::of(&self.core, grant, token, own, &self.key, terms, None)
    }

    /// Keeps the claim of this hold, which has ended, for the next one: at most for `length` since no waiter wanted it for the first time.
    pub(crate) fn linger(&self, length: Duration, now: Stamp) -> Option<Arc<Self>> {
        if self.is_idle() || !self.terms.may_linger {
            return None;
        }
        let mut terms = self.terms;
        if !std::mem::replace(&mut terms.lingers, true) {
            terms.run_until = terms.run_until.max(now + length.min(self.grant.lease.ttl() / 3));
        }
        self.token_until(terms.run_until, now)?;
        terms.limit = Some((terms.run_until, LossReason::Released));
        let (grant, own) = (self.grant.clone(), self.grant.revocation().child());
        let idle = Some(CancellationToken::new());
        Some(Self::of(&self.core, grant, self.token, own, &self.key, terms, idle))
    }

    /// The hold of the same claim, once others may share it.
    pub(crate) fn shared(&self, grant: Grant, key: &Arc<str>) -> Arc<Self> {
        let own = grant.revocation().clone();
        Self::of(&self.core, grant, self.token, own, key, self.terms, None)
    }

    fn of(
        core: &Arc<ClientInner>,
        grant: Grant,
        token: FencingToken,
        own: Revocation,
        key: &Arc<str>,
        terms: Terms,
        idle: Option<CancellationToken>,
    ) -> Arc<Self> {
        if idle.is_none() {
            core.stats.held.add();
        }
        Arc::new(Self {
            core: Arc::clone(core),
            grant,
            token,
            own,
            key: Arc::clone(key),
            terms,
            idle,
            owner_shown: AtomicBool::new(false),
            reservation: Mutex::new(Reservation::None),
            has_ended: AtomicBool::new(false),
        })
    }

    /// The token of the next hold, if the claim may go to another guard of this client without a request. A lease that is not renewed as it
    /// should be is released: the server knows more.
    pub(crate) fn next_token(&self, now: Stamp) -> Option<FencingToken> {
        self.token_until(self.terms.run_until, now)
    }

    fn token_until(&self, end: Stamp, now: Stamp) -> Option<FencingToken> {
        let lease = &self.grant.lease;
        let may_run = self.token < self.grant.token
            && self.grant.claim.mode() == Mode::Exclusive
            && self.own.reason() == Some(LossReason::Released)
            && now < end
            && !self.owner_shown.load(Ordering::Relaxed)
            && lease.deadline().since(now) >= lease.ttl() / 3;
        FencingToken::new(self.token.get() + 1).ok().filter(|_| may_run)
    }

    pub(crate) fn lease(&self) -> &Lease {
        &self.grant.lease
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.idle.is_some()
    }

    /// A claim that was kept has a guard again. Nothing for other holds.
    pub(crate) fn resume(&self) {
        if let Some(idle) = &self.idle {
            idle.cancel();
        }
    }

    /// Waits until the server has responded to the release of a claim that was kept, or has not, or until the claim has a guard again.
    pub(crate) async fn kept_no_more(&self) {
        if let Some(idle) = &self.idle {
            idle.cancelled().await;
        }
    }

    pub(crate) fn reservation(&self) -> Reservation {
        *self.reservation.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn set_reservation(&self, reservation: Reservation) {
        *self.reservation.lock().unwrap_or_else(PoisonError::into_inner) = reservation;
    }

    pub(crate) fn renews(&self) -> bool {
        self.terms.renews
    }

    pub(crate) fn is_held(&self) -> bool {
        self.lost(self.core.clock.now()).is_none()
    }

    pub(crate) fn signal(&self) -> LossSignal {
        LossSignal(self.own.clone())
    }

    /// Cancelled when the hold has ended. Cancelling it ends nothing.
    pub(crate) fn cancellation_token(&self) -> CancellationToken {
        self.own.token().child_token()
    }

    /// The error that says that the lock was lost.
    pub(crate) fn loss(&self, reason: LossReason) -> LockError {
        LockError::Lost {
            name: self.grant.claim.name().clone(),
            reason,
        }
    }

    /// When the hold ends whatever the server says.
    pub(crate) fn limit(&self) -> Option<Stamp> {
        self.terms.limit.map(|(at, _)| at)
    }

    /// When the lock ends if nothing more is heard from the server.
    pub(crate) fn end(&self) -> Stamp {
        let deadline = self.grant.lease.deadline();
        self.limit().map_or(deadline, |limit| limit.min(deadline))
    }

    /// Why the lock is not held any more. A deadline that has passed is made final by the look.
    pub(crate) fn lost(&self, now: Stamp) -> Option<LossReason> {
        if let Some(reason) = self.own.settle() {
            return Some(reason);
        }
        let limit = self.terms.limit.filter(|(at, _)| now >= *at);
        if limit.is_none() && self.grant.lease.is_valid(now) {
            return None;
        }
        if !self.core.is_of_this_process() {
            // A mutex that is taken to tell others may be locked for ever.
            return Some(limit.map_or(LossReason::Expired, |(_, reason)| reason));
        }
        if let Some((_, reason)) = limit {
            self.own.fire(reason);
        } else if self.grant.lease.expire(now) {
            return None;
        }
        self.own.settle()
    }

    /// Ends the hold for that reason. Its claim goes to the next waiter of this client, is kept, or is released. Returns false if it has ended
    /// before.
    pub(crate) fn let_go(self: &Arc<Self>, reason: LossReason, reply: Option<Reply>) -> bool {
        let starting = self.core.about_to_start();
        let Some(counted) = self.finish(reason) else {
            return false;
        };
        if self.core.hand_on(self) || self.core.linger(self) {
            if let Some(reply) = reply {
                let _ = reply.send(Ok(Released::Released));
            }
        } else {
            self.release(reply, counted);
        }
        drop(starting);
        true
    }

    /// Ends the hold for that reason, and leaves its claim to the caller. `None` if it has ended before.
    pub(crate) fn finish(&self, reason: LossReason) -> Option<Releasing> {
        // Counted first: a caller that finds the hold ended, and drains then, waits for this release.
        let counted = self.core.releasing();
        if self.has_ended.swap(true, Ordering::AcqRel) {
            return None;
        }
        self.end_for(reason);
        Some(counted)
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::Acquire)
    }

    /// Has the claim of the hold, which has ended, released.
    pub(crate) fn release(&self, reply: Option<Reply>, counted: Releasing) {
        self.core.watchdog.forget(self);
        let (claim, lease, reservation) = (self.grant.claim.clone(), &self.grant.lease, self.reservation());
        let kept = match reservation {
            Reservation::Requested => claim.ttl().max(claim.at_least().unwrap_or_default()),
            Reservation::None | Reservation::Until(_) => claim.ttl(),
        };
        let release = Release {
            until: self.core.clock.now() + kept,
            claim,
            reservation,
            shared: lease.claim().is_none().then(|| lease.clone()),
            reply,
            is_clean_up: self.is_idle(),
            kept: self.idle.clone().map(CancellationToken::drop_guard),
            _counted: counted,
        };
        self.core.release(&self.key, release);
    }

    fn end_for(&self, reason: LossReason) {
        self.lost(self.core.clock.now());
        // Quietly: the watchdog is about to forget this hold.
        let _ = self.own.fire_quietly(reason);
        if self.is_idle() {
            return;
        }
        self.core.stats.held.subtract();
        match self.own.reason() {
            None | Some(LossReason::Released) => {}
            Some(reason @ (LossReason::Shutdown | LossReason::MaxHold)) => {
                self.core.stats.lost.add();
                tracing::debug!(target: "fencelock", name = %self.grant.claim.name(), token = %self.token, %reason, "lock ended");
            }
            Some(reason) => {
                self.core.stats.lost.add();
                tracing::warn!(target: "fencelock", name = %self.grant.claim.name(), token = %self.token, %reason, "lock lost");
            }
        }
    }
}

impl fmt::Debug for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Held")
            .field("grant", &self.grant)
            .finish_non_exhaustive()
    }
}
