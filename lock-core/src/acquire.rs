//! How a lock is acquired.
//!
//! ```text
//! local queue ── turn ──> try_acquire, or acquire ── granted ────────────────> guard
//!      │                       │ a failure that may pass, or a wait that        ^
//!      │                       │ ended too early                                │
//!      │                       └──> asks again, until the wait is over ─────────┤
//!      └── hand-over by the holder before us ───────────────────────────────────┘
//! ```
//!
//! The rule for failures: what may pass ([`LockError::Unavailable`]) is asked again until the wait is over, which it is at once for a request
//! that does not wait; without a limit, for an `op_timeout` before the server has answered at all, and as long as it takes once it has
//! said "busy". The last answer decides between "timed out" and "unavailable". A failure that only a person can mend ends every wait at once, and also that of the waiters in
//! the local queue that wait for a first answer to a sibling.

use std::future::Future;
use std::mem;
use std::pin::pin;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::ask::{ask, unbroken};
use crate::engine::{Core, Releasing, runtime_ended};
use crate::guard::LockGuard;
use crate::pending::{Outcome, Pending};
use crate::queue::{Entered, Next, Ticket, Turn};
use crate::request::Wish;
use crate::sync::{oneshot, time};
use crate::{Attempt, Busy, LockError, Outage, Stamp, Wait};

/// How long an answer is waited for, however short the wait that was asked for.
const ONE_TRIP: Duration = Duration::from_secs(1);
const FIRST_RETRY: Duration = Duration::from_millis(50);
const LAST_RETRY: Duration = Duration::from_secs(1);

/// One acquisition, driven by a task of the client's own.
#[derive(Clone)]
pub(crate) struct Acquisition {
    core: Arc<Core>,
    wish: Arc<Wish>,
    started: Stamp,
    deadline: Option<Stamp>,
    /// Set when the caller goes away: what the task lets go of counts as under way until the task has noticed.
    given_up: Arc<OnceLock<Releasing>>,
}

type Answer = oneshot::Sender<Result<LockGuard, LockError>>;

impl Acquisition {
    pub(crate) fn new(core: Arc<Core>, wish: Wish) -> Self {
        let started = core.clock.now();
        let deadline = wish.wait.map(|limit| started + limit);
        Self {
            core,
            wish: Arc::new(wish),
            started,
            deadline,
            given_up: Arc::default(),
        }
    }

    /// The caller, who waits for what the task of this acquisition answers.
    pub(crate) fn caller(&self, answer: oneshot::Receiver<Result<LockGuard, LockError>>) -> Caller<'_> {
        Caller {
            acquisition: self,
            answer: Some(answer),
        }
    }

    /// Runs to the end, or until the caller or the client goes away.
    pub(crate) async fn run(self, mut caller: Answer) {
        let stats = &self.core.stats;
        let waiting = stats.waiting.hold();
        let outcome = self.outcome(&mut caller).await;
        drop(waiting);
        match &outcome {
            Ok(guard) => {
                stats.acquired.add();
                tracing::debug!(target: "fencelock", token = %guard.token(), waited = ?self.waited(), "acquired");
            }
            Err(LockError::TimedOut { .. }) => stats.timed_out.add(),
            Err(LockError::Closed { .. }) if caller.is_closed() => stats.cancelled.add(),
            Err(error) => {
                stats.failed.add();
                tracing::debug!(target: "fencelock", error = format_args!("{error:#}"), "not acquired");
            }
        }
        // If the caller is gone, this drops the guard, which releases.
        let _ = caller.send(outcome);
    }

    async fn outcome(&self, caller: &mut Answer) -> Result<LockGuard, LockError> {
        if caller.is_closed() || self.core.closing.is_cancelled() {
            return Err(LockError::closed());
        }
        let (mut pending, mut answer, mut told_busy) = match self.enter(caller).await? {
            Place::Handed(guard) => return Ok(guard),
            Place::Asked { pending, answer } => (pending, Some(*answer), true),
            Place::Turn { turn, told_busy } => {
                let pending = Pending::new(Arc::clone(&self.core), self.wish.claim(), turn);
                (pending, None, told_busy)
            }
        };
        let mut pause = FIRST_RETRY;
        let mut outage: Option<Outage> = None;
        loop {
            let (answer, waited) = match answer.take() {
                Some(answer) => (answer, false),
                None => match self.ask(caller, &mut pending, &mut told_busy, &mut outage).await? {
                    Ok(Outcome::Guard(guard)) => {
                        outage.into_iter().for_each(Outage::end);
                        return Ok(guard);
                    }
                    Ok(Outcome::Busy(busy)) => (Ok(busy), true),
                    Err(error) => (Err(error), true),
                },
            };
            match answer {
                Ok(busy) => {
                    outage.take().into_iter().for_each(Outage::end);
                    pending.busy(&busy);
                    told_busy = true;
                    if self.is_over() {
                        return Err(self.timed_out(busy));
                    }
                    if waited {
                        // It ended before its time; a pause keeps a backend that always does from spinning.
                        let soon = busy.retry_after.unwrap_or(pause).clamp(FIRST_RETRY / 10, pause);
                        self.pause(caller, soon, told_busy).await?;
                        pause = (pause * 2).min(LAST_RETRY);
                    }
                }
                Err(error) => {
                    let may_pass = matches!(error, LockError::Unavailable { .. });
                    pending.failed(&error, !may_pass && !told_busy);
                    if !may_pass || self.is_out_of_time(told_busy) {
                        return Err(error);
                    }
                    match &outage {
                        Some(_) => {
                            tracing::debug!(target: "fencelock", error = format_args!("{error:#}"), "asking again")
                        }
                        None => outage = Some(self.core.outages.begin(&error)),
                    }
                    self.pause(caller, pause, told_busy).await?;
                    pause = (pause * 2).min(LAST_RETRY);
                }
            }
        }
    }

    /// Asks the server once, and waits there if it says busy, which `told_busy` tells then.
    async fn ask(
        &self,
        caller: &mut Answer,
        pending: &mut Pending,
        told_busy: &mut bool,
        outage: &mut Option<Outage>,
    ) -> Result<Result<Outcome, LockError>, LockError> {
        let before = pending.send();
        let answer = if self.is_over() {
            let limit = self.answer_limit(*told_busy);
            ask("acquire", limit, async {
                self.core.backend.try_acquire(pending.claim()).await
            })
            .await
        } else {
            self.wait_at_server(caller, pending, told_busy, outage).await?
        };
        // A server that has said "busy" knows of the claim.
        Ok(pending.answered(before || *told_busy, answer, &self.wish))
    }

    async fn wait_at_server(
        &self,
        caller: &mut Answer,
        pending: &Pending,
        told_busy: &mut bool,
        outage: &mut Option<Outage>,
    ) -> Result<Result<Attempt, LockError>, LockError> {
        let (tell, mut told) = oneshot::channel();
        // Nobody listens any more if the answer came at the same time.
        let wait = Wait::until(self.deadline).on_busy(move |busy| drop(tell.send(busy)));
        let backend = &self.core.backend;
        let mut request = pin!(unbroken("acquire", async {
            backend.acquire(pending.claim(), wait).await
        }));
        let limit = self.answer_limit(*told_busy);
        // The first request of a caller that goes away is not cut off: it might reach the server after its release.
        let may_be_cut_off = *told_busy;
        let busy = tokio::select! {
            biased;
            done = &mut request => {
                if let Ok(busy) = told.try_recv() {
                    pending.told(&busy);
                    *told_busy = true;
                }
                return Ok(done);
            }
            Ok(busy) = &mut told => busy,
            closed = self.gone(caller), if may_be_cut_off => return Err(closed),
            () = time::sleep(limit) => return Ok(Err(LockError::no_answer("acquire", limit))),
        };
        *told_busy = true;
        pending.told(&busy);
        outage.take().into_iter().for_each(Outage::end);
        self.unless_gone(caller, self.until_overdue(request)).await
    }

    /// A wait at the server. The backend ends it at the deadline by itself; it is only cut off if it does not.
    async fn until_overdue(
        &self,
        wait: impl Future<Output = Result<Attempt, LockError>>,
    ) -> Result<Attempt, LockError> {
        let Some(deadline) = self.deadline else {
            return wait.await;
        };
        let left = deadline.since(self.core.clock.now());
        let limit = left.saturating_add(self.one_trip());
        let waited = time::timeout(limit, wait).await;
        waited.unwrap_or_else(|_| Err(LockError::no_answer("acquire", limit)))
    }

    /// Waits for this client's turn at the server.
    async fn enter(&self, caller: &mut Answer) -> Result<Place, LockError> {
        if self.wish.waits() {
            let mut ticket = match self.join(true) {
                Ok(place) => return place,
                Err(ticket) => ticket,
            };
            if let Some(next) = self.next(caller, &mut ticket, Some(self.first_until())).await? {
                return match (&next, ticket.failure()) {
                    // The one before gave up at the same time. To ask once more takes time that is over.
                    (Next::Turn { told_busy, .. }, Some(failure)) if self.is_out_of_time(*told_busy) => Err(failure),
                    _ => self.place(next),
                };
            }
            if ticket.told_busy()
                && !self.is_over()
                && let Some(next) = self.next(caller, &mut ticket, self.deadline).await?
            {
                return self.place(next);
            }
            let is_over = self.is_over();
            if let Some(busy) = ticket.busy().filter(|_| is_over) {
                return Err(self.timed_out(busy));
            }
            if let Some(failure) = ticket.failure() {
                return Err(failure);
            }
            // What the server said before this request is no answer to it, and the time for one is over.
            if !is_over {
                return Err(LockError::no_answer("acquire", self.waited()));
            }
        }
        // Nobody has heard from the server so far. Whatever it says next is taken for an answer.
        let mut ticket = match self.join(false) {
            Ok(place) => return place,
            Err(ticket) => ticket,
        };
        let until = if self.wish.waits() {
            self.started + self.one_trip()
        } else {
            self.first_until()
        };
        match self.next(caller, &mut ticket, Some(until)).await? {
            Some(next) => self.place(next),
            None => Err(LockError::no_answer("acquire", self.waited())),
        }
    }

    fn join(&self, patient: bool) -> Result<Result<Place, LockError>, Ticket> {
        let key = self.core.backend.queue_key(&self.wish.name);
        match self.core.queue.enter(key, &self.wish, patient) {
            Entered::Turn(turn) => Ok(Ok(Place::Turn { turn, told_busy: false })),
            Entered::Busy(busy) => Ok(Err(self.timed_out(busy))),
            Entered::Queued(ticket) => Err(ticket),
        }
    }

    fn place(&self, next: Next) -> Result<Place, LockError> {
        match next {
            Next::Turn { turn, told_busy } => Ok(Place::Turn { turn, told_busy }),
            Next::Handed(guard) => Ok(Place::Handed(guard)),
            Next::Asked { pending, answer } => Ok(Place::Asked {
                pending,
                answer: Box::new(answer),
            }),
            Next::Refused(busy) => Err(self.timed_out(busy)),
            Next::Failed(failure) => Err(failure),
        }
    }

    /// Waits in the local queue until `limit`.
    async fn next(
        &self,
        caller: &mut Answer,
        ticket: &mut Ticket,
        limit: Option<Stamp>,
    ) -> Result<Option<Next>, LockError> {
        self.unless_gone(caller, async {
            tokio::select! {
                biased;
                next = ticket.next() => next.map(Some).ok_or_else(runtime_ended),
                () = self.sleep_until(limit) => Ok(None),
            }
        })
        .await?
    }

    fn timed_out(&self, busy: Busy) -> LockError {
        let waited = if self.wish.waits() {
            self.waited()
        } else {
            Duration::ZERO
        };
        LockError::timed_out(&self.wish.name, waited, busy.holder)
    }

    fn waited(&self) -> Duration {
        self.core.clock.now().since(self.started)
    }

    fn is_over(&self) -> bool {
        !self.wish.waits() || self.deadline.is_some_and(|deadline| self.core.clock.now() >= deadline)
    }

    /// How long an answer is waited for at least.
    fn one_trip(&self) -> Duration {
        ONE_TRIP.min(self.core.op_timeout)
    }

    /// Until when a first answer, to a sibling or to oneself, is waited for; a request that waits waits out failures, too.
    fn first_until(&self) -> Stamp {
        let until = self.started + self.core.op_timeout;
        self.deadline.filter(|_| self.wish.waits()).unwrap_or(until)
    }

    /// The same once it may be known that the lock is held; `None` is as long as it takes.
    fn until(&self, told_busy: bool) -> Option<Stamp> {
        if told_busy {
            self.deadline
        } else {
            Some(self.first_until())
        }
    }

    /// Whether no time is left for another attempt.
    fn is_out_of_time(&self, told_busy: bool) -> bool {
        let left = self.until(told_busy).map(|until| until.since(self.core.clock.now()));
        !self.wish.waits() || left.is_some_and(|left| left < FIRST_RETRY)
    }

    /// How long the answer to one request is waited for.
    fn answer_limit(&self, told_busy: bool) -> Duration {
        let limit = self.core.op_timeout;
        let left = self
            .until(told_busy)
            .map_or(limit, |until| until.since(self.core.clock.now()));
        left.min(limit).max(self.one_trip())
    }

    /// Waits about that long, but not beyond the end of the wait.
    async fn pause(&self, caller: &mut Answer, length: Duration, told_busy: bool) -> Result<(), LockError> {
        let pause = self.core.clock.now() + length.mul_f64(0.5 + fastrand::f64());
        let until = self.until(told_busy).map_or(pause, |until| until.min(pause));
        self.unless_gone(caller, self.sleep_until(Some(until))).await
    }

    async fn sleep_until(&self, until: Option<Stamp>) {
        let Some(until) = until else {
            return std::future::pending().await;
        };
        loop {
            let left = until.since(self.core.clock.now());
            if left.is_zero() {
                return;
            }
            time::sleep(left).await;
        }
    }

    /// `work`, unless the caller drops its future or the client is shut down before it ends.
    async fn unless_gone<T>(&self, caller: &mut Answer, work: impl Future<Output = T>) -> Result<T, LockError> {
        tokio::select! {
            biased;
            closed = self.gone(caller) => Err(closed),
            done = work => Ok(done),
        }
    }

    /// Waits until the caller drops its future or the client is shut down.
    async fn gone(&self, caller: &mut Answer) -> LockError {
        tokio::select! {
            biased;
            () = self.core.closing.cancelled() => {}
            () = caller.closed() => {}
        }
        LockError::closed()
    }
}

/// The caller of an acquisition.
pub(crate) struct Caller<'a> {
    acquisition: &'a Acquisition,
    // None once it is answered.
    answer: Option<oneshot::Receiver<Result<LockGuard, LockError>>>,
}

impl Caller<'_> {
    /// Waits for the answer. `None` if the task ended without one.
    pub(crate) async fn outcome(mut self) -> Option<Result<LockGuard, LockError>> {
        let outcome = self.answer.as_mut()?.await;
        self.answer = None;
        outcome.ok()
    }
}

impl Drop for Caller<'_> {
    fn drop(&mut self) {
        let Some(answer) = self.answer.take() else { return };
        let core = &self.acquisition.core;
        if core.process.is_current() {
            let _ = self.acquisition.given_up.set(core.releasing());
        } else {
            // A forked child does not wake the task, which runs in its parent.
            mem::forget(answer);
        }
    }
}

/// Where an acquisition starts from.
enum Place {
    Turn {
        turn: Turn,
        told_busy: bool,
    },
    Handed(LockGuard),
    Asked {
        pending: Pending,
        answer: Box<Result<Busy, LockError>>,
    },
}
