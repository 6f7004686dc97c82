//! From a request to its guard, and from one guard to the next.

use std::future::ready;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use tokio::sync::oneshot;

use crate::acquire_options::AcquireOptions;
use crate::client::ClientInner;
use crate::guard::LockGuard;
use crate::held::Held;
use crate::name_task::{Begun, Request};
use crate::names::{First, Name, Queued, Served};
use crate::release::{Release, Reservation};
use crate::stats::Gauge;
use crate::waiters::{Answers, Waiter};
use crate::{Attempt, Claim, FencingToken, LockError, LockName, LossReason, Mode, Options, Released, Stamp};

impl ClientInner {
    /// Waits for the lock: behind other requests of this client for the name, then at the server.
    pub(crate) async fn acquire(
        self: &Arc<Self>,
        name: &LockName,
        options: &AcquireOptions,
    ) -> Result<LockGuard, LockError> {
        self.check_process()?;
        Options::usable_op_timeout(self.op_timeout)?;
        self.may_write()?;
        self.begin_watching()?;
        let span = tracing::debug_span!(target: "fencelock", "lock", %name, ttl = ?options.ttl);
        let waiting = self.stats.waiting.hold();
        let (mut key, mut _sharing) = (name.shared(), None);
        if options.mode != Mode::Exclusive {
            // It is not to wait for a claim that this client keeps.
            _sharing = Some(self.names.sharing(&key));
            if let Some(idle) = self.names.kept(&key) {
                idle.let_go(LossReason::Released, None);
                idle.kept_no_more().await;
            }
            key = self.names.new_key(&key);
        }
        let (now, starting) = (self.clock.now(), self.about_to_start());
        let first = match self.names.begin(&key, name, options, now) {
            None => None,
            Some(first) => match self.acquire_at_once(&key, first, options, &span) {
                Ok(guard) => return guard,
                Err(first) => Some(first),
            },
        };
        let (reply, outcome) = oneshot::channel();
        let options = Arc::new(options.clone());
        let waiter = Waiter::new(name.clone(), options, now, reply, span.clone(), waiting);
        let serial = first.as_ref().map(|(first, _)| first.serial);
        let queued = self.names.enter(&key, waiter, serial);
        if let Some((First { ask, task, .. }, request)) = first {
            self.start(&key, task, Some(Begun::Acquire(ask, request)));
        }
        let Queued { serial, mut task, kept } = queued.inspect_err(|error| self.count(Err(error)))?;
        let mut caller = Caller {
            core: self,
            key: &key,
            serial,
            outcome: Some(outcome),
        };
        if let Some(idle) = kept {
            idle.let_go(LossReason::Released, None);
            if let Some(outcome) = caller.answer() {
                return outcome;
            }
            task = self.names.with(&key, Name::wake).flatten();
        }
        if let Some(task) = task {
            self.start(&key, task, None);
        }
        drop(starting);
        caller.outcome().await
    }

    /// Begins the first request for a name. Returns the lock if it is granted at once: neither a waiter nor a task is needed then. Otherwise the
    /// request goes on in the task of the name, whatever it has come to.
    fn acquire_at_once(
        self: &Arc<Self>,
        key: &Arc<str>,
        first: First,
        options: &AcquireOptions,
        span: &tracing::Span,
    ) -> Result<Result<LockGuard, LockError>, (First, Request<Attempt>)> {
        let mut request = self.acquire_request(&first.ask);
        let answer = match self.begin(request.as_mut()) {
            Poll::Pending => return Err((first, request)),
            Poll::Ready(answer) => answer,
        };
        let now = self.clock.now();
        let grant = match self.heard(answer) {
            Ok(Attempt::Granted(grant)) if grant.check(&first.ask.claim, now).is_ok() => grant,
            answer => return Err((first, Box::pin(ready(answer)))),
        };
        let granted = self
            .names
            .with(key, |name| name.granted_at_once(&grant, first.serial, now));
        if let Some((served, task)) = granted {
            self.answer(served.refused);
            if let Some(task) = task {
                self.start(key, task, None);
            }
        }
        let held = Held::new(self, grant, key, options, now);
        self.watch(&held, None);
        Ok(self.guard(held, Duration::ZERO, span))
    }

    /// Keeps the claim of a hold that has ended for the next one. False if it is to be released.
    pub(crate) fn linger(self: &Arc<Self>, ended: &Arc<Held>) -> bool {
        if self.linger.is_zero() {
            return false;
        }
        let Some(idle) = ended.linger(self.linger, self.clock.now()) else {
            return false;
        };
        self.watch(&idle, Some(ended));
        if !self.names.keep(&ended.key, &idle) && idle.finish(LossReason::Released).is_some() {
            self.watch(ended, Some(&idle));
            return false;
        }
        self.stats.released.add();
        true
    }

    /// Releases all claims that are kept without a guard. None is until the result is dropped.
    pub(crate) fn end_lingering(&self) -> Gauge {
        let (kept, none) = self.names.keep_none();
        for idle in kept {
            idle.let_go(LossReason::Released, None);
        }
        none
    }

    /// Releases the claim of a guard that has ended.
    pub(crate) fn release(self: &Arc<Self>, key: &Arc<str>, release: Release) {
        let (claim, reservation, is_awaited) = (release.claim.clone(), release.reservation, release.reply.is_some());
        let Some(task) = self.names.release(key, release) else {
            return;
        };
        let begun = is_awaited.then(|| self.release_at_once(key, claim, reservation));
        match begun {
            Some(None) => {}
            begun => self.start(key, task, begun.flatten()),
        }
    }

    /// Begins a release. `None` if it has ended at once, and there is nothing more to do for the name.
    fn release_at_once(self: &Arc<Self>, key: &Arc<str>, claim: Claim, reservation: Reservation) -> Option<Begun> {
        let mut request = self.release_request(claim, reservation, false);
        let answer = match self.begin(request.as_mut()) {
            Poll::Pending => return Some(Begun::Release(request)),
            Poll::Ready(answer) => answer,
        };
        let ended = answer.as_ref().ok().and_then(|_| self.names.released_at_once(key));
        match (self.heard(answer), ended) {
            (Ok(outcome), Some(release)) => {
                self.count_released(*release, outcome);
                None
            }
            (answer, _) => Some(Begun::Release(Box::pin(ready(answer)))),
        }
    }

    pub(crate) fn count_released(&self, mut release: Release, outcome: Released) {
        if outcome == Released::Released && !release.is_clean_up {
            self.stats.released.add();
            tracing::debug!(target: "fencelock", name = %release.claim.name(), "released");
        }
        let reply = release.reply.take();
        drop(release);
        if let Some(reply) = reply {
            let _ = reply.send(Ok(outcome));
        }
    }

    /// Gives the claim of a hold that has ended to the first waiter of this client, with the next token of its block and without a request.
    /// False if the claim is to be released.
    pub(crate) fn hand_on(self: &Arc<Self>, ended: &Held) -> bool {
        let now = self.clock.now();
        let Some(token) = ended.next_token(now) else {
            return false;
        };
        let claim = &ended.grant.claim;
        let Some(Served {
            waiter: Some(waiter),
            refused,
            ..
        }) = self.names.hand_on(&ended.key, claim, token, now)
        else {
            return false;
        };
        self.answer(refused);
        // That of a hold that was kept is counted already.
        if !ended.is_idle() {
            self.stats.released.add();
        }
        self.stats.handed_over.add();
        let next = ended.next(token, &waiter.options, now);
        self.watch(&next, Some(ended));
        ended.resume();
        self.give(*waiter, next, now);
        true
    }

    /// Gives a waiter its guard.
    pub(crate) fn give(&self, waiter: Waiter, held: Arc<Held>, now: Stamp) {
        let Waiter {
            started,
            reply,
            span,
            waiting,
            ..
        } = waiter;
        drop(waiting);
        // If the caller has gone away, the guard is dropped.
        let _ = reply.send(self.guard(held, now.since(started), &span));
    }

    fn guard(&self, held: Arc<Held>, waited: Duration, span: &tracing::Span) -> Result<LockGuard, LockError> {
        let guard = LockGuard::new(held);
        // A shutdown that began meanwhile may not have seen this one; dropping it releases.
        let outcome = if self.names.is_closed() {
            Err(LockError::closed())
        } else {
            Ok(guard)
        };
        span.in_scope(|| self.count(outcome.as_ref().map(|guard| (guard.token(), waited))));
        outcome
    }

    /// Tells waiters that their requests have ended.
    pub(crate) fn answer(&self, answers: Answers) {
        for (waiter, error) in answers {
            let Waiter {
                reply, span, waiting, ..
            } = *waiter;
            drop(waiting);
            span.in_scope(|| self.count(Err(&error)));
            let _ = reply.send(Err(error));
        }
    }

    fn count(&self, outcome: Result<(FencingToken, Duration), &LockError>) {
        match outcome {
            Ok((token, waited)) => {
                self.stats.acquired.add();
                tracing::debug!(target: "fencelock", %token, ?waited, "acquired");
            }
            Err(LockError::TimedOut { .. }) => self.stats.timed_out.add(),
            Err(error) => {
                self.stats.failed.add();
                tracing::debug!(target: "fencelock", error = format_args!("{error:#}"), "not acquired");
            }
        }
    }

    /// Releases a claim that the server may have, and that no guard has.
    pub(crate) fn clean_up_under(self: &Arc<Self>, key: Arc<str>, claim: Claim) {
        let release = self.clean_up(claim, None, None);
        self.release(&key, release);
    }
}

/// The caller of a request that waits. Dropping it takes the request back.
struct Caller<'a> {
    core: &'a Arc<ClientInner>,
    key: &'a str,
    serial: u64,
    /// `None` once it is answered.
    outcome: Option<oneshot::Receiver<Result<LockGuard, LockError>>>,
}

impl Caller<'_> {
    /// The outcome, if it is there.
    fn answer(&mut self) -> Option<Result<LockGuard, LockError>> {
        let outcome = self.outcome.as_mut()?.try_recv().ok()?;
        self.outcome = None;
        Some(outcome)
    }

    async fn outcome(mut self) -> Result<LockGuard, LockError> {
        let outcome = match &mut self.outcome {
            Some(outcome) => outcome.await.ok(),
            None => None,
        };
        self.outcome = None;
        outcome.unwrap_or_else(|| Err(self.core.executor.dropped("acquire")))
    }
}

impl Drop for Caller<'_> {
    fn drop(&mut self) {
        let Some(outcome) = self.outcome.take() else { return };
        // In a forked child a mutex may be locked for ever, and the task runs in the parent.
        if !self.core.is_of_this_process() {
            return std::mem::forget(outcome);
        }
        let left = self.core.names.leave(self.key, self.serial, || self.core.releasing());
        if left.is_some() {
            self.core.stats.cancelled.add();
        }
    }
}
