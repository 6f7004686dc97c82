//! The task of a name: sends the requests that [`Names`](crate::names::Names) decides on, and tells the waiters what came of them.
//!
//! ```text
//! loop {
//!     a guard has ended, or a claim has no use any more:
//!         release it; again, until that is confirmed or the lease must have ended at the server
//!     waiters, and no guard:
//!         try_acquire or acquire for the first waiter; granted: it gets the guard; busy: those that do not wait are refused
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
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time;
use tokio_util::task::AbortOnDropHandle;

use crate::call::{call, catch_panic};
use crate::client::{ClientInner, TENURE};
use crate::held::Held;
use crate::names::{Ask, Name, Next};
use crate::queue::{Answers, GRACE, SHORTEST_RESPONSE};
use crate::release::Reservation;
use crate::{Attempt, Claim, Grant, LockError, Outage, Released, Stamp, Wait};

const FIRST_RETRY: Duration = Duration::from_millis(50);
const LAST_RETRY: Duration = Duration::from_secs(1);

/// A request to the backend. It can be moved to the task of the name after its first step.
pub(crate) type Request<T> = Pin<Box<dyn Future<Output = Result<T, LockError>> + Send>>;

/// What the task of a name does next. The first step of the request may have been done in the task of a caller.
pub(crate) enum Step {
    Ask(Ask, Request<Attempt>),
    Release(Request<Released>),
    End,
}

impl ClientInner {
    pub(crate) fn acquire_request(&self, ask: &Ask) -> Request<Attempt> {
        let (backend, claim, wait) = (Arc::clone(&self.backend), ask.claim.clone(), ask.wait.clone());
        Box::pin(catch_panic("acquire", async move {
            match wait {
                None => backend.try_acquire(&claim).await,
                Some(wait) => backend.acquire(&claim, Wait::shared(wait)).await,
            }
        }))
    }

    /// A release, once there is a slot for it. Each backend works on its requests one after the other in the end, and with thousands at once most
    /// would run out of time there. Those that are repeated have slots of their own: those that fail again and again delay no others.
    pub(crate) fn release_request(
        self: &Arc<Self>,
        claim: Claim,
        reservation: Reservation,
        is_retry: bool,
    ) -> Request<Released> {
        let core = Arc::clone(self);
        Box::pin(async move {
            let slots = if is_retry {
                &core.retry_slots
            } else {
                &core.release_slots
            };
            let answered = || core.releases_answered.load(Ordering::Relaxed);
            // The semaphores are never closed.
            let _slot = match slots.try_acquire() {
                Ok(slot) => Some(slot),
                Err(_) => {
                    let (began, before) = (core.clock.now(), answered());
                    let slot = slots.acquire().await.ok();
                    if answered() == before && core.clock.now() >= began + core.op_timeout {
                        return Err(LockError::no_answer("release", core.op_timeout));
                    }
                    slot
                }
            };
            let keep = match reservation {
                Reservation::Until(until) => Some(until.since(core.clock.now())),
                Reservation::None | Reservation::Requested => None,
            };
            let keep = keep.filter(|rest| !rest.is_zero());
            let answer = call("release", core.op_timeout, core.backend.release(&claim, keep)).await;
            core.releases_answered
                .fetch_add(u64::from(answer.is_ok()), Ordering::Relaxed);
            answer
        })
    }

    /// Does the first step of some work in the task of the caller, which waits for it in any case.
    pub(crate) fn begin<W: Future + ?Sized>(&self, mut work: Pin<&mut W>) -> Poll<W::Output> {
        let Ok(runtime) = self.executor.handle() else {
            return Poll::Pending;
        };
        let _there = runtime.enter();
        let step = || work.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        // After a panic, as that of a timer whose runtime has ended, the task of the name panics, and its waiters are answered.
        catch_unwind(AssertUnwindSafe(step)).unwrap_or(Poll::Pending)
    }

    /// Starts the task of a name. What it can do without waiting is done before this returns if a request has begun: the caller waits for that.
    pub(crate) fn start(self: &Arc<Self>, key: &Arc<str>, wake: Arc<Notify>, begun: Option<Step>) {
        let task = NameTask {
            core: Arc::clone(self),
            key: Arc::clone(key),
            wake,
            has_ended: false,
            pause: FIRST_RETRY,
            outage: None,
            release_outage: None,
            first: None,
            timer: None,
        };
        let is_awaited = begun.is_some();
        let mut task = Box::pin(self.tasks.track_future(task.run(begun)));
        if is_awaited && self.begin(task.as_mut()).is_ready() {
            return;
        }
        if let Err(error) = self.executor.spawn(task) {
            tracing::error!(target: "fencelock", error = format_args!("{error:#}"), "the requests of a lock client cannot be sent");
            self.answer(self.names.give_up(key, &error));
        }
    }

    /// Waits until then; for ever, if that is the end of time.
    pub(crate) async fn sleep_until(&self, until: Stamp) {
        if until == Stamp::MAX {
            return std::future::pending().await;
        }
        loop {
            let left = until.since(self.clock.now());
            if left.is_zero() {
                return;
            }
            time::sleep(left).await;
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
    /// The serial of the request that began the task, while nothing looks at its time: most are granted by the first response.
    first: Option<u64>,
    timer: Option<AbortOnDropHandle<()>>,
}

impl NameTask {
    async fn run(mut self, begun: Option<Step>) {
        let mut step = begun.unwrap_or_else(|| self.next());
        loop {
            match step {
                Step::Ask(ask, request) => {
                    self.first = ask.first;
                    self.ask(ask, request).await;
                }
                Step::Release(request) => self.release(request).await,
                Step::End => break,
            }
            step = self.next();
        }
        self.has_ended = true;
    }

    fn next(&self) -> Step {
        let core = &self.core;
        match core.names.next(&self.key, core.clock.now(), &core.stats.abandoned) {
            Next::Ask(ask) => {
                let request = core.acquire_request(&ask);
                Step::Ask(ask, request)
            }
            Next::Release(claim, reservation, is_retry) => {
                Step::Release(core.release_request(claim, reservation, is_retry))
            }
            Next::End => Step::End,
        }
    }

    /// Waits for the response to a request to acquire, and tells the waiters what came of it.
    async fn ask(&mut self, ask: Ask, request: Request<Attempt>) {
        let Some(answer) = self.response(&ask, request).await else {
            return;
        };
        let now = self.core.clock.now();
        match self.core.heard(answer) {
            Ok(Attempt::Granted(grant)) => {
                if let Err(error) = self.granted(&ask.claim, grant) {
                    self.ask_failed(error, false).await;
                }
            }
            Ok(Attempt::Busy(busy)) => {
                self.outage.take().into_iter().for_each(Outage::end);
                self.answer(|name| name.busy(&busy, true, now));
                if !ask.has_been_over(now) && self.has_waiters() {
                    // It ended before its time; a pause keeps a backend that always does from spinning.
                    let soon = busy.retry_after.unwrap_or(self.pause);
                    self.pause(soon.clamp(FIRST_RETRY / 10, self.pause)).await;
                }
            }
            Err(error) => self.ask_failed(error, ask.has_been_over(now)).await,
        }
    }

    /// The response to a request to acquire. `None` if it waited at the server, and no caller waits for it any more.
    async fn response(&mut self, ask: &Ask, mut request: Request<Attempt>) -> Option<Result<Attempt, LockError>> {
        let core = Arc::clone(&self.core);
        let sent = core.clock.now();
        let shortest = SHORTEST_RESPONSE.min(core.op_timeout);
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
            let answer = tokio::select! {
                biased;
                answer = &mut request => Some(answer),
                () = self.wake.notified() => {
                    self.time_first();
                    None
                }
                () = core.sleep_until(limit.unwrap_or(Stamp::MAX)) => {
                    let waited = core.clock.now().since(sent);
                    let limit = if busy_since.is_some() { waited } else { waited.min(core.op_timeout) };
                    return Some(Err(LockError::no_answer("acquire", limit)));
                }
            };
            if let Some(busy) = ask.wait.as_ref().and_then(|wait| wait.told()) {
                // The server has said busy, and the claim waits there.
                let now = core.clock.now();
                busy_since.get_or_insert(now);
                self.outage.take().into_iter().for_each(Outage::end);
                self.answer(|name| name.busy(&busy, false, now));
            }
            if answer.is_some() {
                return answer;
            }
            if self.look(|name| name.is_wait_over()).unwrap_or(true) {
                return None;
            }
        }
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
        let Some((waiter, refused)) = self.look(|name| name.granted(&grant, now)).flatten() else {
            return Ok(());
        };
        self.outage.take().into_iter().for_each(Outage::end);
        self.pause = FIRST_RETRY;
        core.answer(refused);
        let held = Held::new(&core, grant, &self.key, &waiter.options, now);
        core.watch(&held, None);
        core.give(*waiter, held, now);
        Ok(())
    }

    async fn ask_failed(&mut self, error: LockError, is_over: bool) {
        let now = self.core.clock.now();
        self.answer(|name| name.failed(&error, is_over, now));
        if !error.may_pass() || !self.has_waiters() {
            return;
        }
        match &self.outage {
            Some(_) => tracing::debug!(target: "fencelock", error = format_args!("{error:#}"), "asking again"),
            None => self.outage = Some(self.core.outages.begin(&error)),
        }
        // The claim of a wait that was over is released first.
        if !is_over {
            self.pause(self.pause).await;
        }
    }

    /// Waits for the response to a release, and tells the caller what came of it.
    async fn release(&mut self, request: Request<Released>) {
        let core = Arc::clone(&self.core);
        let sent = self.look(|name| name.last_serial()).unwrap_or_default();
        let outcome = match core.heard(request.await) {
            Ok(outcome) => outcome,
            Err(error) => return self.release_failed(error, sent).await,
        };
        let Some(release) = self.look(|name| name.released(true)).flatten() else {
            return;
        };
        self.release_outage.take().into_iter().for_each(Outage::end);
        self.pause = FIRST_RETRY;
        core.count_released(*release, outcome);
        let now = core.clock.now();
        if !core.capabilities.fair && self.look(|name| name.yields(now, TENURE)) == Some(true) {
            // Others poll for this lock, and would always come too late.
            self.wait(core.capabilities.give_way, || !self.has_waiters()).await;
        }
    }

    /// What fails is repeated until it is confirmed, or until the lease must have ended at the server. After a shutdown it is not.
    async fn release_failed(&mut self, error: LockError, sent: u64) {
        let core = Arc::clone(&self.core);
        let now = core.clock.now();
        core.stats.release_errors.add();
        self.answer(|name| name.fail_waits(&error, sent, now));
        let failed = self.look(|name| {
            let release = name.releasing()?;
            release.has_failed = true;
            let told = std::mem::take(&mut release.told);
            Some((release.reply.take(), told, release.is_over(now)))
        });
        let Some((reply, told, is_over)) = failed.flatten() else {
            return;
        };
        drop(told);
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
        self.core.names.change(&self.key, look)
    }

    /// Changes the name, and answers the waiters whose requests end by that.
    fn answer(&mut self, change: impl FnOnce(&mut Name) -> Answers) {
        self.core.answer(self.look(change).unwrap_or_default());
        self.time_first();
    }

    fn time_first(&mut self) {
        if let Some(serial) = self.first.take() {
            self.timer = self.core.end_in_time(&self.key, serial);
        }
    }

    fn has_waiters(&self) -> bool {
        self.look(|name| name.has_waiters()) == Some(true)
    }

    /// Waits about that long before a request to acquire is repeated.
    async fn pause(&mut self, length: Duration) {
        self.pause = (self.pause * 2).min(LAST_RETRY);
        let length = length.mul_f64(0.5 + fastrand::f64());
        self.wait(length, || !self.has_waiters()).await;
    }

    /// Waits that long, or until `is_over` at a wake-up.
    async fn wait(&self, length: Duration, is_over: impl Fn() -> bool) {
        let mut pause = pin!(time::sleep(length));
        loop {
            tokio::select! {
                biased;
                () = &mut pause => return,
                () = self.wake.notified() => {}
            }
            if is_over() {
                return;
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
