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
use crate::name_state::{Ask, Name};
use crate::names::Next;
use crate::queue::{Answer, GRACE, SHORTEST_RESPONSE, Waiter};
use crate::release::{Release, Reservation};
use crate::wait::SharedWait;
use crate::{Attempt, Claim, Grant, LockError, Outage, Released, Stamp, Wait};

const FIRST_RETRY: Duration = Duration::from_millis(50);
const LAST_RETRY: Duration = Duration::from_secs(1);

/// A request to the backend. It can be moved to the task of the name after its first step.
pub(crate) type Request<T> = Pin<Box<dyn Future<Output = Result<T, LockError>> + Send>>;

/// A request whose first step was done in the task of a caller.
pub(crate) enum Begun {
    /// For the request with that serial, whose time nothing looks at so far.
    Ask(u64, Ask, Request<Attempt>),
    Release(Request<Released>),
}

impl ClientInner {
    pub(crate) fn acquire_request(&self, (claim, wait): Ask) -> Request<Attempt> {
        let backend = Arc::clone(&self.backend);
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
    pub(crate) fn start(self: &Arc<Self>, key: &Arc<str>, wake: Arc<Notify>, begun: Option<Begun>) {
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
    async fn run(mut self, begun: Option<Begun>) {
        match begun {
            Some(Begun::Ask(serial, ask, request)) => {
                self.first = Some(serial);
                self.ask(Some((ask, request))).await;
            }
            Some(Begun::Release(request)) => self.release(Some(request)).await,
            None => {}
        }
        loop {
            match self.core.names.next(&self.key) {
                Next::Ask => self.ask(None).await,
                Next::Release => self.release(None).await,
                Next::End => break,
            }
        }
        self.has_ended = true;
    }

    /// Asks for a claim until it is granted, or of no more use: it is to be released then, if the server may know of it.
    async fn ask(&mut self, mut begun: Option<(Ask, Request<Attempt>)>) {
        let core = Arc::clone(&self.core);
        let next = |ask: Ask| (ask.clone(), core.acquire_request(ask));
        let (mut sent, mut lease) = (0_u32, None);
        while let Some((ask, request)) = begun
            .take()
            .or_else(|| self.look(|name| name.ask()).flatten().map(next))
        {
            sent += 1;
            let Some((answer, was_busy)) = self.response(&ask.1, request).await else {
                break;
            };
            let now = core.clock.now();
            // Whether the backend may have ended its wait by itself.
            let mut is_over = ask.1.as_ref().is_none_or(|wait| wait.has_been_over(now));
            let error = match core.heard(answer) {
                Ok(Attempt::Granted(grant)) => {
                    lease = Some(grant.lease.clone());
                    match grant.check(&ask.0, now) {
                        Ok(()) if self.granted(grant, now) => return,
                        Ok(()) => break,
                        Err(error) => {
                            is_over = false;
                            error
                        }
                    }
                }
                Ok(Attempt::Busy(busy)) => {
                    let soon = busy.retry_after.unwrap_or(self.pause);
                    self.responded();
                    self.answer(|name| name.busy(busy, false, now));
                    if !is_over && self.has_waiters() {
                        // It ended before its time; a pause keeps a backend that always does from spinning.
                        self.pause(soon.clamp(FIRST_RETRY / 10, self.pause)).await;
                    }
                    return;
                }
                Err(error) => error,
            };
            // A server that has said busy knows of the claim.
            sent -= u32::from(error.is_unsent() && !was_busy);
            self.answer(|name| name.failed(&error, u64::MAX, now));
            if error.may_pass() && self.has_waiters() {
                match &self.outage {
                    Some(_) => {
                        tracing::debug!(target: "fencelock", error = format_args!("{error:#}"), "asking again");
                    }
                    None => self.outage = Some(core.outages.begin(&error)),
                }
                if !is_over {
                    self.pause(self.pause).await;
                }
            }
            // The backend may have begun to release the claim, and the network may deliver that later: the next request is for a claim of its own.
            if is_over || !error.may_pass() {
                break;
            }
        }
        let now = core.clock.now();
        self.look(|name| name.give_up(sent > 0, lease.as_ref(), now, || core.names.releasing()));
        if sent > 0 {
            core.stats.abandoned.add();
        }
    }

    /// The response to a request to acquire, and whether the server had said busy before. `None` if the claim waited at the server, and no caller
    /// waits for it any more.
    async fn response(
        &mut self,
        wait: &Option<Arc<SharedWait>>,
        mut request: Request<Attempt>,
    ) -> Option<(Result<Attempt, LockError>, bool)> {
        let core = Arc::clone(&self.core);
        let sent = core.clock.now();
        let shortest = SHORTEST_RESPONSE.min(core.op_timeout);
        let mut busy_since = None;
        loop {
            let deadline = wait.as_ref().and_then(|wait| wait.deadline());
            let limit = match busy_since {
                None => {
                    let first_response = sent + core.op_timeout + GRACE;
                    deadline.map_or(first_response, |at| first_response.min(at.max(sent + shortest)))
                }
                // The backend ends its wait at the deadline by itself; it is only cut off if it does not.
                Some(since) => deadline.map_or(Stamp::MAX, |at| at.max(since) + shortest),
            };
            let answer = tokio::select! {
                biased;
                answer = &mut request => Some(answer),
                () = self.wake.notified() => None,
                () = core.sleep_until(limit) => {
                    let waited = core.clock.now().since(sent);
                    let limit = if busy_since.is_some() { waited } else { waited.min(core.op_timeout) };
                    Some(Err(LockError::no_answer("acquire", limit)))
                }
            };
            if let Some(busy) = wait.as_ref().and_then(|wait| wait.told()) {
                // The server has said busy, and the claim waits there.
                let now = core.clock.now();
                busy_since.get_or_insert(now);
                self.responded();
                self.answer(|name| name.busy(busy, true, now));
            }
            if let Some(answer) = answer {
                return Some((answer, busy_since.is_some()));
            }
            self.time_first();
            if self.look(|name| name.is_wait_over()).unwrap_or(true) {
                return None;
            }
        }
    }

    /// Makes a guard of a grant for the first waiter. False if none wants it.
    fn granted(&mut self, grant: Grant, now: Stamp) -> bool {
        let (core, key) = (Arc::clone(&self.core), Arc::clone(&self.key));
        let claim = grant.claim.clone();
        let hold = |waiter: &Waiter| Held::new(&core, grant, &key, &waiter.options, waiter.serial, now);
        let Some((waiter, held, refused)) = self.look(|name| name.serve(&claim, now, hold)).flatten() else {
            return false;
        };
        self.responded();
        self.pause = FIRST_RETRY;
        core.watch(&held, None);
        core.answer(refused);
        core.give(*waiter, Ok(held));
        true
    }

    fn responded(&mut self) {
        self.outage.take().into_iter().for_each(Outage::end);
    }

    /// Waits for the response to a release, and tells the caller what came of it.
    async fn release(&mut self, begun: Option<Request<Released>>) {
        let core = Arc::clone(&self.core);
        let next = |release: &mut Release| {
            core.release_request(release.claim.clone(), release.reservation, release.has_failed)
        };
        let request = begun.or_else(|| self.look(|name| name.release.as_deref_mut().map(next)).flatten());
        let Some(request) = request else { return };
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
        self.answer(|name| name.failed(&error, sent, now));
        let failed = self.look(|name| {
            let release = name.release.as_deref_mut()?;
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
    fn answer(&mut self, change: impl FnOnce(&mut Name) -> Vec<Answer>) {
        self.core.answer(self.look(change).unwrap_or_default());
        self.time_first();
    }

    fn time_first(&mut self) {
        if let Some(serial) = self.first.take() {
            self.timer = self.core.end_in_time(&self.key, serial);
        }
    }

    fn has_waiters(&self) -> bool {
        self.look(|name| name.front().is_some()) == Some(true)
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
