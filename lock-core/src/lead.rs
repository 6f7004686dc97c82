//! Leading: a body that runs on one of many clients, for as long as that one holds the lock.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::guard::Held;
use crate::{FencingToken, LockError, LockGuard, LockName, LockRequest, LossSignal};

/// Between the attempts of a campaign while the server cannot be asked, and between short terms.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LAST_PAUSE: Duration = Duration::from_secs(1);

impl LockRequest {
    /// Leads while the lock is held: acquires it, runs `body` under it, and if the lock is lost, cancels `body` and begins again, after a pause
    /// of at most 1.5 s. Returns what `body` returned, once it ends under the lock.
    ///
    /// At most one client leads at a time, with the limits that hold for every lock: send [`Term::token`] with each write. A
    /// leader that dies is replaced when its ttl is over.
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
    /// As when awaiting the request, except that failures that may pass are waited out, with pauses of up to 1 s, for as long as the
    /// request may wait. [`LockError::Closed`] or [`LockError::Lost`] if the client is shut down.
    ///
    /// # Cancellation
    ///
    /// Dropping the future drops `body` and releases the lock.
    pub async fn lead<F, B>(self, mut body: F) -> Result<B::Output, LockError>
    where
        F: FnMut(Term) -> B,
        B: Future,
    {
        let core = Arc::clone(&self.locks.core);
        let mut pause = FIRST_PAUSE;
        loop {
            let guard = self.campaign().await?;
            let began = core.clock.now();
            match guard.run(body(guard.term())).await {
                Ok(value) => {
                    // The server frees the lock at its ttl if this fails.
                    let _ = guard.release().await;
                    return Ok(value);
                }
                Err(LockError::Lost { .. }) if !core.closing.is_cancelled() => {
                    tracing::debug!(target: "fencelock", name = %guard.name(), "the term of the leader has ended");
                    drop(guard);
                    // Terms that end at once, as when each grant is taken away, must not follow each other without a pause.
                    if core.clock.now().since(began) >= LAST_PAUSE {
                        pause = FIRST_PAUSE;
                    }
                    self.pause(pause.mul_f64(0.5 + fastrand::f64())).await?;
                    pause = (pause * 2).min(LAST_PAUSE);
                }
                Err(lost) => return Err(lost),
            }
        }
    }

    /// The lock, through failures that may pass.
    async fn campaign(&self) -> Result<LockGuard, LockError> {
        let core = &self.locks.core;
        let started = core.clock.now();
        let mut told = false;
        let mut pause = FIRST_PAUSE;
        loop {
            match self.clone().with_wait_since(started).await {
                Err(error) if error.is_retryable() && !error.is_busy() && !self.is_over(started) => {
                    if !std::mem::replace(&mut told, true) {
                        // Out of the count at once: a candidate may wait for days while the server answers, and what is counted as an
                        // outage keeps later ones from being told.
                        drop(core.outages.begin(&error));
                    }
                    self.pause(pause.mul_f64(0.5 + fastrand::f64())).await?;
                    pause = (pause * 2).min(LAST_PAUSE);
                }
                done => return done,
            }
        }
    }
}

/// One term of a [leader](LockRequest::lead): from an acquisition of its lock to the end of that hold. A clone that is kept
/// holds no lock, but keeps the client connected.
#[derive(Clone)]
pub struct Term {
    held: Arc<Held>,
}

impl Term {
    pub(crate) fn new(held: Arc<Held>) -> Self {
        Self { held }
    }

    /// The fencing token of this term, higher than that of every term before.
    #[must_use]
    pub fn token(&self) -> FencingToken {
        self.held.grant().token
    }

    /// The name that is locked, with all scopes.
    #[must_use]
    pub fn name(&self) -> &LockName {
        self.held.grant().claim.name()
    }

    /// Whether the term still goes on. See [`LockGuard::is_held`].
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.held.is_held()
    }

    /// A signal that tells when and why the term has ended.
    #[must_use]
    pub fn lost(&self) -> LossSignal {
        self.held.signal()
    }

    /// Cancelled as soon as the term has ended. See [`LockGuard::cancellation_token`].
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
