//! The state of one name, and how it changes.

use std::mem;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::Notify;

use crate::held::Held;
use crate::owner::Owners;
use crate::queue::{Answers, GRACE, Queue, SHORTEST_RESPONSE, Waiter};
use crate::release::{Release, Releasing};
use crate::wait::SharedWait;
use crate::{Busy, Claim, FencingToken, Grant, Holder, Lease, LockError, Stamp};

/// A request whose time ends that soon is not repeated.
const TOO_LATE: Duration = Duration::from_millis(50);

#[derive(Default)]
pub(crate) struct Name {
    /// Wakes the task, while there is one.
    pub(super) task: Option<Arc<Notify>>,
    pub(super) at_server: AtServer,
    /// The holder by the last response. It outlives the state that it came with, but not a failure.
    pub(super) holder: Option<KnownHolder>,
    /// Most names never have any.
    pub(super) queue: Option<Box<Queue>>,
    /// Since when waiters of this client have had the lock one after the other.
    tenure: Option<Stamp>,
    /// A release of this client has found a waiter.
    is_contended: bool,
    /// Counts the clean-up of a claim that is asked for and that no waiter wants.
    pub(super) abandoned: Option<Box<Releasing>>,
}

/// The claim of this client that the server may know of.
#[derive(Default)]
pub(super) enum AtServer {
    #[default]
    Nothing,
    Asking(Box<Asking>),
    Held {
        /// That of the request to which it was granted.
        serial: u64,
        /// The caller of that request left before it had the guard, which is about to be dropped.
        is_undelivered: bool,
    },
    /// No guard has it: the client keeps it for the request after this hold, which has ended.
    Kept(Arc<Held>),
    Releasing(Box<Release>),
}

/// The claim that is to be granted.
pub(super) struct Asking {
    claim: Claim,
    /// How many requests the server may have received.
    sent: u32,
    /// The server has said busy in response to this request, and the claim may wait there.
    busy: bool,
    /// The request failed for good, or after its wait was over: the claim is of no more use.
    failed: bool,
    /// The lease of a grant that had no use.
    lease: Option<Lease>,
    /// That of the request that is under way.
    wait: Option<Arc<SharedWait>>,
}

pub(super) enum KnownHolder {
    Elsewhere(Box<Busy>),
    Here {
        claim: Claim,
        token: FencingToken,
        since: SystemTime,
    },
}

/// A request to acquire.
pub(crate) struct Ask {
    /// That of the request for which it is sent, if nothing looks at the time of that so far.
    pub(crate) first: Option<u64>,
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

impl Asking {
    fn new(claim: Claim) -> Self {
        Self {
            claim,
            sent: 0,
            busy: false,
            failed: false,
            lease: None,
            wait: None,
        }
    }

    /// The next request.
    fn ask(&mut self, wait: Option<Arc<SharedWait>>) -> Ask {
        self.busy = false;
        self.sent += 1;
        self.wait.clone_from(&wait);
        let claim = self.claim.clone();
        let first = None;
        Ask { first, claim, wait }
    }

    /// Whether the first waiter can have the claim.
    fn serves(&self, queue: Option<&Queue>) -> bool {
        let front = queue.and_then(Queue::front);
        !self.failed && front.is_some_and(|front| front.options.is_served_by(&self.claim))
    }
}

impl Name {
    /// A name for which the first request is about to begin.
    pub(super) fn begun(serial: u64, claim: Claim, wait: Option<Arc<SharedWait>>, task: &Arc<Notify>) -> (Self, Ask) {
        let mut asking = Asking::new(claim);
        let mut ask = asking.ask(wait);
        ask.first = Some(serial);
        let name = Self {
            task: Some(Arc::clone(task)),
            at_server: AtServer::Asking(Box::new(asking)),
            ..Self::default()
        };
        (name, ask)
    }

    /// Whether a waiter is there.
    pub(crate) fn has_waiters(&self) -> bool {
        self.front().is_some()
    }

    /// The serial up to which all that wait have come by now.
    pub(crate) fn last_serial(&self) -> u64 {
        self.queue.as_ref().map_or(0, |queue| queue.last_serial())
    }

    /// Whether callers that do not wait are refused without a request.
    pub(super) fn is_busy(&self) -> bool {
        match &self.at_server {
            AtServer::Held { is_undelivered, .. } => !is_undelivered,
            AtServer::Asking(asking) => asking.busy,
            _ => false,
        }
    }

    pub(super) fn front(&self) -> Option<&Waiter> {
        self.queue.as_ref()?.front()
    }

    /// Wakes the task, or returns the one that is to be started.
    pub(super) fn wake(&mut self) -> Option<Arc<Notify>> {
        if let Some(task) = &self.task {
            task.notify_one();
            return None;
        }
        Some(Arc::clone(self.task.insert(Arc::default())))
    }

    /// Whether the claim that is asked for is to be released, as no waiter wants it.
    pub(super) fn is_abandoned(&self) -> bool {
        matches!(&self.at_server, AtServer::Asking(asking) if asking.sent > 0 && !asking.serves(self.queue.as_deref()))
    }

    /// Gives up a claim that no waiter wants. Returns whether it is to be released, as the server may know of it.
    pub(super) fn give_up_unwanted(&mut self, counted: impl FnOnce() -> Releasing, now: Stamp) -> bool {
        let AtServer::Asking(asking) = &self.at_server else {
            return false;
        };
        if asking.serves(self.queue.as_deref()) {
            return false;
        }
        if asking.sent == 0 {
            self.at_server = AtServer::Nothing;
            return false;
        }
        let counted = self.abandoned.take().map_or_else(counted, |counted| *counted);
        let release = Release::new(asking.claim.clone(), asking.lease.as_ref(), now, counted);
        self.at_server = AtServer::Releasing(Box::new(release));
        true
    }

    /// The next request for the first waiter. `lingers`: others are likely to come.
    pub(super) fn ask(&mut self, owners: &Owners, lingers: bool) -> Option<Ask> {
        let (queue, task) = (self.queue.as_mut()?, self.task.as_ref()?);
        let front = queue.front()?;
        let is_impatient = front.is_impatient;
        if let AtServer::Nothing = self.at_server {
            let for_others = queue.len() > 1 || lingers || self.is_contended;
            let claim = front.options.claim(owners.next(), front.name.clone(), for_others);
            self.at_server = AtServer::Asking(Box::new(Asking::new(claim)));
        }
        let AtServer::Asking(asking) = &mut self.at_server else {
            return None;
        };
        let last_deadline = queue.last_deadline(&asking.claim)?;
        Some(asking.ask((!is_impatient).then(|| SharedWait::new(last_deadline, task))))
    }

    /// Puts off the end of the wait at the server to the last end of the waiters that get the claim one after the other: it keeps its place there
    /// when the first of them leaves.
    pub(super) fn put_off(&mut self) {
        if let (AtServer::Asking(asking), Some(queue)) = (&self.at_server, &mut self.queue)
            && let Some(wait) = &asking.wait
            && let Some(deadline) = queue.last_deadline(&asking.claim)
        {
            wait.put_off(deadline);
        }
    }

    /// Whether the request that is under way waits at the server for no caller that is still there.
    pub(crate) fn is_wait_over(&self) -> bool {
        match &self.at_server {
            AtServer::Asking(asking) => asking.busy && !asking.serves(self.queue.as_deref()),
            _ => true,
        }
    }

    /// The server says busy. `ends` the request, or it goes on waiting there.
    pub(crate) fn busy(&mut self, busy: &Busy, ends: bool, now: Stamp) -> Answers {
        if ends {
            // It leaves nothing behind. The backend may have released the claim, and the network may deliver that once more: the next request is
            // for a claim of its own.
            self.at_server = AtServer::Nothing;
        } else if let AtServer::Asking(asking) = &mut self.at_server {
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
        if let AtServer::Asking(asking) = &mut self.at_server {
            // A server that has said busy knows of the claim.
            asking.sent -= u32::from(error.is_unsent() && !asking.busy);
            asking.busy = false;
            asking.wait = None;
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

    /// The claim is granted. `None` if no waiter wants it, and it is to be released.
    pub(crate) fn granted(&mut self, grant: &Grant, now: Stamp) -> Option<(Box<Waiter>, Answers)> {
        let is_wanted = matches!(&self.at_server, AtServer::Asking(asking) if !asking.failed);
        let served = is_wanted.then(|| self.serve(&grant.claim, grant.first_token(), now));
        let served = served.flatten();
        if served.is_none() {
            self.granted_in_vain(&grant.lease);
        }
        served
    }

    /// The claim was granted with that lease, and is to be released.
    pub(crate) fn granted_in_vain(&mut self, lease: &Lease) {
        if let AtServer::Asking(asking) = &mut self.at_server {
            asking.lease = Some(lease.clone());
        }
    }

    /// Takes out the first waiter, if a grant of `claim` is what it asks for.
    pub(super) fn serve(&mut self, claim: &Claim, token: FencingToken, now: Stamp) -> Option<(Box<Waiter>, Answers)> {
        let queue = self.queue.as_mut()?;
        let first = queue.front().filter(|front| front.options.is_served_by(claim))?.serial;
        let waiter = queue.remove(first)?;
        Some((waiter, self.hold(first, claim, token, now)))
    }

    /// The request with that serial gets a guard. The lock is busy for all others.
    pub(super) fn hold(&mut self, serial: u64, claim: &Claim, token: FencingToken, now: Stamp) -> Answers {
        self.at_server = AtServer::Held {
            serial,
            is_undelivered: false,
        };
        self.settle(KnownHolder::Here {
            claim: claim.clone(),
            token,
            since: SystemTime::now(),
        });
        self.refuse_impatient(now)
    }

    fn settle(&mut self, holder: KnownHolder) {
        self.holder = Some(holder);
        if let Some(queue) = &mut self.queue {
            (queue.busy_up_to, queue.failure) = (queue.last_serial(), None);
        }
    }

    /// The claim that is being released.
    pub(crate) fn releasing(&mut self) -> Option<&mut Release> {
        match &mut self.at_server {
            AtServer::Releasing(release) => Some(release),
            _ => None,
        }
    }

    /// The release of the claim is confirmed, or given up.
    pub(crate) fn released(&mut self, is_confirmed: bool) -> Option<Box<Release>> {
        let release = match mem::take(&mut self.at_server) {
            AtServer::Releasing(release) => release,
            other => {
                self.at_server = other;
                return None;
            }
        };
        self.is_contended |= self.has_waiters();
        self.holder.take_if(|holder| matches!(holder, KnownHolder::Here { .. }));
        if is_confirmed && let Some(queue) = &mut self.queue {
            queue.failure = None;
        }
        Some(release)
    }

    /// Has a claim that is kept released. Returns its hold.
    pub(super) fn unkeep(&mut self, counted: impl FnOnce() -> Releasing, now: Stamp) -> Option<Arc<Held>> {
        let AtServer::Kept(held) = &self.at_server else {
            return None;
        };
        let held = Arc::clone(held);
        let release = Release::new(held.grant.claim.clone(), Some(held.lease()), now, counted());
        self.at_server = AtServer::Releasing(Box::new(release));
        Some(held)
    }

    /// Whether it is the turn of other clients: waiters of this one have kept the name to themselves for `longest`, from one to the next.
    pub(crate) fn yields(&mut self, now: Stamp, longest: Duration) -> bool {
        if !self.has_waiters() {
            self.tenure = None;
        } else if now.since(*self.tenure.get_or_insert(now)) >= longest {
            self.tenure = None;
            return true;
        }
        false
    }

    /// Ends a request whose time is over, or returns when it is to be looked at again. The response to the request that is under way decides about
    /// those that wait for as long as it does.
    pub(super) fn expire(&mut self, serial: u64, now: Stamp) -> Result<Option<Stamp>, (Box<Waiter>, LockError)> {
        let Some(queue) = &mut self.queue else {
            return Ok(None);
        };
        let Some((waiter, expiry)) = queue.get(serial).and_then(|waiter| Some((waiter, waiter.expiry?))) else {
            return Ok(None);
        };
        let knows_busy = serial <= queue.busy_up_to;
        let deadline = waiter.deadline.filter(|_| !waiter.is_impatient);
        if now < expiry {
            return Ok(Some(expiry));
        }
        if knows_busy && !waiter.is_impatient {
            let Some(deadline) = deadline else { return Ok(None) };
            let asked_until = match &self.at_server {
                AtServer::Asking(asking) => asking.wait.as_ref().and_then(|wait| wait.deadline()),
                _ => None,
            };
            // The task of the name ends a response that does not come by then, and says why.
            let later = deadline + SHORTEST_RESPONSE + GRACE;
            if asked_until.is_some_and(|at| deadline >= at) && now < later {
                queue.put_off(serial, later, false);
                return Ok(Some(later));
            }
        }
        let shortest = waiter.first_response.min(waiter.started + SHORTEST_RESPONSE);
        let error = match (&self.holder, &queue.failure) {
            (Some(holder), _) if deadline.is_some() && knows_busy => waiter.timed_out(now, &holder.busy()),
            (_, Some((error, up_to))) if serial <= *up_to => error.clone(),
            _ if deadline.is_some() && now < shortest => {
                queue.put_off(serial, shortest, true);
                return Ok(Some(shortest));
            }
            _ => LockError::no_answer("acquire", now.min(waiter.first_response).since(waiter.started)),
        };
        let waiter = queue.remove(serial).map(|waiter| (waiter, error));
        waiter.map_or(Ok(None), Err)
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

impl Waiter {
    /// Sets when its time is looked at first: never, if its wait has no end, as the server has said that the lock is held.
    pub(super) fn set_expiry(&mut self, is_busy: bool) {
        let first_response = (!is_busy).then(|| self.first_response + GRACE);
        self.expiry = self.deadline.filter(|_| !self.is_impatient).or(first_response);
    }

    /// Whether the wait is over at `now`, or the time for a first response. Waiters up to the serial `busy_up_to` know that the lock is held.
    fn is_over(&self, busy_up_to: u64, now: Stamp) -> bool {
        match self.deadline {
            Some(deadline) => deadline <= now,
            None => self.serial > busy_up_to && self.first_response <= now,
        }
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
