//! The state of a guard: the hold of a claim, which the watchdog shares.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use crate::acquire_options::{AcquireOptions, Renew};
use crate::client::ClientInner;
use crate::release::{Release, Releasing, Reservation};
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
    /// That of the request that it was granted to, and when.
    pub(crate) serial: u64,
    pub(crate) since: SystemTime,
    /// The caller of that request left before it had the guard, which is about to be dropped.
    pub(crate) is_undelivered: AtomicBool,
    /// Until when the client keeps the claim after this hold, for the next one, in nanoseconds. Zero if it does not. The mutex of the names orders
    /// its changes.
    kept_until: AtomicU64,
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
        serial: u64,
        now: Stamp,
    ) -> Arc<Self> {
        let terms = Terms::new(options, &grant.lease, now);
        Arc::new(Self::of(core, grant, key, terms, serial))
    }

    /// The hold after this one, by the same grant.
    pub(crate) fn next(&self, token: FencingToken, options: &AcquireOptions, serial: u64, now: Stamp) -> Arc<Self> {
        let mut terms = Terms::new(options, &self.grant.lease, now);
        terms.run_until = self.terms.run_until;
        let mut next = Self::of(&self.core, self.grant.clone(), &self.key, terms, serial);
        next.token = token;
        next.kept_until = AtomicU64::new(self.kept_until.load(Ordering::Relaxed));
        Arc::new(next)
    }

    /// The hold of the same claim, once others may share it.
    pub(crate) fn shared(&self, grant: Grant, key: &Arc<str>) -> Arc<Self> {
        let mut shared = Self::of(&self.core, grant, key, self.terms, self.serial);
        shared.token = self.token;
        Arc::new(shared)
    }

    fn of(core: &Arc<ClientInner>, grant: Grant, key: &Arc<str>, terms: Terms, serial: u64) -> Self {
        core.stats.held.add();
        let own = if grant.first_token() == grant.token {
            grant.revocation().clone()
        } else {
            grant.revocation().child()
        };
        Self {
            core: Arc::clone(core),
            token: grant.first_token(),
            grant,
            own,
            key: Arc::clone(key),
            serial,
            since: SystemTime::now(),
            is_undelivered: AtomicBool::new(false),
            terms,
            kept_until: AtomicU64::new(0),
            owner_shown: AtomicBool::new(false),
            reservation: Mutex::new(Reservation::None),
            has_ended: AtomicBool::new(false),
        }
    }

    /// The token of the next hold, if the claim may go to another guard of this client without a request.
    pub(crate) fn next_token(&self, now: Stamp) -> Option<FencingToken> {
        self.token_until(self.kept_until().unwrap_or(self.terms.run_until), now)
    }

    /// The same, if that may be until `end`. A lease that is not renewed as it should be is released: the server knows more.
    fn token_until(&self, end: Stamp, now: Stamp) -> Option<FencingToken> {
        let lease = &self.grant.lease;
        let may_run = self.token < self.grant.token
            && self.grant.claim.mode() == Mode::Exclusive
            && self.own.reason() == Some(LossReason::Released)
            && self.grant.revoked().is_none()
            && now < end
            && !self.owner_shown.load(Ordering::Relaxed)
            && lease.deadline().since(now) >= lease.ttl() / 3;
        FencingToken::new(self.token.get() + 1).ok().filter(|_| may_run)
    }

    /// Keeps the claim of this hold, which has ended, for the next one: at most for `length` since no waiter wanted it for the first time. False if
    /// it is to be released.
    pub(crate) fn keep(&self, length: Duration, now: Stamp) -> bool {
        if length.is_zero() || !self.terms.may_linger {
            return false;
        }
        let length = length.min(self.grant.lease.ttl() / 3);
        let end = self.kept_until().unwrap_or(self.terms.run_until.max(now + length));
        let is_kept = self.token_until(end, now).is_some();
        if is_kept {
            self.kept_until.store(end.as_nanos(), Ordering::Relaxed);
        }
        is_kept
    }

    fn kept_until(&self) -> Option<Stamp> {
        let nanos = self.kept_until.load(Ordering::Relaxed);
        (nanos > 0).then(|| Stamp::from_nanos(nanos))
    }

    pub(crate) fn lease(&self) -> &Lease {
        &self.grant.lease
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

    /// When the hold ends whatever the server says; of one that has ended and is kept, when that is over.
    pub(crate) fn limit(&self) -> Option<Stamp> {
        match self.has_ended() {
            true => self.kept_until(),
            false => self.terms.limit.map(|(at, _)| at),
        }
    }

    /// All ends that it may have in the schedule of the watchdog.
    pub(crate) fn limits(&self) -> [Option<Stamp>; 2] {
        [self.terms.limit.map(|(at, _)| at), self.kept_until()]
    }

    /// When the lock ends if nothing more is heard from the server.
    pub(crate) fn end(&self) -> Stamp {
        let deadline = self.grant.lease.deadline();
        self.limit().map_or(deadline, |limit| limit.min(deadline))
    }

    /// Whether it was revoked: the hold, or the claim of one that has ended.
    pub(crate) fn is_revoked(&self) -> bool {
        match self.has_ended() {
            true => self.grant.revoked().is_some(),
            false => self.own.reason().is_some(),
        }
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
    pub(crate) fn let_go(
        self: &Arc<Self>,
        reason: LossReason,
        reply: Option<oneshot::Sender<Result<Released, LockError>>>,
    ) -> bool {
        let starting = self.core.about_to_start();
        let Some(counted) = self.finish(reason) else {
            return false;
        };
        let (now, reservation) = (self.core.clock.now(), self.reservation());
        let mut release = Release::new(self.grant.claim.clone(), Some(self.lease()), now, counted);
        if reservation == Reservation::Requested {
            let at_least = release.claim.at_least().unwrap_or_default();
            release.until = release.until.max(now + at_least);
        }
        (release.reservation, release.reply, release.is_clean_up) = (reservation, reply, false);
        self.core.pass_on(self, release);
        drop(starting);
        true
    }

    /// Ends the hold for that reason, and leaves its claim to the caller. `None` if it has ended before.
    pub(crate) fn finish(&self, reason: LossReason) -> Option<Releasing> {
        // Counted first: a caller that finds the hold ended, and drains then, waits for this release.
        let counted = self.core.names.releasing();
        if self.has_ended.swap(true, Ordering::AcqRel) {
            return None;
        }
        self.lost(self.core.clock.now());
        // Quietly: the watchdog is about to forget this hold.
        let _ = self.own.fire_quietly(reason);
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
        Some(counted)
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::Acquire)
    }
}

impl fmt::Debug for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Held")
            .field("grant", &self.grant)
            .finish_non_exhaustive()
    }
}
#[cfg(test)]
mod sz {
    #[test]
    fn sz() {
        use std::mem::size_of as s;
        println!(
            "Held {} Terms {} Grant {} Lease {} Reservation {} Revocation {} Stamp {} LossReason {}",
            s::<super::Held>(),
            s::<super::Terms>(),
            s::<crate::Grant>(),
            s::<crate::Lease>(),
            s::<super::Reservation>(),
            s::<crate::Revocation>(),
            s::<crate::Stamp>(),
            s::<crate::LossReason>()
        );
        println!("guard {}", s::<crate::LockGuard>());
    }
}
