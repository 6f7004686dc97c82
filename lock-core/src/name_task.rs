//! The task of a name: sends the requests that [`Names`] decides on, and tells the waiters what came of them.
//!
//! ```text
//! loop {
//!     a guard has ended, or a claim has no use any more:
//!         release it; again, until that is confirmed or the lease must have ended at the server
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
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time;

use crate::call::catch_panic;
use crate::client::{ClientInner, TENURE};
use crate::held::Held;
use crate::names::{Ask, Name, Served, Step};
use crate::release::{Release, Releasing, Reservation};
use crate::waiters::{Answers, GRACE, SHORTEST_RESPONSE};
use crate::{Attempt, Busy, Claim, Grant, Lease, LockError, Outage, Released, Stamp, Wait};

const FIRST_RETRY: Duration = Duration::from_millis(50);
const LAST_RETRY: Duration = Duration::from_secs(1);

/// A request to the backend. It can be moved to the task of the name after its first step.
pub(crate) type Request<T> = Pin<Box<dyn Future<Output = Result<T, LockError>> + Send>>;

/// A request whose first step was done in the task of a caller.
pub(crate) enum Begun {
    Acquire(Ask, Request<Attempt>),
    Release(Request<Released>),
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

    /// A release, once there is a slot for it. Those that are repeated have slots of their own.
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
            let request = async { core.backend.release(&claim, core.rest(reservation)).await };
            slots.run(core.op_timeout, request).await
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
    pub(crate) fn start(self: &Arc<Self>, key: &Arc<str>, wake: Arc<Notify>, begun: Option<Begun>) {
        let task = NameTask {
            core: Arc::clone(self),
            key: Arc::clone(key),
            wake,
            has_ended: false,
            pause: FIRST_RETRY,
            outage: None,
            release_outage: None,
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

    /// The clean-up of a claim that never became a guard.
    pub(crate) fn clean_up(&self, claim: Claim, shared: Option<Lease>, counted: Option<Releasing>) -> Release {
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
    async fn run(mut self, begun: Option<Begun>) {
        match begun {
            Some(Begun::Acquire(ask, request)) => self.ask(ask, request).await,
            Some(Begun::Release(request)) => self.release(request).await,
            None => {}
        }
        loop {
            let core = Arc::clone(&self.core);
            let clean_up = |claim, shared, counted| core.clean_up(claim, shared, counted);
            match core.names.next(&self.key, clean_up) {
                Step::Ask(ask) => {
                    let request = core.acquire_request(&ask);
                    self.ask(ask, request).await;
                }
                Step::Release(claim, reservation) => {
                    let is_retry = self.release_outage.is_some();
                    self.release(core.release_request(claim, reservation, is_retry)).await;
                }
                Step::Hold => self.wait(Duration::MAX, || true).await,
                Step::End => break,
            }
        }
        self.has_ended = true;
    }

    /// Waits for the response to a request to acquire, and tells the waiters what came of it.
    async fn ask(&mut self, ask: Ask, request: Request<Attempt>) {
        let Some(answer) = self.response(&ask, request).await else {
            return;
        };
        match self.core.heard(answer) {
            Ok(Attempt::Granted(grant)) => {
                if let Err(error) = self.granted(&ask.claim, grant) {
                    self.ask_failed(error, false).await;
                }
            }
            Ok(Attempt::Busy(busy)) => {
                self.responded();
                let now = self.core.clock.now();
                self.change(|name| name.busy(&busy, true, now));
                if !ask.has_been_over(now) && self.has_waiters() {
                    // It ended before its time; a pause keeps a backend that always does from spinning.
                    let soon = busy.retry_after.unwrap_or(self.pause);
                    self.pause(soon.clamp(FIRST_RETRY / 10, self.pause)).await;
                }
            }
            Err(error) => {
                let is_over = ask.has_been_over(self.core.clock.now());
                self.ask_failed(error, is_over).await;
            }
        }
    }

    /// The response to a request to acquire. `None` if it waited at the server, and no caller waits for it any more.
    async fn response(&mut self, ask: &Ask, mut request: Request<Attempt>) -> Option<Result<Attempt, LockError>> {
        let core = Arc::clone(&self.core);
        let sent = core.clock.now();
        let shortest = SHORTEST_RESPONSE.min(core.op_timeout);
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
                        busy_since.get_or_insert(core.clock.now());
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
        self.change(|name| name.busy(busy, false, now));
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
        let served = self.look(|name| name.granted(&grant, now)).flatten();
        let Some(Served {
            waiter: Some(waiter),
            refused,
            ..
        }) = served
        else {
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

    async fn ask_failed(&mut self, error: LockError, is_over: bool) {
        let now = self.core.clock.now();
        self.change(|name| name.failed(&error, is_over, now));
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
        let sent = self.look(|name| name.last_serial()).unwrap_or_default();
        let released = self.until(request, || false).await;
        match released.map(|released| self.core.heard(released)) {
            Some(Ok(released)) => self.released(released).await,
            Some(Err(error)) => self.release_failed(error, sent).await,
            None => {}
        }
    }

    async fn released(&mut self, outcome: Released) {
        let core = Arc::clone(&self.core);
        let Some(release) = self.look(|name| name.released(true)).flatten() else {
            return;
        };
        self.release_outage.take().into_iter().for_each(Outage::end);
        self.pause = FIRST_RETRY;
        core.count_released(*release, outcome);
        let now = core.clock.now();
        if !core.capabilities.fair && self.look(|name| name.yields(now, TENURE)) == Some(true) {
            // Others poll for this lock, and would always come too late.
            let pause = core.capabilities.give_way;
            self.wait(pause, || !self.has_waiters()).await;
        }
    }

    /// What fails is repeated until it is confirmed, or until the lease must have ended at the server. After a shutdown it is not.
    async fn release_failed(&mut self, error: LockError, sent: u64) {
        let core = Arc::clone(&self.core);
        let now = core.clock.now();
        core.stats.release_errors.add();
        self.change(|name| name.fail_waits(&error, sent, now));
        let failed = self.look(|name| {
            let release = name.releasing()?;
            Some((release.reply.take(), release.kept.take(), release.is_over(now)))
        });
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
        self.core.names.with(&self.key, look)
    }

    /// Changes the name, and answers the waiters whose requests end by that.
    fn change(&self, change: impl FnOnce(&mut Name) -> Answers) {
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
        self.change(|name| name.expire(now, asked_until, &self.core));
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
