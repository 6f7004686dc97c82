//! The task of a name: sends the requests that [`Names`] decides on, and tells the waiters what came of them.
//!
//! ```text
//! loop {
//!     a guard has ended, or a claim has no use any more:
//!         release it; again, until that is confirmed or the server must have let go by itself
//!     waiters, and no guard:
//!         try_acquire or acquire for the first waiter; granted: it gets the guard; busy: those that do not wait are refused
//!     a guard, and waiters whose time ends by itself: wait for that
//!     else: end
//! }
//! ```
//!
//! The rule for failures: what may pass ([`LockError::Unavailable`]) is asked again until the wait is over, which it is at once for a request
//! that does not wait; without a limit, for an `op_timeout` before the server has responded at all, and as long as it takes once it has said
//! "busy". The last response decides between "timed out" and "unavailable". A failure that only a person can mend ends every wait.
//!
//! A request that the server may have received is never abandoned without a release of its claim. The first one is not cut off, so that it
//! cannot reach the server after that release.

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::Duration;

use tokio::sync::{Notify, oneshot};
use tokio::time;

use crate::acquire_options::AcquireOptions;
use crate::call::catch_panic;
use crate::client::{ClientInner, TENURE};
use crate::guard::LockGuard;
use crate::held::Held;
use crate::names::{Ask, Entered, Name, Step};
use crate::release::{Release, Releasing, Reservation};
use crate::waiters::{Answers, GRACE, SHORTEST_RESPONSE, Waiter};
use crate::{
    Attempt, Busy, Claim, FencingToken, Grant, Lease, LockError, LockName, LossReason, Mode, Outage, Released, Stamp,
    Wait,
};

const FIRST_RETRY: Duration = Duration::from_millis(50);
const LAST_RETRY: Duration = Duration::from_secs(1);

impl ClientInner {
    /// Waits for the lock in the queue of its name.
    pub(crate) async fn wait_for(
        self: &Arc<Self>,
        name: &LockName,
        options: AcquireOptions,
    ) -> Result<LockGuard, LockError> {
        let span = tracing::debug_span!(target: "fencelock", "lock", %name, ttl = ?options.ttl);
        let exclusive = name.shared();
        let is_exclusive = options.mode == Mode::Exclusive;
        let key = if is_exclusive {
            Arc::clone(&exclusive)
        } else {
            self.names.new_key(&exclusive)
        };
        // None of them is to wait for a claim that this client keeps.
        let _sharing = (!is_exclusive).then(|| self.names.sharing(&exclusive));
        let options = Arc::new(options);
        loop {
            if let Some(guard) = self.resume(&exclusive, &options, &span).await {
                return guard;
            }
            let (reply, outcome) = oneshot::channel();
            let (options, now) = (Arc::clone(&options), self.clock.now());
            let waiter = Waiter::new(
                name.clone(),
                options,
                now,
                reply,
                span.clone(),
                self.stats.waiting.hold(),
            );
            let starting = self.about_to_start();
            match self.names.enter(&key, waiter) {
                Entered::Kept => {}
                Entered::Refused(error) => {
                    self.count(Err(&error));
                    return Err(error);
                }
                Entered::Queued(serial, task) => {
                    let caller = Caller {
                        core: self,
                        key: &key,
                        serial,
                        outcome: Some(outcome),
                    };
                    self.start(&key, task, true);
                    drop(starting);
                    return caller.outcome().await;
                }
            }
        }
    }

    /// The lock, if the client keeps a claim for the name. One that differs is released.
    async fn resume(
        self: &Arc<Self>,
        key: &Arc<str>,
        options: &AcquireOptions,
        span: &tracing::Span,
    ) -> Option<Result<LockGuard, LockError>> {
        if self.linger.is_zero() {
            return None;
        }
        let _starting = self.about_to_start();
        let idle = self.names.kept(key)?;
        let Some(counted) = idle.finish(LossReason::Released) else {
            // It is being released, or another request has it. Behind an exclusive claim that takes its turn in the queue of the name.
            if options.mode != Mode::Exclusive {
                idle.kept_no_more().await;
            }
            return None;
        };
        let now = self.clock.now();
        let token = idle.next_token(now).filter(|_| options.is_served_by(&idle.grant.claim));
        let Some(token) = token.filter(|_| !self.names.is_closed()) else {
            idle.release(None, counted);
            if options.mode != Mode::Exclusive {
                idle.kept_no_more().await;
            }
            return None;
        };
        let resumed = self
            .names
            .with(key, |name, up_to| name.resumed(&idle.grant.claim, token, up_to, now));
        if let Some((refused, _kept)) = resumed {
            self.answer(refused);
        }
        self.stats.handed_over.add();
        let next = idle.next(token, options, now);
        self.watch(&next, Some(&idle));
        idle.resume();
        Some(self.guard(next, Duration::ZERO, span))
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
    pub(crate) fn end_lingering(&self) -> impl Drop {
        let (kept, none) = self.names.keep_none();
        for idle in kept {
            idle.let_go(LossReason::Released, None);
        }
        none
    }

    /// Releases the claim of a guard that has ended.
    pub(crate) fn release(self: &Arc<Self>, key: &Arc<str>, release: Release) {
        let is_awaited = release.reply.is_some();
        let task = self.names.release(key, release);
        self.start(key, task, is_awaited);
    }

    /// Gives the claim of a hold that has ended to the first waiter of this client, with the next token of its block and without a request.
    /// False if the claim is to be released.
    pub(crate) fn hand_on(self: &Arc<Self>, ended: &Held) -> bool {
        let now = self.clock.now();
        let Some(token) = ended.next_token(now) else {
            return false;
        };
        let claim = &ended.grant.claim;
        let Some((waiter, refused)) = self.names.hand_on(&ended.key, claim, token, now) else {
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
    fn give(&self, waiter: Waiter, held: Arc<Held>, now: Stamp) {
        let Waiter {
            started,
            reply,
            span,
            waiting,
            ..
        } = waiter;
        drop(waiting);
        // If the caller is gone, the guard is dropped.
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

    /// Starts the task of a name, if there is one. What it can do without waiting is done before this returns if it is to begin `at_once`: the
    /// caller waits for it in any case, and a task that has no more to do is never spawned.
    pub(crate) fn start(self: &Arc<Self>, key: &Arc<str>, task: Option<Arc<Notify>>, at_once: bool) {
        let Some(wake) = task else { return };
        let task = NameTask {
            core: Arc::clone(self),
            key: Arc::clone(key),
            wake,
            has_ended: false,
            pause: FIRST_RETRY,
            outage: None,
            release_outage: None,
        };
        let started = self.executor.handle().map(|runtime| {
            let mut task = Box::pin(self.tasks.track_future(task.run()));
            if at_once {
                let _there = runtime.enter();
                let poll = || task.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready();
                // A panic is that of the task: its waiters are answered when it is dropped.
                if catch_unwind(AssertUnwindSafe(poll)).unwrap_or(true) {
                    return;
                }
            }
            runtime.spawn(task);
        });
        if let Err(error) = started {
            tracing::error!(target: "fencelock", error = format_args!("{error:#}"), "the requests of a lock client cannot be sent");
            self.answer(self.names.give_up(key, &error));
        }
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

    /// The clean-up of a claim that never became a guard.
    fn clean_up(&self, claim: Claim, shared: Option<Lease>, counted: Option<Releasing>) -> Release {
        self.stats.abandoned.add();
        Release {
            until: self.clock.now() + claim.ttl(),
            claim,
            reservation: Reservation::None,
            shared,
            reply: None,
            is_clean_up: true,
            kept: None,
            _counted: counted.unwrap_or_else(|| self.releasing()),
        }
    }

    /// Releases a claim that the server may have, and that no guard has.
    pub(crate) fn clean_up_under(self: &Arc<Self>, key: Arc<str>, claim: Claim) {
        let release = self.clean_up(claim, None, None);
        self.release(&key, release);
    }

    async fn sleep_until(&self, until: Option<Stamp>) {
        let Some(until) = until else {
            return std::future::pending().await;
        };
        loop {
            let left = until.since(self.clock.now());
            if left.is_zero() {
                return;
            }
            time::sleep(left).await;
        }
    }

    /// What is left of a reservation that was made; `None` if that is nothing.
    fn rest(&self, reservation: Reservation) -> Option<Duration> {
        let Reservation::Until(until) = reservation else {
            return None;
        };
        let rest = until.since(self.clock.now());
        Some(rest).filter(|rest| !rest.is_zero())
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
    async fn outcome(mut self) -> Result<LockGuard, LockError> {
        let dropped = || self.core.executor.dropped("acquire");
        let outcome = match &mut self.outcome {
            Some(outcome) => outcome.await.unwrap_or_else(|_| Err(dropped())),
            None => Err(dropped()),
        };
        self.outcome = None;
        outcome
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

struct NameTask {
    core: Arc<ClientInner>,
    key: Arc<str>,
    wake: Arc<Notify>,
    has_ended: bool,
    /// Before the next request is repeated.
    pause: Duration,
    outage: Option<Outage>,
    release_outage: Option<Outage>,
}

impl NameTask {
    async fn run(mut self) {
        loop {
            let core = Arc::clone(&self.core);
            let clean_up = |claim, shared, counted| core.clean_up(claim, shared, counted);
            match core.names.next(&self.key, clean_up) {
                Step::Ask(ask) => Box::pin(self.ask(ask)).await,
                Step::Release(claim, reservation) => Box::pin(self.release(claim, reservation)).await,
                Step::Hold => self.wait(Duration::MAX, || true).await,
                Step::End => break,
            }
        }
        self.has_ended = true;
    }

    /// Sends one request to acquire, and tells the waiters what came of it.
    async fn ask(&mut self, ask: Ask) {
        let Some(answer) = self.response(&ask).await else {
            return;
        };
        match self.core.heard(answer) {
            Ok(Attempt::Granted(grant)) => {
                if let Err(error) = self.granted(&ask.claim, grant) {
                    self.ask_failed(error, false, false).await;
                }
            }
            Ok(Attempt::Busy(busy)) => {
                self.responded();
                let now = self.core.clock.now();
                self.change(|name, up_to| name.busy(&busy, true, up_to, now));
                if ask.wait.is_some() && ask.deadline().is_none_or(|at| now < at) && self.has_waiters() {
                    // It ended before its time; a pause keeps a backend that always does from spinning.
                    let soon = busy.retry_after.unwrap_or(self.pause);
                    self.pause(soon.clamp(FIRST_RETRY / 10, self.pause)).await;
                }
            }
            Err(error) => {
                let unsent = error.is_unsent() && !ask.was_sent;
                let now = self.core.clock.now();
                let is_over = ask.wait.is_none() || ask.deadline().is_some_and(|at| at <= now);
                self.ask_failed(error, unsent, is_over).await;
            }
        }
    }

    /// The response to a request to acquire. `None` if it waited at the server, and no caller waits for it any more.
    async fn response(&mut self, ask: &Ask) -> Option<Result<Attempt, LockError>> {
        let core = Arc::clone(&self.core);
        let sent = core.clock.now();
        let shortest = SHORTEST_RESPONSE.min(core.op_timeout);
        let mut request = pin!(catch_panic("acquire", async {
            match &ask.wait {
                None => core.backend.try_acquire(&ask.claim).await,
                Some(wait) => core.backend.acquire(&ask.claim, Wait::shared(wait)).await,
            }
        }));
        let told = || ask.wait.as_ref().and_then(|wait| wait.told());
        let mut busy_since = None;
        loop {
            let deadline = ask.deadline();
            let limit = match busy_since {
                None => {
                    let first_response = sent + core.op_timeout + GRACE;
                    Some(deadline.map_or(first_response, |at| first_response.min(at.max(sent + shortest))))
                }
                // The backend ends its wait at the deadline by itself; it is only cut off if it does not.
                Some(since) => deadline.map(|at| at.max(since) + shortest),
            };
            tokio::select! {
                biased;
                answer = &mut request => {
                    if let Some(busy) = told() {
                        self.waits(&busy);
                    }
                    return Some(answer);
                }
                () = self.wake.notified() => {
                    if let Some(busy) = told() {
                        self.waits(&busy);
                        busy_since = Some(core.clock.now());
                    }
                    if let (Some(wait), Some(deadline)) = (&ask.wait, self.look(|name| name.last_deadline()).flatten()) {
                        wait.put_off(deadline);
                    }
                }
                () = core.sleep_until([limit, self.next_expiry()].into_iter().flatten().min()) => {
                    let now = core.clock.now();
                    if limit.is_some_and(|limit| limit <= now) {
                        let waited = now.since(sent);
                        let limit = if busy_since.is_some() { waited } else { waited.min(core.op_timeout) };
                        return Some(Err(LockError::no_answer("acquire", limit)));
                    }
                    self.expire(deadline);
                }
            }
            if self.look(|name| name.is_wait_over()).unwrap_or(true) {
                return None;
            }
        }
    }

    /// The server has said busy, and the claim waits there.
    fn waits(&mut self, busy: &Busy) {
        self.responded();
        let now = self.core.clock.now();
        self.change(|name, up_to| name.busy(busy, false, up_to, now));
    }

    /// Makes a guard of a grant for the first waiter. If there is none, the claim is to be released.
    ///
    /// # Errors
    ///
    /// A grant that is not good any more when it is looked at does not count, and its claim is to be released.
    fn granted(&mut self, claim: &Claim, grant: Grant) -> Result<(), LockError> {
        let core = Arc::clone(&self.core);
        let now = core.clock.now();
        if let Err(error) = grant.check(claim, now) {
            self.look(|name| name.granted_in_vain(&grant.lease));
            return Err(error);
        }
        let granted = core
            .names
            .with(&self.key, |name, up_to| name.granted(&grant, up_to, now));
        let Some(((waiter, refused), _asking)) = granted.flatten() else {
            return Ok(());
        };
        self.responded();
        self.pause = FIRST_RETRY;
        core.answer(refused);
        let held = Held::new(&core, grant, &self.key, &waiter.options, now);
        core.watch(&held, None);
        core.give(*waiter, held, now);
        Ok(())
    }

    async fn ask_failed(&mut self, error: LockError, unsent: bool, is_over: bool) {
        let may_pass = matches!(error, LockError::Unavailable { .. });
        let now = self.core.clock.now();
        self.change(|name, up_to| name.failed(&error, unsent, is_over, up_to, now));
        if !may_pass || !self.has_waiters() {
            return;
        }
        match &self.outage {
            Some(_) => tracing::debug!(target: "fencelock", error = format_args!("{error:#}"), "asking again"),
            None => self.outage = Some(self.core.outages.begin(&error)),
        }
        self.pause(self.pause).await;
    }

    /// Sends one request to release, and tells the caller what came of it.
    async fn release(&mut self, claim: Claim, reservation: Reservation) {
        let core = Arc::clone(&self.core);
        let slots = match self.release_outage {
            None => &core.release_slots,
            Some(_) => &core.retry_slots,
        };
        let request = async { core.backend.release(&claim, core.rest(reservation)).await };
        let released = self.until(slots.run(core.op_timeout, request), || false).await;
        match released.map(|released| core.heard(released)) {
            Some(Ok(released)) => self.released(released).await,
            Some(Err(error)) => self.release_failed(error).await,
            None => {}
        }
    }

    async fn released(&mut self, outcome: Released) {
        let core = Arc::clone(&self.core);
        let Some((mut release, kept)) = self.look(|name| name.released(true)).flatten() else {
            return;
        };
        drop(kept);
        self.release_outage.take().into_iter().for_each(Outage::end);
        self.pause = FIRST_RETRY;
        if outcome == Released::Released && !release.is_clean_up {
            core.stats.released.add();
            tracing::debug!(target: "fencelock", name = %release.claim.name(), "released");
        }
        let reply = release.reply.take();
        drop(release);
        if let Some(reply) = reply {
            let _ = reply.send(Ok(outcome));
        }
        let now = core.clock.now();
        if !core.capabilities.fair && self.look(|name| name.yields(now, TENURE)) == Some(true) {
            // Others poll for this lock, and would always come too late.
            let pause = core.capabilities.give_way;
            self.wait(pause, || !self.has_waiters()).await;
        }
    }

    /// What fails is repeated until it is confirmed, or until the server must have let go by itself. After a shutdown it is not.
    async fn release_failed(&mut self, error: LockError) {
        let core = Arc::clone(&self.core);
        let now = core.clock.now();
        core.stats.release_errors.add();
        self.change(|name, up_to| name.failed(&error, true, false, up_to, now));
        let failed = self.look(|name| name.releasing().map(|release| release.failed(now)));
        let Some((reply, kept, is_over)) = failed.flatten() else {
            return;
        };
        drop(kept);
        self.release_outage
            .get_or_insert_with(|| core.release_outages.begin(&error));
        if let Some(reply) = reply {
            let _ = reply.send(Err(error));
        }
        let closed = core.names.is_closed();
        if closed && !is_over {
            core.stats.unreleased.add();
        }
        if closed || is_over {
            drop(self.look(|name| name.released(false)));
            return;
        }
        let pause = self.pause.mul_f64(0.5 + fastrand::f64());
        self.pause = (self.pause * 2).min(LAST_RETRY);
        self.wait(pause, || core.names.is_closed()).await;
    }

    fn look<T>(&self, look: impl FnOnce(&mut Name) -> T) -> Option<T> {
        self.core.names.with(&self.key, |name, _| look(name))
    }

    /// Changes the name, and answers the waiters whose requests end by that.
    fn change(&self, change: impl FnOnce(&mut Name, u64) -> Answers) {
        let answers = self.core.names.with(&self.key, change);
        self.core.answer(answers.unwrap_or_default());
    }

    fn has_waiters(&self) -> bool {
        self.look(|name| name.has_waiters()) == Some(true)
    }

    fn next_expiry(&self) -> Option<Stamp> {
        self.look(|name| name.next_expiry())?
    }

    /// Ends the requests whose time is over. The response to a request that waits until `asked_until` decides about those that wait for as long.
    fn expire(&self, asked_until: Option<Stamp>) {
        let now = self.core.clock.now();
        self.change(|name, _| name.expire(now, asked_until, &self.core));
    }

    fn responded(&mut self) {
        self.outage.take().into_iter().for_each(Outage::end);
    }

    /// Waits about that long before a request to acquire is repeated.
    async fn pause(&mut self, length: Duration) {
        self.pause = (self.pause * 2).min(LAST_RETRY);
        let length = length.mul_f64(0.5 + fastrand::f64());
        self.wait(length, || !self.has_waiters()).await;
    }

    /// Waits that long, or until `is_over` at a wake-up.
    async fn wait(&self, length: Duration, is_over: impl Fn() -> bool) {
        self.until(time::sleep(length), is_over).await;
    }

    /// Waits for `event`, or until `is_over` at a wake-up. Ends the requests whose time is over meanwhile.
    async fn until<T>(&self, event: impl Future<Output = T>, is_over: impl Fn() -> bool) -> Option<T> {
        let mut event = pin!(event);
        loop {
            let expiry = self.next_expiry();
            tokio::select! {
                biased;
                done = &mut event => return Some(done),
                () = self.wake.notified() => {}
                () = self.core.sleep_until(expiry) => self.expire(None),
            }
            if is_over() {
                return None;
            }
        }
    }
}

impl Drop for NameTask {
    fn drop(&mut self) {
        if !self.has_ended {
            let error = self.core.executor.dropped("acquire");
            self.core.answer(self.core.names.give_up(&self.key, &error));
        }
    }
}
