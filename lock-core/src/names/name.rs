//! The state of one name, and how it changes.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::Notify;

use super::TOO_LATE;
use crate::client::ClientInner;
use crate::held::Held;
use crate::owner::Owners;
use crate::release::{Release, Releasing};
use crate::wait::SharedWait;
use crate::waiters::{Answers, Queue, SHORTEST_RESPONSE, Waiter};
use crate::{Busy, Claim, FencingToken, Grant, Holder, Lease, LockError, Stamp};

#[derive(Default)]
pub(crate) struct Name {
    /// Wakes the task, while there is one.
    pub(super) task: Option<Arc<Notify>>,
    /// A guard holds the lock, or the client keeps it for the next one.
    pub(super) is_held: bool,
    /// The hold of a claim that is kept without a guard.
    pub(super) kept: Option<Arc<Held>>,
    pub(super) asking: Option<Box<Asking>>,
    pub(super) releasing: Option<Box<Release>>,
    /// The holder by the last response. It outlives the state that it came with, but not a failure.
    pub(super) holder: Option<KnownHolder>,
    /// Most names never have any.
    pub(super) queue: Option<Box<Queue>>,
    /// Since when waiters of this client have had the lock one after the other.
    tenure: Option<Stamp>,
    /// The serial of the request that was granted last, and whether its caller left before it had the guard, which is about to be dropped.
    pub(super) served: u64,
    pub(super) is_undelivered: bool,
    /// A release of this client has found a waiter.
    is_contended: bool,
}

/// The claim that is to be granted.
pub(crate) struct Asking {
    pub(super) claim: Claim,
    /// How many requests the server may have received.
    pub(super) sent: u32,
    /// The server has said busy in response to this request, and the claim may wait there.
    busy: bool,
    /// The request failed for good, or after its wait was over: the claim is of no more use.
    failed: bool,
    /// The lease of a grant that had no use, if other locks may keep it alive.
    pub(super) shared: Option<Lease>,
    /// Counts the clean-up while no waiter wants the claim.
    pub(super) abandoned: Option<Releasing>,
}

pub(super) enum KnownHolder {
    Elsewhere(Box<Busy>),
    Here {
        claim: Claim,
        token: FencingToken,
        since: SystemTime,
    },
}

/// What a grant comes to. Dropped without the mutex.
pub(crate) struct Served {
    /// The waiter that gets the claim; `None` if the caller has it.
    pub(crate) waiter: Option<Box<Waiter>>,
    pub(crate) refused: Answers,
    _asking: Option<Box<Asking>>,
}

/// A request to acquire.
pub(crate) struct Ask {
    pub(crate) claim: Claim,
    /// `None` if it does not wait at the server.
    pub(crate) wait: Option<Arc<SharedWait>>,
}

impl Ask {
    /// When its wait at the server ends.
    pub(crate) fn deadline(&self) -> Option<Stamp> {
        self.wait.as_ref()?.deadline()
    }

    /// Whether the backend may have ended its wait by itself.
    pub(crate) fn has_been_over(&self, now: Stamp) -> bool {
        self.wait.as_ref().is_none_or(|wait| wait.has_been_over(now))
    }
}

impl Name {
    /// A name for which the first request is about to begin.
    pub(super) fn begun(claim: Claim, task: &Arc<Notify>) -> Self {
        let mut asking = Asking::new(claim);
        asking.sent = 1;
        Self {
            task: Some(Arc::clone(task)),
            asking: Some(Box::new(asking)),
            ..Self::default()
        }
    }

    /// Whether a waiter is there.
    pub(crate) fn has_waiters(&self) -> bool {
        self.front().is_some()
    }

    /// The serial up to which all that wait have come by now.
    pub(crate) fn last_serial(&self) -> u64 {
        self.queue.as_ref().map_or(0, |queue| queue.last_serial())
    }

    /// When the time of a waiter ends first.
    pub(crate) fn next_expiry(&self) -> Option<Stamp> {
        self.queue.as_ref()?.next_expiry()
    }

    /// Whether callers that do not wait are refused without a request.
    pub(super) fn is_busy(&self) -> bool {
        // One that was kept and has ended is about to be released, and so is one whose caller has gone away.
        self.is_held && self.kept.is_none() && !self.is_undelivered
            || self.releasing.is_none() && self.asking.as_ref().is_some_and(|asking| asking.busy)
    }

    pub(super) fn front(&self) -> Option<&Waiter> {
        self.queue.as_ref()?.front()
    }

    /// Wakes the task, or returns the one that is to be started.
    pub(crate) fn wake(&mut self) -> Option<Arc<Notify>> {
        if let Some(task) = &self.task {
            task.notify_one();
            return None;
        }
        let task = Arc::new(Notify::new());
        self.task = Some(Arc::clone(&task));
        Some(task)
    }

    /// The next request for the first waiter.
    pub(super) fn ask(&mut self, owners: &Owners, lingers: bool) -> Option<Ask> {
        let queue = self.queue.as_mut()?;
        let is_impatient = queue.front()?.is_impatient;
        if self.asking.is_none() {
            let claim = queue.claim(owners.next(), lingers || self.is_contended)?;
            self.asking = Some(Box::new(Asking::new(claim)));
        }
        let (asking, task) = (self.asking.as_mut()?, self.task.as_ref()?);
        let last_deadline = queue.last_deadline(&asking.claim)?;
        asking.busy = false;
        asking.sent += 1;
        Some(Ask {
            claim: asking.claim.clone(),
            wait: (!is_impatient).then(|| SharedWait::new(last_deadline, task)),
        })
    }

    /// Until when the claim is waited for by one of those that it goes to, one after the other: it keeps its place at the server when the first
    /// of them leaves.
    pub(crate) fn last_deadline(&mut self) -> Option<Stamp> {
        let claim = &self.asking.as_ref()?.claim;
        self.queue.as_mut()?.last_deadline(claim)
    }

    /// Whether the request that is under way waits at the server for no caller that is still there.
    pub(crate) fn is_wait_over(&self) -> bool {
        let (asking, queue) = (self.asking.as_ref(), self.queue.as_deref());
        asking.is_none_or(|asking| asking.busy && !asking.serves(queue))
    }

    /// The server says busy. `ends` the request, or it goes on waiting there.
    pub(crate) fn busy(&mut self, busy: &Busy, ends: bool, now: Stamp) -> Answers {
        if ends {
            // It leaves nothing behind. The backend may have released the claim, and the network may deliver that once more: the next request is
            // for a claim of its own.
            self.asking = None;
        } else if let Some(asking) = &mut self.asking {
            asking.busy = true;
        }
        self.tenure = None;
        self.settle(KnownHolder::Elsewhere(Box::new(busy.clone())));
        let mut answers = self.refuse_impatient(now);
        if ends && let Some(queue) = &mut self.queue {
            let up_to = queue.busy_up_to;
            answers.extend(queue.end(|waiter| waiter.is_over(up_to, now).then(|| waiter.timed_out(now, busy))));
        }
        answers
    }

    /// A request to acquire failed. What may pass is waited out by those who have the time. Any other failure ends every wait.
    ///
    /// If its wait was over (`is_over`), the backend may have begun to release the claim, and the network may deliver that later: the next request
    /// is for a claim of its own.
    pub(crate) fn failed(&mut self, error: &LockError, is_over: bool, now: Stamp) -> Answers {
        if let Some(asking) = &mut self.asking {
            // A server that has said busy knows of the claim.
            asking.sent -= u32::from(error.is_unsent() && !asking.busy);
            asking.busy = false;
            asking.failed |= is_over || !error.may_pass();
        }
        self.fail_waits(error, u64::MAX, now)
    }

    /// A request failed. If it was a release, that says nothing to requests that came after it was sent, up to `sent`: what was wrong may have been
    /// mended.
    pub(crate) fn fail_waits(&mut self, error: &LockError, sent: u64, now: Stamp) -> Answers {
        self.holder = None;
        let Some(queue) = &mut self.queue else {
            return Answers::new();
        };
        queue.failure = Some((error.clone(), queue.last_serial().min(sent)));
        let (up_to, soon) = (queue.busy_up_to, now + TOO_LATE);
        queue.end(|waiter| {
            let ends = match waiter.serial <= sent {
                true => !error.may_pass() || waiter.is_impatient || waiter.is_over(up_to, soon),
                // One that does not wait is answered by what it asks itself.
                false => !waiter.is_impatient && waiter.is_over(up_to, soon),
            };
            ends.then(|| error.clone())
        })
    }

    /// The claim is granted. `None` if no waiter wants it, and it is to be released: other locks may keep its lease alive.
    pub(crate) fn granted(&mut self, grant: &Grant, now: Stamp) -> Option<Served> {
        let is_wanted = self.asking.as_ref().is_some_and(|asking| !asking.failed);
        let served = is_wanted.then(|| self.serve(&grant.claim, grant.first_token(), now));
        let served = served.flatten();
        if served.is_none() {
            self.granted_in_vain(&grant.lease);
        }
        served
    }

    /// The claim was granted with that lease, and is to be released.
    pub(crate) fn granted_in_vain(&mut self, lease: &Lease) {
        if let Some(asking) = self.asking.as_mut().filter(|_| lease.claim().is_none()) {
            asking.shared = Some(lease.clone());
        }
    }

    /// The claim is granted to the request that has begun first. Returns the task if others have come that need it.
    pub(crate) fn granted_at_once(&mut self, grant: &Grant, serial: u64, now: Stamp) -> (Served, Option<Arc<Notify>>) {
        let served = self.serves(serial, None, &grant.claim, grant.first_token(), now);
        if self.next_expiry().is_none() {
            self.task = None;
        }
        (served, self.task.clone())
    }

    /// Takes out the first waiter, if a grant of `claim` is what it asks for.
    pub(super) fn serve(&mut self, claim: &Claim, token: FencingToken, now: Stamp) -> Option<Served> {
        let queue = self.queue.as_mut()?;
        let first = queue.front().filter(|front| front.options.is_served_by(claim))?.serial;
        let waiter = queue.remove(first)?;
        Some(self.serves(first, Some(waiter), claim, token, now))
    }

    /// The request with that serial gets a guard. The lock is busy for all others.
    fn serves(
        &mut self,
        serial: u64,
        waiter: Option<Box<Waiter>>,
        claim: &Claim,
        token: FencingToken,
        now: Stamp,
    ) -> Served {
        (self.is_held, self.kept) = (true, None);
        (self.served, self.is_undelivered) = (serial, false);
        self.settle(KnownHolder::Here {
            claim: claim.clone(),
            token,
            since: SystemTime::now(),
        });
        Served {
            waiter,
            refused: self.refuse_impatient(now),
            _asking: self.asking.take(),
        }
    }

    fn settle(&mut self, holder: KnownHolder) {
        self.holder = Some(holder);
        if let Some(queue) = &mut self.queue {
            (queue.busy_up_to, queue.failure) = (queue.last_serial(), None);
        }
    }

    /// The claim that is being released.
    pub(crate) fn releasing(&mut self) -> Option<&mut Release> {
        self.releasing.as_deref_mut()
    }

    /// The release of the claim is confirmed, or given up.
    pub(crate) fn released(&mut self, is_confirmed: bool) -> Option<Box<Release>> {
        let release = self.releasing.take()?;
        self.is_contended |= self.front().is_some();
        self.holder.take_if(|holder| matches!(holder, KnownHolder::Here { .. }));
        self.kept = None;
        if is_confirmed && let Some(queue) = &mut self.queue {
            queue.failure = None;
        }
        Some(release)
    }

    /// Whether it is the turn of other clients: waiters of this one have kept the name to themselves for `longest`, from one to the next.
    pub(crate) fn yields(&mut self, now: Stamp, longest: Duration) -> bool {
        if self.front().is_none() {
            self.tenure = None;
        } else if now.since(*self.tenure.get_or_insert(now)) >= longest {
            self.tenure = None;
            return true;
        }
        false
    }

    /// Ends the requests whose time is over. The response to the request that is under way decides about those that wait until
    /// `asked_until` or longer.
    pub(crate) fn expire(&mut self, now: Stamp, asked_until: Option<Stamp>, core: &ClientInner) -> Answers {
        let Some(queue) = &mut self.queue else {
            return Answers::new();
        };
        let (up_to, failure, holder) = (queue.busy_up_to, queue.failure.clone(), &self.holder);
        let answers = queue.end_due(now, |waiter| {
            let knows_busy = waiter.serial <= up_to;
            let deadline = waiter.deadline.filter(|_| !waiter.is_impatient);
            if !waiter.is_impatient && knows_busy {
                let deadline = deadline?;
                if asked_until.is_some_and(|at| deadline >= at) && now < deadline + SHORTEST_RESPONSE {
                    waiter.expiry = Some(now + SHORTEST_RESPONSE);
                    return None;
                }
            }
            let shortest = waiter.started + SHORTEST_RESPONSE.min(core.op_timeout);
            match (holder, &failure) {
                (Some(holder), _) if deadline.is_some() && knows_busy => Some(waiter.timed_out(now, &holder.busy())),
                (_, Some((error, up_to))) if waiter.serial <= *up_to => Some(error.clone()),
                _ if deadline.is_some() && now < shortest => {
                    (waiter.is_impatient, waiter.expiry) = (true, Some(shortest));
                    None
                }
                _ => Some(LockError::no_answer(
                    "acquire",
                    now.since(waiter.started).min(core.op_timeout),
                )),
            }
        });
        if !answers.is_empty() {
            self.count_abandoned(|| core.releasing());
        }
        answers
    }

    /// Counts the clean-up of a claim that no waiter wants any more.
    pub(super) fn count_abandoned(&mut self, count: impl FnOnce() -> Releasing) {
        let queue = self.queue.as_deref();
        let asking = self.asking.as_mut();
        if let Some(asking) = asking.filter(|asking| asking.sent > 0 && !asking.serves(queue)) {
            asking.abandoned.get_or_insert_with(count);
        }
    }

    /// The claim has a waiter again: what counted its clean-up, to be dropped without the mutex.
    pub(super) fn wanted_again(&mut self) -> Option<Releasing> {
        let queue = self.queue.as_deref();
        let asking = self.asking.as_mut().filter(|asking| asking.serves(queue))?;
        asking.abandoned.take()
    }

    pub(super) fn refuse_all(&mut self, error: &LockError) -> Answers {
        let queue = self.queue.take();
        queue
            .map(|mut queue| queue.end(|_| Some(error.clone())))
            .unwrap_or_default()
    }

    fn refuse_impatient(&mut self, now: Stamp) -> Answers {
        let Some(queue) = self.queue.as_mut().filter(|queue| queue.has_impatient()) else {
            return Answers::new();
        };
        let busy = self.holder.as_ref().map(KnownHolder::busy).unwrap_or_default();
        queue.end(|waiter| waiter.is_impatient.then(|| waiter.timed_out(now, &busy)))
    }
}

impl KnownHolder {
    pub(super) fn busy(&self) -> Busy {
        match self {
            Self::Elsewhere(busy) => Busy::clone(busy),
            Self::Here { claim, token, since } => {
                let mut holder = Holder::of(claim);
                (holder.token, holder.acquired_at) = (Some(*token), Some(*since));
                Busy::default().with_holder(holder)
            }
        }
    }
}

impl Asking {
    fn new(claim: Claim) -> Self {
        Self {
            claim,
            sent: 0,
            busy: false,
            failed: false,
            shared: None,
            abandoned: None,
        }
    }

    /// Whether the first waiter can have the claim.
    pub(super) fn serves(&self, queue: Option<&Queue>) -> bool {
        let front = queue.and_then(Queue::front);
        !self.failed && front.is_some_and(|front| front.options.is_served_by(&self.claim))
    }
}
