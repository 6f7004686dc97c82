//! How a lock is acquired.
//!
//! ```text
//! local queue ── turn ──> try_acquire, or try_then_wait ── granted ────────> guard
//!      │                       │ busy, and the wait did not end in a grant     ^
//!      │                       └──> waits again, also after failures ──────────┤
//!      └── hand-over by the holder before us ──────────────────────────────────┘
//! ```
//!
//! The rule for failures: before the server has answered at all, a failure is an error at once. After one "busy",
//! failures that may pass are retried until the wait is over, and the last answer decides between "timed out" and "unavailable".
//! A failure that only a person can change ends every wait at once.
//! Waiters in the local queue wait for the first answer to a sibling. A failure of its first request is theirs too; a failure
//! of one that is repeated, or of a hand-over, is not: their own time for a first answer goes on.

use std::future::Future;
use std::mem;
use std::pin::pin;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::ask::unbroken;
use crate::engine::{Core, Releasing, runtime_ended};
use crate::guard::LockGuard;
use crate::pending::{Outcome, Pending, signal};
use crate::queue::{Entered, Next, Ticket, Turn};
use crate::request::Wish;
use crate::sync::{oneshot, time};
use crate::{Attempt, Busy, LockError, Outage, Stamp};

/// How long an answer is waited for at least, however short the wait that was asked for.
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
        let mut waited_at_server = false;
        let (mut pending, mut answer, mut told_busy) = match self.enter(caller).await? {
            Place::Handed(guard) => return Ok(guard),
            Place::Asked { pending, answer } => (pending, *answer, true),
            Place::Turn { turn, mut told_busy } => {
                let mut pending = Pending::new(Arc::clone(&self.core), self.wish.claim(), turn);
                let attempt = if self.is_over() {
                    pending.try_acquire(self.first_limit()).await
                } else {
                    let attempt = self.try_then_wait(caller, &mut pending, &mut waited_at_server).await?;
                    told_busy |= waited_at_server;
                    attempt
                };
                match attempt.and_then(|attempt| pending.accept(attempt, &self.wish)) {
                    Ok(Outcome::Guard(guard)) => return Ok(guard),
                    Ok(Outcome::Busy(busy)) => (pending, Ok(busy), true),
                    Err(error) => (pending, Err(error), told_busy),
                }
            }
        };
        let mut pause = FIRST_RETRY;
        let mut outage: Option<Outage> = None;
        loop {
            match answer {
                Ok(busy) => {
                    outage.take().into_iter().for_each(Outage::end);
                    pending.busy(&busy);
                    told_busy = true;
                    if self.is_over() {
                        return Err(self.timed_out(busy));
                    }
                    if waited_at_server {
                        // It ended before its time; a pause keeps a backend that always does from spinning.
                        let soon = busy.retry_after.unwrap_or(pause).clamp(FIRST_RETRY / 10, pause);
                        self.pause(caller, soon).await?;
                        pause = (pause * 2).min(LAST_RETRY);
                    }
                }
                Err(error) => {
                    pending.failed(&error, !told_busy);
                    if !told_busy {
                        return Err(error);
                    }
                    if !matches!(error, LockError::Unavailable { .. }) || self.is_over() {
                        return Err(error);
                    }
                    match &outage {
                        Some(_) => {
                            tracing::debug!(target: "fencelock", error = format_args!("{error:#}"), "asking again")
                        }
                        None => outage = Some(self.core.outages.begin(&error)),
                    }
                    self.pause(caller, pause).await?;
                    pause = (pause * 2).min(LAST_RETRY);
                }
            }
            waited_at_server = true;
            let waiting = self.until_overdue(pending.acquire(self.deadline, &mut outage));
            answer = match self.unless_gone(caller, waiting).await? {
                Ok(attempt) => match pending.accept(attempt, &self.wish) {
                    Ok(Outcome::Guard(guard)) => {
                        outage.into_iter().for_each(Outage::end);
                        return Ok(guard);
                    }
                    Ok(Outcome::Busy(busy)) => Ok(busy),
                    Err(error) => Err(error),
                },
                Err(error) => Err(error),
            };
        }
    }

    /// Asks the server for the first time, and goes on waiting there if it says busy, which `told_busy` tells then.
    async fn try_then_wait(
        &self,
        caller: &mut Answer,
        pending: &mut Pending,
        told_busy: &mut bool,
    ) -> Result<Result<Attempt, LockError>, LockError> {
        pending.send();
        let (busy, mut told) = signal();
        let backend = &self.core.backend;
        let request = async { backend.try_then_wait(pending.claim(), self.deadline, busy).await };
        let mut request = pin!(unbroken("acquire", request));
        let limit = self.first_limit();
        let busy = tokio::select! {
            biased;
            done = &mut request => {
                *told_busy = pending.hears(&mut told);
                return Ok(done);
            }
            Ok(busy) = &mut told => busy,
            () = time::sleep(limit) => return Ok(Err(LockError::no_answer("acquire", limit))),
        };
        *told_busy = true;
        pending.told(&busy);
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
        let limit = left.saturating_add(ONE_TRIP.min(self.core.op_timeout));
        let waited = time::timeout(limit, wait).await;
        waited.unwrap_or_else(|_| Err(LockError::no_answer("acquire", limit)))
    }

    /// Waits for this client's turn at the server.
    async fn enter(&self, caller: &mut Answer) -> Result<Place, LockError> {
        // A first answer, to a sibling or to oneself, is waited for as long as one request may take.
        let first = self.started + self.core.op_timeout;
        if self.wish.waits() {
            let mut ticket = match self.join(true) {
                Ok(place) => return place,
                Err(ticket) => ticket,
            };
            let limit = self.deadline.map_or(first, |deadline| deadline.min(first));
            if let Some(next) = self.next(caller, &mut ticket, Some(limit)).await? {
                return self.place(next);
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
        let limit = if self.wish.waits() {
            self.started + self.first_limit()
        } else {
            first
        };
        match self.next(caller, &mut ticket, Some(limit)).await? {
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

    /// How long the first answer is waited for.
    fn first_limit(&self) -> Duration {
        let limit = (self.started + self.core.op_timeout).since(self.core.clock.now());
        let wanted = match self.deadline {
            Some(deadline) if self.wish.waits() => limit.min(deadline.since(self.core.clock.now())),
            _ => limit,
        };
        wanted.max(ONE_TRIP.min(self.core.op_timeout))
    }

    /// Waits about that long, but not beyond the deadline.
    async fn pause(&self, caller: &mut Answer, length: Duration) -> Result<(), LockError> {
        let until = self.core.clock.now() + length.mul_f64(0.5 + fastrand::f64());
        let until = self.deadline.map_or(until, |deadline| deadline.min(until));
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
            () = self.core.closing.cancelled() => Err(LockError::closed()),
            () = caller.closed() => Err(LockError::closed()),
            done = work => Ok(done),
        }
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
