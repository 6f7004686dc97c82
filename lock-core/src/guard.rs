//! A lock that is held.

use std::fmt;
use std::future::{Future, IntoFuture, pending, poll_fn};
use std::pin::pin;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Poll;
use std::time::Duration;

use futures_util::future::select_all;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use crate::acquire_options::SHARES;
use crate::call::call;
use crate::held::Held;
use crate::process::block_on;
use crate::release::Reservation;
use crate::{Attempt, FencingToken, LockError, LockName, LossReason, LossSignal, Mode, OwnerId, Released, Renewal};

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
/// [`release`](Self::release) fail with [`LockError::Configuration`], and dropping it does nothing.
///
/// `let _ = locks.lock("job").await?` drops the guard at once, without a warning of the compiler. Give it a name, if only `_guard`.
#[must_use = "dropping a guard releases its lock at once"]
pub struct LockGuard {
    pub(crate) held: Arc<Held>,
    /// Whether [`release`](Self::release) has ended the hold.
    released: bool,
}

/// What releasing a guard came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReleaseOutcome {
    /// The lock was held to this moment; if it stays with this client, for a waiter or by [`Options::linger`](crate::Options::linger), as far as the client
    /// has heard from the server.
    Released,
    /// The lock had been lost before; another client may have held it since.
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

    /// Whether the lock can still be believed in. Reads the clock every time, and sends no request.
    ///
    /// While the server keeps its lease, this is false before the server may free the lock.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.held.is_held()
    }

    /// A signal that tells when and why the lock is not held any more. Independent of the guard's lifetime. In a forked child it never
    /// completes: the client works in the parent only.
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
    /// Where it can, use [`run`](Self::run), which also reads the clock: like [`lost`](Self::lost), the token is late if the machine was
    /// suspended, and is never cancelled in a forked child.
    #[must_use]
    pub fn cancellation_token(&self) -> CancellationToken {
        self.held.cancellation_token()
    }

    /// Fails in a forked child.
    fn check_process(&self) -> Result<(), LockError> {
        self.held.core.check_process().map_err(|error| error.of(self.name()))
    }

    /// The error if the lock is not held any more.
    fn check(&self) -> Result<(), LockError> {
        match self.held.lost(self.held.core.clock.now()) {
            Some(reason) => Err(self.held.loss(reason)),
            None => Ok(()),
        }
    }

    /// Releases the lock, and waits for the response of the server. If another task of this client waits for the lock, that may get it at
    /// once, without a request, for up to 5 ms after the server has granted it. With [`Options::linger`](crate::Options::linger) the client may keep it.
    ///
    /// # Errors
    ///
    /// [`LockError::Unavailable`] if the server did not answer. The lock is not held any more from this process's view,
    /// and the release is tried again in the background until the lease must have ended at the server.
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
        let (core, name) = (Arc::clone(&self.held.core), self.name().clone());
        // Not in the caller's task: a release must follow the request.
        let shared = core.run("downgrade", self.share()).await;
        shared.map_err(|error| error.of(&name))
    }

    async fn share(mut self) -> Result<Self, LockError> {
        let (held, core) = (Arc::clone(&self.held), Arc::clone(&self.held.core));
        // If this fails it is not known in which mode the server has the claim, so it goes to no other guard.
        held.owner_shown.store(true, Ordering::Relaxed);
        self.check()?;
        if held.grant.claim.mode() == Mode::Shared {
            return Ok(self);
        }
        if !core.capabilities.shared || held.grant.claim.at_least().is_some() {
            return Err(LockError::not_supported(SHARES));
        }
        let claim = held.grant.claim.clone().with_mode(Mode::Shared);
        let asked = call("downgrade", core.op_timeout, core.backend.try_acquire(&claim)).await;
        let lost = || held.loss(LossReason::NotHeld);
        let shared = asked.and_then(|attempt| match attempt {
            // Another token is that of a grant which others may have come before.
            Attempt::Granted(grant) if grant.token == held.grant.token => {
                grant.check(&claim, core.clock.now())?;
                self.check()?;
                let counted = held.finish(LossReason::Released).ok_or_else(lost)?;
                Ok((grant, counted))
            }
            _ => {
                held.own.fire(LossReason::NotHeld);
                Err(lost())
            }
        });
        let (grant, counted) = match shared {
            Ok(shared) => shared,
            Err(error) => {
                // The release of a hold that has ended may have reached the server before this request.
                if held.has_ended() {
                    let _ = call("release", core.op_timeout, core.backend.release(&claim, None)).await;
                }
                return Err(error);
            }
        };
        self.released = true;
        let key = core.names.new_key(&held.key);
        let shared = held.shared(grant, &key);
        if let Some(task) = core.names.replace(&held, &shared) {
            core.start(&held.key, task, None);
        }
        core.watch(&shared, Some(&held));
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
        if !held.renews() {
            let operation = "renewing a lock that was asked for without renewal";
            return Err(LockError::not_supported(operation).of(self.name()));
        }
        let (core, lease) = (Arc::clone(&held.core), held.grant.lease.clone());
        let renewed = held.core.run("renewal", async move { core.renew(&lease).await });
        renewed.await.map_err(|error| error.of(self.name()))?;
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
    let waits: Vec<_> = signals.into_iter().map(IntoFuture::into_future).collect();
    if waits.is_empty() {
        return pending().await;
    }
    let (reason, at, _) = select_all(waits).await;
    (at, reason)
}

impl Drop for LockGuard {
    fn drop(&mut self) {
        if self.released {
            return;
        }
        if self.held.core.is_of_this_process() {
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
