//! From a request to its guard, and from one guard to the next.

use std::future::ready;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio_util::task::AbortOnDropHandle;

use crate::acquire_options::AcquireOptions;
use crate::client::ClientInner;
use crate::guard::LockGuard;
use crate::held::Held;
use crate::name_state::{Ask, Unkept};
use crate::name_task::Begun;
use crate::names::{Begin, Ended, Queued};
use crate::queue::{Answer, Waiter};
use crate::release::Release;
use crate::{Attempt, LockError, LockName, Mode, Options, Released, Stamp};

type Outcome = Result<LockGuard, LockError>;

impl ClientInner {
    /// Waits for the lock: behind other requests of this client for the name, then at the server.
    pub(crate) async fn acquire(self: &Arc<Self>, name: &LockName, options: &AcquireOptions) -> Outcome {
        self.check_process()?;
        Options::usable_op_timeout(self.op_timeout)?;
        self.may_write()?;
        self.begin_watching()?;
        let span = tracing::debug_span!(target: "fencelock", "lock", %name, ttl = ?options.ttl);
        let waiting = self.stats.waiting.hold();
        let (mut key, mut _sharing) = (name.shared(), None);
        if options.mode != Mode::Exclusive {
            // It is not to be refused for a claim that this client keeps.
            _sharing = Some(self.names.sharing(&key));
            let (unkept, response) = self.names.vacate(&key, self.clock.now());
            unkept.into_iter().for_each(Self::unkept);
            if let Some(response) = response {
                let _ = response.await;
            }
            key = self.names.new_key(&key);
        }
        let (now, starting) = (self.clock.now(), self.about_to_start());
        let begun = match self.names.begin(&key, name, options, now) {
            Begin::Held(next, kept) => {
                self.stats.handed_over.add();
                self.watch(&next, Some(&kept));
                return self.outcome(Ok(next), Duration::ZERO, &span);
            }
            Begin::First(serial, ask, task) => match self.acquire_at_once(&key, serial, ask, options) {
                Ok(held) => return self.outcome(Ok(held), Duration::ZERO, &span),
                Err(begun) => Some((serial, task, begun)),
            },
            Begin::Wait => None,
        };
        let (reply, outcome) = oneshot::channel();
        let waiter = Waiter {
            serial: 0,
            name: name.clone(),
            options: options.clone(),
            started: now,
            deadline: options.wait.map(|limit| now + limit),
            first_response: now + self.op_timeout,
            expiry: None,
            is_impatient: !options.waits(),
            reply,
            span,
            waiting,
        };
        let serial = begun.as_ref().map(|(serial, ..)| *serial);
        let entered = self.names.enter(&key, waiter, serial, now);
        let is_timed = begun.is_none();
        if let Some((_, task, begun)) = begun {
            self.start(&key, task, Some(begun));
        }
        let Queued { serial, task, unkept } = entered.unwrap_or_else(|answer| {
            self.answer(vec![answer]);
            Queued::default()
        });
        if let Some(held) = unkept {
            self.watchdog.forget(&held);
        }
        if let Some(task) = task {
            self.start(&key, task, None);
        }
        drop(starting);
        let mut caller = Caller {
            core: self,
            key: &key,
            serial,
            outcome: Some(outcome),
            timer: None,
        };
        // The task of the name sees to the time of the request that began it.
        if is_timed {
            caller.timer = self.end_in_time(&key, serial);
        }
        caller.outcome().await
    }

    /// Begins the first request for a name. Returns the hold if it is granted at once: neither a waiter nor a task is needed then. Otherwise the
    /// request goes on in the task of the name, whatever it has come to.
    fn acquire_at_once(
        self: &Arc<Self>,
        key: &Arc<str>,
        serial: u64,
        ask: Ask,
        options: &AcquireOptions,
    ) -> Result<Arc<Held>, Begun> {
        let mut request = self.acquire_request(ask.clone());
        let answer = match self.begin(request.as_mut()) {
            Poll::Pending => return Err(Begun::Ask(serial, ask, request)),
            Poll::Ready(answer) => answer,
        };
        let now = self.clock.now();
        let grant = match self.heard(answer) {
            Ok(Attempt::Granted(grant)) if grant.check(&ask.0, now).is_ok() => grant,
            answer => return Err(Begun::Ask(serial, ask, Box::pin(ready(answer)))),
        };
        let held = Held::new(self, grant, key, options, serial, now);
        self.watch(&held, None);
        self.answer(self.names.granted_at_once(&held, now));
        Ok(held)
    }

    /// Ends a request when its time is over, unless the result is dropped before. `None` if there is nothing to wait for.
    pub(crate) fn end_in_time(self: &Arc<Self>, key: &Arc<str>, serial: u64) -> Option<AbortOnDropHandle<()>> {
        let mut at = self.expire(key, serial)?;
        let (core, key) = (Arc::clone(self), Arc::clone(key));
        let ends = async move {
            loop {
                core.sleep_until(at).await;
                match core.expire(&key, serial) {
                    Some(later) => at = later,
                    None => return,
                }
            }
        };
        // Without a runtime the task of the name does not run, and the request has ended.
        let runtime = self.executor.handle().ok()?;
        Some(AbortOnDropHandle::new(runtime.spawn(ends)))
    }

    /// Ends a request if its time is over, or returns when it is to be looked at again.
    fn expire(&self, key: &str, serial: u64) -> Option<Stamp> {
        match self.names.expire(key, serial, self.clock.now()) {
            Ok(later) => later,
            Err(answer) => {
                self.answer(vec![answer]);
                None
            }
        }
    }

    /// Gives the claim of a guard that has ended to the first waiter of this client, keeps it for the next one, or has it released.
    pub(crate) fn pass_on(self: &Arc<Self>, ended: &Arc<Held>, release: Release) {
        let now = self.clock.now();
        let is_awaited = release.reply.is_some();
        match self.names.ended(ended, release, now) {
            Ended::Next(release, waiter, next, refused) => {
                self.stats.handed_over.add();
                self.watch(&next, Some(ended));
                self.answer(refused);
                self.give(*waiter, Ok(next));
                self.count_released(release, Released::Released);
            }
            Ended::Kept(release) => {
                self.watchdog.keep(ended);
                self.count_released(release, Released::Released);
            }
            Ended::Releasing(task) => {
                self.watchdog.forget(ended);
                let Some(task) = task else { return };
                match is_awaited.then(|| self.release_at_once(ended)) {
                    Some(None) => {}
                    begun => self.start(&ended.key, task, begun.flatten()),
                }
            }
        }
    }

    /// Begins a release. `None` if it has ended at once, and there is nothing more to do for the name.
    fn release_at_once(self: &Arc<Self>, ended: &Held) -> Option<Begun> {
        let mut request = self.release_request(ended.grant.claim.clone(), ended.reservation(), false);
        let answer = match self.begin(request.as_mut()) {
            Poll::Pending => return Some(Begun::Release(request)),
            Poll::Ready(answer) => answer,
        };
        let done = answer.as_ref().ok();
        let done = done.and_then(|_| self.names.released_at_once(&ended.key));
        match (self.heard(answer), done) {
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

    /// Has a claim released that was kept.
    pub(crate) fn unkept((held, task): Unkept) {
        held.core.watchdog.forget(&held);
        if let Some(task) = task {
            held.core.start(&held.key, task, None);
        }
    }

    /// Tells waiters that their requests have ended.
    pub(crate) fn answer(&self, answers: Vec<Answer>) {
        for (waiter, error) in answers {
            self.give(*waiter, Err(error));
        }
    }

    /// Gives a waiter its guard, or tells it why there is none.
    pub(crate) fn give(&self, waiter: Waiter, outcome: Result<Arc<Held>, LockError>) {
        let waited = self.clock.now().since(waiter.started);
        drop(waiter.waiting);
        // If the caller has gone away, the guard is dropped.
        let _ = waiter.reply.send(self.outcome(outcome, waited, &waiter.span));
    }

    fn outcome(&self, outcome: Result<Arc<Held>, LockError>, waited: Duration, span: &tracing::Span) -> Outcome {
        let guard = outcome.map(LockGuard::new);
        // A shutdown that began meanwhile may not have seen this one; dropping it releases.
        let outcome = guard.and_then(|guard| match self.names.is_closed() {
            true => Err(LockError::closed()),
            false => Ok(guard),
        });
        span.in_scope(|| match &outcome {
            Ok(guard) => {
                self.stats.acquired.add();
                tracing::debug!(target: "fencelock", token = %guard.token(), ?waited, "acquired");
            }
            Err(LockError::TimedOut { .. }) => self.stats.timed_out.add(),
            Err(error) => {
                self.stats.failed.add();
                tracing::debug!(target: "fencelock", error = format_args!("{error:#}"), "not acquired");
            }
        });
        outcome
    }
}

/// The caller of a request that waits. Dropping it takes the request back.
struct Caller<'a> {
    core: &'a Arc<ClientInner>,
    key: &'a str,
    serial: u64,
    /// `None` once it is answered.
    outcome: Option<oneshot::Receiver<Outcome>>,
    timer: Option<AbortOnDropHandle<()>>,
}

impl Caller<'_> {
    async fn outcome(mut self) -> Outcome {
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
        // In a forked child a mutex may be locked for ever, and the tasks run in the parent.
        if !self.core.is_of_this_process() {
            std::mem::forget((outcome, self.timer.take()));
            return;
        }
        if self.core.names.leave(self.key, self.serial).is_some() {
            self.core.stats.cancelled.add();
        }
    }
}
