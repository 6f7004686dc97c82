//! Leader election: a body that runs on the client that holds the lock.

use std::fmt;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::held::Held;
use crate::{FencingToken, LockError, LockGuard, LockName, LockRequest, LossSignal};

/// Shortest and longest pause between attempts to acquire while the server fails, and between short terms.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LAST_PAUSE: Duration = Duration::from_secs(1);

impl LockRequest {
    /// Acquires the lock and runs `body` under it. If the lock is lost, drops `body` and begins again, after a pause of at most 1.5 s. Returns
    /// what `body` returned, once it has ended under the lock.
    ///
    /// One client leads at a time, within the limits of every lock: send [`Term::token`] with each write. A leader that dies is replaced when
    /// its ttl is over.
    ///
    /// ```
    /// # async fn serve(token: fencelock::FencingToken) {}
    /// # async fn example(locks: fencelock::Locks) -> Result<(), fencelock::LockError> {
    /// locks.lock("leader").label("host 7").lead(|term| async move { serve(term.token()).await }).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// As when awaiting the request, but failures that may pass are retried for as long as the request may wait.
    /// [`LockError::Closed`] or [`LockError::Lost`] if the client is shut down.
    ///
    /// # Cancellation
    ///
    /// Dropping the future drops `body` and releases the lock.
    pub async fn lead<F, B>(self, body: F) -> Result<B::Output, LockError>
    where
        F: FnMut(Term) -> B,
        B: Future,
    {
        let led = self.lead_while(&CancellationToken::new(), body).await?;
        // Only a stop ends it without a value.
        led.ok_or_else(LockError::closed)
    }

    /// As [`lead`](Self::lead), until `stop` has ended, as at a SIGTERM: a candidate then gets `None`, and a leader continues to the end of
    /// its body, which can check [`Term::is_stopping`] or await [`Term::stopping`].
    ///
    /// ```
    /// # async fn step(token: fencelock::FencingToken) {}
    /// # async fn example(locks: fencelock::Locks, stop: impl Future<Output = ()>) -> Result<(), fencelock::LockError> {
    /// let body = |term: fencelock::Term| async move {
    ///     while !term.is_stopping() {
    ///         step(term.token()).await; // is not cut off by the stop
    ///     }
    /// };
    /// locks.lock("leader").lead_until(stop, body).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// A leader that loses its lock while it stops does not begin again, and gets `None`.
    ///
    /// # Errors
    ///
    /// As [`lead`](Self::lead).
    ///
    /// # Cancellation
    ///
    /// Dropping the future drops `body` in the middle of its step, and releases the lock.
    pub async fn lead_until<F, B>(self, stop: impl Future<Output = ()>, body: F) -> Result<Option<B::Output>, LockError>
    where
        F: FnMut(Term) -> B,
        B: Future,
    {
        let stopping = CancellationToken::new();
        let mut leads = pin!(self.lead_while(&stopping, body));
        tokio::select! {
            biased;
            led = &mut leads => return led,
            () = stop => stopping.cancel(),
        }
        leads.await
    }

    /// Leads until the body has ended under the lock, or no term goes on once `stopping` is cancelled.
    async fn lead_while<F, B>(self, stopping: &CancellationToken, mut body: F) -> Result<Option<B::Output>, LockError>
    where
        F: FnMut(Term) -> B,
        B: Future,
    {
        self.check_exclusive()?;
        let core = Arc::clone(&self.locks.core);
        let mut pauses = Pauses(FIRST_PAUSE);
        loop {
            let Some(guard) = stopping.run_until_cancelled(self.campaign()).await else {
                return Ok(None);
            };
            let guard = guard?;
            let began = core.clock.now();
            let term = Term {
                held: Arc::clone(&guard.held),
                stopping: stopping.clone(),
            };
            match guard.run(body(term)).await {
                Ok(value) => {
                    // The server frees the lock at its ttl if this fails.
                    let _ = guard.release().await;
                    return Ok(Some(value));
                }
                Err(LockError::Lost { .. }) if !core.closing.is_cancelled() => {
                    tracing::debug!(target: "fencelock", name = %guard.name(), "the term of the leader has ended");
                }
                Err(lost) => return Err(lost),
            }
            drop(guard);
            // Terms that end at once must not follow each other without a pause.
            if core.clock.now().since(began) >= LAST_PAUSE {
                pauses = Pauses(FIRST_PAUSE);
            }
            match stopping.run_until_cancelled(self.pause(pauses.next())).await {
                Some(paused) => paused?,
                None => return Ok(None),
            }
        }
    }

    /// The lock, through failures that may pass.
    async fn campaign(&self) -> Result<LockGuard, LockError> {
        let core = &self.locks.core;
        let started = core.clock.now();
        let (mut told, mut pauses) = (false, Pauses(FIRST_PAUSE));
        loop {
            match self.clone().without_linger().with_wait_since(started).await {
                Err(error) if error.is_retryable() && !error.is_busy() && !self.is_over(started) => {
                    if !std::mem::replace(&mut told, true) {
                        // Ended at once: a candidate may wait for days after it, and an outage hides later ones.
                        drop(core.outages.begin(&error));
                    }
                    self.pause(pauses.next()).await?;
                }
                done => return done,
            }
        }
    }
}

/// Pauses that grow, each with a jitter. This is the next one.
struct Pauses(Duration);

impl Pauses {
    fn next(&mut self) -> Duration {
        let next = (self.0 * 2).min(LAST_PAUSE);
        std::mem::replace(&mut self.0, next).mul_f64(0.5 + fastrand::f64())
    }
}

/// One term of a [leader](LockRequest::lead), from an acquisition of its lock to the end of that hold. Clones hold no lock, but keep the
/// client connected.
#[derive(Clone)]
pub struct Term {
    held: Arc<Held>,
    stopping: CancellationToken,
}

impl Term {
    /// Returns whether the `stop` of [`lead_until`](LockRequest::lead_until) has ended: the body shall end, too.
    #[must_use]
    pub fn is_stopping(&self) -> bool {
        self.stopping.is_cancelled()
    }

    /// Waits until [`is_stopping`](Self::is_stopping); for ever under [`lead`](LockRequest::lead). Cancellation-safe.
    pub async fn stopping(&self) {
        self.stopping.cancelled().await;
    }

    /// Returns the fencing token of this term, higher than those of all terms before.
    #[must_use]
    pub fn token(&self) -> FencingToken {
        self.held.token
    }

    /// Returns the name that is locked, with all scopes.
    #[must_use]
    pub fn name(&self) -> &LockName {
        self.held.grant.claim.name()
    }

    /// Returns whether the term goes on. See [`LockGuard::is_held`].
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.held.is_held()
    }

    /// Returns a signal that tells when and why the term has ended.
    #[must_use]
    pub fn lost(&self) -> LossSignal {
        self.held.signal()
    }

    /// Returns a token that is cancelled when the term has ended. See [`LockGuard::cancellation_token`].
    #[must_use]
    pub fn cancellation_token(&self) -> CancellationToken {
        self.held.cancellation_token()
    }
}

impl fmt::Debug for Term {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Term")
            .field("name", self.name())
            .field("token", &self.token())
            .finish_non_exhaustive()
    }
}
