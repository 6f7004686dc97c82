//! A lock that is held.

use std::fmt;
use std::future::{Future, IntoFuture, poll_fn};
use std::pin::pin;
use std::slice;
use std::sync::{Arc, PoisonError};
use std::task::Poll;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::ask::ask;
use crate::background::block_on;
use crate::engine::{Core, Releasing};
use crate::name_task::check;
use crate::names::{Release, Reservation};
use crate::request::{AcquireOptions, Renew, SHARES};
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Mutex, oneshot};
use crate::watchdog::Alarm;
use crate::{
    Attempt, FencingToken, Grant, Lease, LockError, LockName, LossReason, LossSignal, Mode, OwnerId, Released, Renewal,
    Revocation, Stamp, Term,
};

/// How long after a grant by the server other waiters of the client get its claim without a request. Those of other clients wait for that much
/// longer at most.
const LONGEST_RUN: Duration = Duration::from_millis(5);

/// A lock that is held, and renewed until it is released, dropped or lost.
///
/// Send [`token`](Self::token) with every write to what the lock protects, and let the resource refuse stale ones (see
/// [`fence`](crate::fence)): no lock can stop a process that was suspended between a look at
/// [`is_held`](Self::is_held) and its write.
///
/// Dropping the guard releases in the background, from any thread, also outside of a runtime. To know that it is
/// released, call [`release`](Self::release).
///
/// A child made by `fork` cannot use the guard that it inherits: [`run`](Self::run), [`renew_now`](Self::renew_now) and
/// [`release`](Self::release) fail with [`LockError::Configuration`], [`lost`](Self::lost) completes at once, and dropping it does
/// nothing. The copy stops being valid when the lease that it was copied with is over, as nothing renews it in the child.
///
/// `let _ = locks.lock("job").await?` drops the guard at once, without a warning of the compiler. Give it a name, if only `_guard`.
#[must_use = "dropping a guard releases its lock at once"]
pub struct LockGuard {
    held: Arc<Held>,
    /// Whether [`release`](Self::release) has ended the hold.
    released: bool,
}

/// What releasing a guard came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReleaseOutcome {
    /// The lock was held to this moment; if it went to another waiter of this client, as far as the client has heard from the server.
    Released,
    /// The lock had been lost before; somebody else may have held it since.
    AlreadyLost,
}

impl LockGuard {
    pub(crate) fn new(held: Arc<Held>) -> Self {
        Self { held, released: false }
    }

    /// The fencing token of this grant. It never changes.
    #[must_use]
    pub fn token(&self) -> FencingToken {
        self.held.token
    }

    /// The name that is locked, with all scopes.
    #[must_use]
    pub fn name(&self) -> &LockName {
        self.held.grant.claim.name()
    }

    /// The identifier of this acquisition. Once it was asked for, no later acquisition has the same one.
    ///
    /// With it another process can release this lock and no later one: [`Locks::release_owned`](crate::Locks::release_owned). So a lock whose
    /// guard was asked for it goes back to the server when it is released, instead of to the next waiter of this client.
    #[must_use]
    pub fn owner(&self) -> OwnerId {
        self.held.owner_shown.store(true, Ordering::Relaxed);
        self.held.grant.claim.owner()
    }

    /// How long the server keeps the lock after the last sign of life; at least what was asked for, or the ttl of the
    /// lease that it shares with others.
    #[must_use]
    pub fn ttl(&self) -> Duration {
        self.held.grant.lease.ttl()
    }

    /// How long the lock is certain to be held if it is not renewed from now on. Zero once it is lost.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        let now = self.held.core.clock.now();
        match self.held.lost(now) {
            Some(_) => Duration::ZERO,
            None => self.held.end().since(now),
        }
    }

    /// Whether the lock can still be believed in. Reads the clock every time; asks nobody.
    ///
    /// While the server keeps its lease, this is false before the server may let go.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.held.is_held()
    }

    /// A signal that tells when and why the lock is not held any more. Independent of the guard's lifetime.
    #[must_use]
    pub fn lost(&self) -> LossSignal {
        self.held.signal()
    }

    /// Runs `work` for as long as the lock is held.
    ///
    /// # Errors
    ///
    /// [`LockError::Lost`] if the lock was lost before `work` ended; `work` is dropped at its next await then. Also if the loss
    /// is noticed only afterwards, because `work` did not await in between.
    ///
    /// # Cancellation
    ///
    /// Dropping the future drops `work`; the guard stays held.
    pub async fn run<F: Future>(&self, work: F) -> Result<F::Output, LockError> {
        run_while_held(slice::from_ref(self), work).await
    }

    /// Cancelled as soon as the lock is not held any more: lost, released, or its guard dropped. For code that takes such tokens.
    ///
    /// Each call starts a small task, which ends with the hold. Where it can, use [`run`](Self::run), which also reads the clock: like
    /// [`lost`](Self::lost), the token is late if the machine was suspended.
    #[must_use]
    pub fn cancellation_token(&self) -> CancellationToken {
        self.held.cancellation_token()
    }

    /// What a leader sees of its lock.
    pub(crate) fn term(&self, stopping: &CancellationToken) -> Term {
        Term::new(Arc::clone(&self.held), stopping)
    }

    /// Fails in a forked child.
    fn check_process(&self) -> Result<(), LockError> {
        self.held.core.process.check().map_err(|error| error.of(self.name()))
    }

    /// The error if the lock is not held any more.
    fn check(&self) -> Result<(), LockError> {
        match self.held.lost(self.held.core.clock.now()) {
            Some(reason) => Err(self.held.loss(reason)),
            None => Ok(()),
        }
    }

    /// Releases the lock, and waits for the response of the server. If another task of this client waits for the lock, that may get it at
    /// once, without a request, for up to 5 ms after the server has granted it.
    ///
    /// # Errors
    ///
    /// [`LockError::Unavailable`] if the server did not answer. The lock is not held any more from this process's view,
    /// and the release is tried again in the background until the server must have let go by itself.
    /// [`LockError::Configuration`] in a forked child, where nothing is released.
    ///
    /// # Cancellation
    ///
    /// Dropping the future does not stop the release.
    pub async fn release(mut self) -> Result<ReleaseOutcome, LockError> {
        let held = Arc::clone(&self.held);
        self.check_process()?;
        let lost = held.lost(held.core.clock.now()).is_some();
        self.released = true;
        let (reply, outcome) = oneshot::channel();
        if !held.let_go(LossReason::Released, Some(reply)) {
            return Ok(ReleaseOutcome::AlreadyLost);
        }
        // It may have been lost since the look above.
        let lost = lost || held.own.reason() != Some(LossReason::Released);
        let outcome = outcome
            .await
            .unwrap_or_else(|_| Err(held.core.executor.dropped("release")));
        match outcome.map_err(|error| error.of(held.grant.claim.name()))? {
            Released::Released if !lost => Ok(ReleaseOutcome::Released),
            _ => Ok(ReleaseOutcome::AlreadyLost),
        }
    }

    /// Releases the lock and blocks the thread until the server has answered. See [`release`](Self::release) and
    /// [`LockRequest::acquire_blocking`](crate::LockRequest::acquire_blocking).
    ///
    /// # Errors
    ///
    /// As [`release`](Self::release).
    ///
    /// # Panics
    ///
    /// In a task of a runtime of tokio. The lock is released in the background then.
    #[track_caller]
    pub fn release_blocking(self) -> Result<ReleaseOutcome, LockError> {
        block_on(self.release())?
    }

    /// Has the server reserve the name. Until that has succeeded, dropping the guard frees the name at once.
    pub(crate) async fn reserve(&self, length: Duration) -> Result<(), LockError> {
        let held = &self.held;
        let (backend, claim) = (Arc::clone(&held.core.backend), held.grant.claim.clone());
        held.set_reservation(Reservation::Requested);
        let answer = held
            .core
            .call("reservation", async move { backend.reserve(&claim, length).await })
            .await;
        match answer.map_err(|error| error.of(self.name()))? {
            Renewal::Renewed => {
                // Later than the server counts from: at least that long.
                held.set_reservation(Reservation::Until(held.core.clock.now() + length));
                // If the hold has ended meanwhile, so has the reservation: its release came before this was known.
                self.check()
            }
            Renewal::NotHeld => {
                held.own.fire(LossReason::NotHeld);
                Err(held.loss(LossReason::NotHeld))
            }
        }
    }

    /// Makes the lock one that others may [share](crate::LockRequest::shared). No other client can hold the whole lock in between. The
    /// token stays the same, and so does the time of [`max_hold`](crate::LockRequest::max_hold). A signal that was taken before ends with
    /// [`LossReason::Released`].
    ///
    /// # Errors
    ///
    /// [`LockError::NotSupported`] where the backend has no [shares](crate::Capabilities::shared), and for a lock with
    /// [`at_least`](crate::LockRequest::at_least), [`LockError::Lost`] if the lock is lost,
    /// and [`LockError::Unavailable`] if the server did not answer. The lock is released then.
    ///
    /// # Cancellation
    ///
    /// Dropping the future releases the lock.
    pub async fn downgrade(self) -> Result<Self, LockError> {
        self.check_process()?;
        let core = Arc::clone(&self.held.core);
        let starting = core.about_to_start();
        let (tell, told) = oneshot::channel();
        let (name, dropped) = (self.name().clone(), core.executor.clone());
        // Not in the caller's task: a release must follow the request.
        core.spawn(async move {
            let _ = tell.send(self.share().await);
        })?;
        drop(starting);
        let told = told.await.unwrap_or_else(|_| Err(dropped.dropped("downgrade")));
        told.map_err(|error| error.of(&name))
    }

    async fn share(mut self) -> Result<Self, LockError> {
        let (held, core) = (Arc::clone(&self.held), Arc::clone(&self.held.core));
        // If this fails it is not known in which mode the server has the claim, so it goes to no other guard.
        held.owner_shown.store(true, Ordering::Relaxed);
        self.check()?;
        if held.grant.claim.mode() == Mode::Shared {
            return Ok(self);
        }
        if !core.capabilities.shared || held.options.at_least.is_some() {
            return Err(LockError::not_supported(SHARES));
        }
        let claim = held.grant.claim.clone().with_mode(Mode::Shared);
        let asked = ask("downgrade", core.op_timeout, async {
            core.backend.try_acquire(&claim).await
        })
        .await;
        let shared = asked.and_then(|attempt| match attempt {
            // Another token is that of a grant which others may have come before.
            Attempt::Granted(grant) if grant.token == held.grant.token => {
                check(&claim, &grant, core.clock.now())?;
                Ok(grant)
            }
            _ => {
                held.own.fire(LossReason::NotHeld);
                Err(held.loss(LossReason::NotHeld))
            }
        });
        let counted = shared.and_then(|grant| {
            self.check()?;
            let counted = held.finish(LossReason::Released);
            counted
                .map(|counted| (grant, counted))
                .ok_or_else(|| held.loss(LossReason::NotHeld))
        });
        let (grant, counted) = match counted {
            Ok(done) => done,
            Err(error) => {
                // The release of a hold that has ended may have reached the server before this request.
                if held.has_ended() {
                    core.clean_up_under(core.names.new_key(&held.key), claim);
                }
                return Err(error);
            }
        };
        self.released = true;
        let key = core.names.new_key(&held.key);
        core.names.vacate(&held.key, &key);
        core.watchdog.forget(&held);
        let shared = held.shared(grant, key);
        core.watchdog.watch(&shared);
        drop(counted);
        let guard = Self::new(shared);
        if core.names.is_closed() {
            Err(LockError::closed())
        } else {
            Ok(guard)
        }
    }

    /// Renews now instead of at the next third of the ttl.
    ///
    /// # Errors
    ///
    /// [`LockError::Lost`] if the lock is lost, [`LockError::Unavailable`] if the server did not answer; the lock is
    /// still held then, until its deadline. [`LockError::NotSupported`] for a lock that is not to be renewed.
    ///
    /// # Cancellation
    ///
    /// Dropping the future does not stop the renewal.
    pub async fn renew_now(&self) -> Result<(), LockError> {
        let held = &self.held;
        self.check_process()?;
        self.check()?;
        if held.options.renew == Renew::Never {
            let operation = "renewing a lock that was asked for without renewal";
            return Err(LockError::not_supported(operation).of(self.name()));
        }
        let starting = held.core.about_to_start();
        let (tell, told) = oneshot::channel();
        let (core, lease) = (Arc::clone(&held.core), held.grant.lease.clone());
        held.core.spawn(async move {
            let _ = tell.send(core.renew(&lease).await);
        })?;
        drop(starting);
        let told = told
            .await
            .unwrap_or_else(|_| Err(held.core.executor.dropped("renewal")));
        told.map_err(|error| error.of(self.name()))?;
        self.check()
    }
}

/// Runs `work` for as long as all of the locks are held.
pub(crate) async fn run_while_held<F: Future>(guards: &[LockGuard], work: F) -> Result<F::Output, LockError> {
    guards.first().map_or(Ok(()), LockGuard::check_process)?;
    let check = || guards.iter().try_for_each(LockGuard::check);
    let mut work = pin!(work);
    // The clock is read before each step of the work: the signal comes late if the machine slept.
    let watched = poll_fn(|cx| match check() {
        Err(lost) => Poll::Ready(Err(lost)),
        Ok(()) => work.as_mut().poll(cx).map(Ok),
    });
    let done = tokio::select! {
        biased;
        (at, reason) = first_loss(guards.iter().map(LockGuard::lost)) => return Err(guards[at].held.loss(reason)),
        done = watched => done?,
    };
    check().map(|()| done)
}

/// Waits for the first of the signals, and tells which one it is.
pub(crate) async fn first_loss(signals: impl IntoIterator<Item = LossSignal>) -> (usize, LossReason) {
    let mut waits: Vec<_> = signals.into_iter().map(IntoFuture::into_future).collect();
    poll_fn(|cx| {
        let told = waits
            .iter_mut()
            .enumerate()
            .find_map(|(at, wait)| match wait.as_mut().poll(cx) {
                Poll::Ready(reason) => Some((at, reason)),
                Poll::Pending => None,
            });
        told.map_or(Poll::Pending, Poll::Ready)
    })
    .await
}

impl Drop for LockGuard {
    fn drop(&mut self) {
        if self.released {
            return;
        }
        if self.held.core.process.is_current() {
            self.held.let_go(LossReason::Released, None);
        }
    }
}

impl fmt::Debug for LockGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockGuard")
            .field("name", self.name())
            .field("token", &self.token())
            .field("remaining", &self.remaining())
            .finish_non_exhaustive()
    }
}

/// A guard's state, which the watchdog shares.
pub(crate) struct Held {
    core: Arc<Core>,
    grant: Grant,
    /// One of the grant's block.
    token: FencingToken,
    /// Revocation of this hold. It is the grant's if no other hold of the grant can follow.
    own: Revocation,
    options: Arc<AcquireOptions>,
    run: Run,
    /// No guard has it: the client keeps the claim for the next one.
    is_idle: bool,
    /// The owner of the claim may be known as that of this hold.
    owner_shown: AtomicBool,
    /// When the hold ends whatever the server says, and why.
    limit: Option<(Stamp, LossReason)>,
    reservation: Mutex<Reservation>,
    /// The key under which the client queues for the name.
    key: Arc<str>,
    has_ended: AtomicBool,
}

/// The time in which a claim may go from one guard to another without a request.
#[derive(Clone, Copy)]
struct Run {
    until: Stamp,
    /// The client has begun to keep the claim while no guard has it.
    lingers: bool,
}

impl Held {
    /// The first hold of a grant.
    pub(crate) fn new(
        core: &Arc<Core>,
        grant: Grant,
        key: &Arc<str>,
        options: &Arc<AcquireOptions>,
        now: Stamp,
    ) -> Arc<Self> {
        let own = if grant.first_token() == grant.token {
            grant.revocation().clone()
        } else {
            Revocation::new()
        };
        let run = Run {
            until: now + LONGEST_RUN,
            lingers: false,
        };
        Self::build(core, (grant.first_token(), own), grant, key, options, now, run)
    }

    /// The hold after this one, by the same grant.
    pub(crate) fn next(&self, token: FencingToken, options: &Arc<AcquireOptions>, now: Stamp) -> Arc<Self> {
        let numbers = (token, Revocation::new());
        Self::build(
            &self.core,
            numbers,
            self.grant.clone(),
            &self.key,
            options,
            now,
            self.run,
        )
    }

    fn build(
        core: &Arc<Core>,
        (token, own): (FencingToken, Revocation),
        grant: Grant,
        key: &Arc<str>,
        options: &Arc<AcquireOptions>,
        now: Stamp,
        run: Run,
    ) -> Arc<Self> {
        core.stats.held.add();
        let mut limit = options.max_hold.map(|longest| (now + longest, LossReason::MaxHold));
        // Also if the backend gave it a lease that others keep alive.
        let end = (grant.lease.deadline(), LossReason::Expired);
        if options.renew == Renew::Never && limit.is_none_or(|(at, _)| end.0 < at) {
            limit = Some(end);
        }
        Arc::new(Self {
            core: Arc::clone(core),
            grant,
            token,
            own,
            options: Arc::clone(options),
            run,
            is_idle: false,
            owner_shown: AtomicBool::new(false),
            limit,
            reservation: Mutex::new(Reservation::None),
            key: Arc::clone(key),
            has_ended: AtomicBool::new(false),
        })
    }

    /// Keeps the claim of this hold, which has ended, for the next one: at most for `length` since no waiter wanted it for the first time.
    pub(crate) fn linger(&self, length: Duration, now: Stamp) -> Option<Arc<Self>> {
        if self.is_idle || !self.options.may_linger {
            return None;
        }
        let mut run = self.run;
        if !std::mem::replace(&mut run.lingers, true) {
            run.until = run.until.max(now + length.min(self.grant.lease.ttl() / 3));
        }
        self.token_until(run.until, now)?;
        Some(Arc::new(Self {
            core: Arc::clone(&self.core),
            grant: self.grant.clone(),
            token: self.token,
            own: Revocation::new(),
            options: Arc::clone(&self.options),
            run,
            is_idle: true,
            owner_shown: AtomicBool::new(false),
            limit: Some((run.until, LossReason::Released)),
            reservation: Mutex::new(Reservation::None),
            key: Arc::clone(&self.key),
            has_ended: AtomicBool::new(false),
        }))
    }

    /// The hold of the same claim, once others may share it.
    fn shared(&self, grant: Grant, key: Arc<str>) -> Arc<Self> {
        self.core.stats.held.add();
        Arc::new(Self {
            core: Arc::clone(&self.core),
            own: grant.revocation().clone(),
            token: self.token,
            grant,
            options: Arc::clone(&self.options),
            run: Run {
                until: self.run.until,
                lingers: false,
            },
            is_idle: false,
            owner_shown: AtomicBool::new(false),
            limit: self.limit,
            reservation: Mutex::new(Reservation::None),
            key,
            has_ended: AtomicBool::new(false),
        })
    }

    /// The token of the next hold, if the claim may go to another guard of this client without a request. A lease that is not renewed as it
    /// should be is released: the server knows more.
    pub(crate) fn next_token(&self, now: Stamp) -> Option<FencingToken> {
        self.token_until(self.run.until, now)
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

    pub(crate) fn core(&self) -> &Arc<Core> {
        &self.core
    }

    pub(crate) fn lease(&self) -> &Lease {
        &self.grant.lease
    }

    pub(crate) fn grant(&self) -> &Grant {
        &self.grant
    }

    pub(crate) fn token(&self) -> FencingToken {
        self.token
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.is_idle
    }

    pub(crate) fn key(&self) -> &Arc<str> {
        &self.key
    }

    pub(crate) fn options(&self) -> &AcquireOptions {
        &self.options
    }

    /// Has `alarm` raised when the hold is revoked, alone or with its grant.
    pub(crate) fn raise(&self, alarm: &Arc<Alarm>) {
        let (lease, id) = (self.grant.lease.serial(), self.grant.revocation().id());
        self.grant.revocation().alarm(alarm, lease, id);
        if self.own.id() != id {
            self.own.alarm(alarm, lease, id);
        }
    }

    /// Whether the hold was revoked, alone or with its grant or lease.
    pub(crate) fn is_revoked(&self) -> bool {
        self.own.reason().is_some() || self.grant.revoked().is_some()
    }

    fn reservation(&self) -> Reservation {
        *self.reservation.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_reservation(&self, reservation: Reservation) {
        *self.reservation.lock().unwrap_or_else(PoisonError::into_inner) = reservation;
    }

    pub(crate) fn renews(&self) -> bool {
        self.options.renew == Renew::UntilReleased
    }

    pub(crate) fn is_held(&self) -> bool {
        self.lost(self.core.clock.now()).is_none()
    }

    pub(crate) fn signal(&self) -> LossSignal {
        LossSignal {
            own: self.own.clone(),
            grant: self.grant.revocation().clone(),
            lease: self.grant.lease.revocation().clone(),
            process: Arc::clone(&self.core.process),
        }
    }

    pub(crate) fn cancellation_token(&self) -> CancellationToken {
        let token = CancellationToken::new();
        let (signal, cancelled) = (self.signal(), token.clone().drop_guard());
        // A task that cannot be started, or is dropped with its runtime, cancels as well: nothing else would tell the loss.
        let _ = self.core.executor.spawn(async move {
            signal.wait().await;
            drop(cancelled);
        });
        token
    }

    /// The error that says that the lock was lost.
    fn loss(&self, reason: LossReason) -> LockError {
        LockError::Lost {
            name: self.grant.claim.name().clone(),
            reason,
        }
    }

    /// When the hold ends whatever the server says.
    pub(crate) fn limit(&self) -> Option<Stamp> {
        self.limit.map(|(at, _)| at)
    }

    /// When the lock ends if nothing more is heard from the server.
    fn end(&self) -> Stamp {
        let deadline = self.grant.lease.deadline();
        self.limit().map_or(deadline, |limit| limit.min(deadline))
    }

    /// Why the lock is not held any more. A deadline that has passed is made final by the look, except in a forked child, where a mutex
    /// that this takes may be locked for ever.
    pub(crate) fn lost(&self, now: Stamp) -> Option<LossReason> {
        let (own, lease) = (&self.own, &self.grant.lease);
        if let Some(reason) = own.reason() {
            return Some(reason);
        }
        let limit = self.limit.filter(|(at, _)| now >= *at).map(|(_, reason)| reason);
        let ended = self.grant.revocation().reason().or(limit);
        if ended.is_none() && lease.is_valid(now) {
            return None;
        }
        if !self.core.process.is_current() {
            return Some(ended.unwrap_or(LossReason::Expired));
        }
        if let Some(reason) = ended {
            own.fire(reason);
        } else if !lease.expire(now) {
            own.fire(lease.revocation().reason().unwrap_or(LossReason::Expired));
        }
        own.reason()
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
    pub(crate) fn release(&self, reply: Option<oneshot::Sender<Result<Released, LockError>>>, counted: Releasing) {
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
            is_repeated: false,
            is_clean_up: self.is_idle,
            _counted: counted,
        };
        self.core.release(&self.key, release);
    }

    fn end_for(&self, reason: LossReason) {
        self.lost(self.core.clock.now());
        // Quietly: the watchdog is about to forget this guard.
        self.own.fire_quietly(reason);
        if self.is_idle {
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
