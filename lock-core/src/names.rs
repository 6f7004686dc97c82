//! What this client does with each name: the waiters, and the claim that is at the server.
//!
//! **Invariant.** For each key (the name, or a key of its own for a claim that others may hold beside) at most one claim of this client is at the server, be it asking, waiting, held or being released. A
//! claim follows another one only when the release of the first is confirmed, or when the server must have let go of it by itself.
//!
//! Claims that others may hold beside have a key each, and so no queue here: the server puts them into their order.
//!
//! The state of a name is changed here, under one mutex. The [task](crate::name_task) of the name sends the requests. It exists while there
//! is something to do: a name that is held has none, unless the time of a waiter ends by itself.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use foldhash::fast::RandomState;
use tokio::sync::Notify;

use crate::acquire_options::AcquireOptions;
use crate::client::ClientInner;
use crate::held::Held;
use crate::owner::Owners;
use crate::release::{Release, Releasing, Reservation};
use crate::wait::SharedWait;
use crate::waiters::{Answers, BLOCK, GRACE, Queue, SHORTEST_RESPONSE, Waiter};
use crate::{Busy, Claim, FencingToken, Grant, Holder, Lease, LockError, LockName, Stamp};

/// A request whose time ends that soon is not repeated.
pub(crate) const TOO_LATE: Duration = Duration::from_millis(50);

/// All names that a client uses at the moment.
pub(crate) struct Names {
    state: Mutex<State>,
    /// Longest time of one request.
    op_timeout: Duration,
    /// Every claim asks for tokens for later holders.
    lingers: bool,
    owners: Owners,
}

#[derive(Default)]
struct State {
    // Boxed: a table keeps a third of its places empty.
    names: HashMap<Arc<str>, Box<Name>, RandomState>,
    last_serial: u64,
    closed: bool,
    /// How many requests of this client wait for a name to share it, each under a key of its own.
    sharing: HashMap<Arc<str>, usize, RandomState>,
    /// Callers of a drain, while which nothing is kept.
    draining: usize,
}

#[derive(Default)]
pub(crate) struct Name {
    /// Wakes the task, while there is one.
    task: Option<Arc<Notify>>,
    /// A guard holds the lock, or the client keeps it for the next one.
    is_held: bool,
    /// The hold of a claim that is kept without a guard.
    kept: Option<Arc<Held>>,
    asking: Option<Box<Asking>>,
    releasing: Option<Box<Release>>,
    /// The holder by the last response. It outlives the state that it came with, but not a failure.
    holder: Option<KnownHolder>,
    /// Most names never have any.
    queue: Option<Box<Queue>>,
    /// Since when waiters of this client have had the lock one after the other.
    tenure: Option<Stamp>,
    /// The serial of the request that was granted last, and whether its caller left before it had the guard, which is about to be dropped.
    served: u64,
    is_undelivered: bool,
    /// A release of this client has found a waiter.
    is_contended: bool,
}

/// The claim that is to be granted.
pub(crate) struct Asking {
    claim: Claim,
    /// The server may know of the claim.
    sent: bool,
    /// The server has said busy in response to this request, and the claim may wait there.
    busy: bool,
    /// The request failed for good, or after its wait was over: the claim is of no more use.
    failed: bool,
    /// The lease of a grant that had no use, if other locks may keep it alive.
    shared: Option<Lease>,
    /// Counts the clean-up while no waiter wants the claim.
    abandoned: Option<Releasing>,
}

enum KnownHolder {
    Elsewhere(Box<Busy>),
    Here {
        claim: Claim,
        token: FencingToken,
        since: SystemTime,
    },
}

/// The waiter that gets a claim, and those that are refused by that.
pub(crate) type Granted = (Box<Waiter>, Answers);

pub(crate) enum Entered {
    /// The request waits, under that serial. The task of the name is to be started if it is given.
    Queued(u64, Option<Arc<Notify>>),
    Refused(LockError),
    /// The client keeps a claim for the name by now.
    Kept,
}

/// What the task of a name does next.
pub(crate) enum Step {
    Ask(Ask),
    Release(Claim, Reservation),
    /// Nothing, until a guard is released or a wait ends.
    Hold,
    End,
}

/// The first request for a name, which begins in the task of its caller.
pub(crate) struct First {
    pub(crate) serial: u64,
    pub(crate) ask: Ask,
    pub(crate) task: Arc<Notify>,
}

/// A request to acquire.
pub(crate) struct Ask {
    pub(crate) claim: Claim,
    /// `None` if it does not wait at the server.
    pub(crate) wait: Option<Arc<SharedWait>>,
    /// Whether the server may know of the claim from an earlier request.
    pub(crate) was_sent: bool,
}

impl Ask {
    /// When its wait at the server ends.
    pub(crate) fn deadline(&self) -> Option<Stamp> {
        self.wait.as_ref()?.deadline()
    }
}

impl Names {
    pub(crate) fn new(op_timeout: Duration, lingers: bool) -> Self {
        Self {
            state: Mutex::default(),
            op_timeout,
            lingers,
            owners: Owners::default(),
        }
    }

    /// Counts a request that waits for a name to share it, for as long as the result lives.
    pub(crate) fn sharing(&self, name: &Arc<str>) -> impl Drop {
        struct Sharing<'a>(&'a Names, Arc<str>);
        impl Drop for Sharing<'_> {
            fn drop(&mut self) {
                let mut state = self.0.lock();
                if let Some(count) = state.sharing.get_mut(&self.1) {
                    *count -= 1;
                    if *count == 0 {
                        state.sharing.remove(&self.1);
                    }
                }
            }
        }
        *self.lock().sharing.entry(Arc::clone(name)).or_default() += 1;
        Sharing(self, Arc::clone(name))
    }

    /// A key that no other claim has.
    pub(crate) fn new_key(&self, name: &str) -> Arc<str> {
        let mut state = self.lock();
        state.last_serial += 1;
        // No name has a line feed.
        format!("{name}\n{}", state.last_serial).into()
    }

    /// The claim of a name goes on under another key. Returns the task of the name if it is to be started.
    pub(crate) fn vacate(&self, key: &str, to: &Arc<str>) -> Option<Arc<Notify>> {
        let mut state = self.lock();
        state.names.entry(Arc::clone(to)).or_default().is_held = true;
        let name = state.names.get_mut(key)?;
        name.is_held = false;
        name.holder = None;
        if name.task.is_none() && name.front().is_none() {
            state.names.remove(key);
            return None;
        }
        name.wake()
    }

    /// Begins the first request for a name of which nothing is known, without a waiter so far.
    pub(crate) fn begin(&self, key: &Arc<str>, name: &LockName, options: &AcquireOptions, now: Stamp) -> Option<First> {
        let mut state = self.lock();
        if state.closed || state.names.contains_key(key) {
            return None;
        }
        state.last_serial += 1;
        let serial = state.last_serial;
        let claim = options.claim(self.owners.next(), name.clone());
        let claim = if self.lingers && options.may_run() {
            claim.with_tokens_wanted(BLOCK)
        } else {
            claim
        };
        let task = Arc::new(Notify::new());
        let deadline = options.wait.map_or(Stamp::MAX, |limit| now + limit);
        let ask = Ask {
            claim: claim.clone(),
            wait: options.waits().then(|| SharedWait::new(deadline, &task)),
            was_sent: false,
        };
        let mut asking = Asking::new(claim);
        asking.sent = true;
        let begun = Name {
            task: Some(Arc::clone(&task)),
            asking: Some(Box::new(asking)),
            ..Name::default()
        };
        state.names.insert(Arc::clone(key), Box::new(begun));
        Some(First { serial, ask, task })
    }

    /// Puts a request into the queue, or answers it at once. One that has begun has its serial, and comes first.
    pub(crate) fn enter(&self, key: &Arc<str>, mut waiter: Waiter, begun: Option<u64>) -> Entered {
        // Dropped without the mutex.
        let _abandoned;
        let mut state = self.lock();
        if state.closed {
            return Entered::Refused(LockError::closed());
        }
        let serial = begun.unwrap_or(state.last_serial + 1);
        state.last_serial = state.last_serial.max(serial);
        let name = state.names.entry(Arc::clone(key)).or_default();
        if name.kept.as_ref().is_some_and(|idle| !idle.has_ended()) {
            return Entered::Kept;
        }
        waiter.came_to_busy = name.is_busy();
        if waiter.came_to_busy && waiter.is_impatient && begun.is_none() {
            let busy = name.holder.as_ref().map(KnownHolder::busy).unwrap_or_default();
            return Entered::Refused(waiter.timed_out(waiter.started, &busy));
        }
        let queue = name.queue.get_or_insert_default();
        let first_response = (!waiter.came_to_busy).then(|| waiter.started + self.op_timeout + GRACE);
        waiter.expiry = waiter.deadline.filter(|_| !waiter.is_impatient).or(first_response);
        waiter.serial = serial;
        // Behind a holder of this client only the end of its own time concerns the task.
        let is_patient = name.is_held && waiter.expiry.is_none();
        queue.push(Box::new(waiter));
        _abandoned = name.wanted_again();
        Entered::Queued(serial, if is_patient { None } else { name.wake() })
    }

    /// Takes a request out whose caller is gone. `count` counts the clean-up of what the server may do for it.
    pub(crate) fn leave(&self, key: &str, serial: u64, count: impl FnOnce() -> Releasing) -> Option<Box<Waiter>> {
        // Dropped without the mutex.
        let _abandoned;
        let mut state = self.lock();
        let name = state.names.get_mut(key)?;
        let Some(waiter) = name.queue.as_mut().and_then(|queue| queue.remove(serial)) else {
            name.is_undelivered |= name.served == serial;
            return None;
        };
        name.count_abandoned(count);
        _abandoned = name.wanted_again();
        if let Some(task) = &name.task {
            task.notify_one();
        }
        Some(waiter)
    }

    /// Ends all requests, and accepts no more.
    pub(crate) fn close(&self) -> Answers {
        let mut state = self.lock();
        state.closed = true;
        let mut answers = Answers::new();
        for name in state.names.values_mut() {
            let queue = name.queue.take();
            let waiters = queue.into_iter().flat_map(|queue| queue.waiters);
            answers.extend(waiters.map(|waiter| (waiter, LockError::closed())));
            if let Some(task) = &name.task {
                task.notify_one();
            }
        }
        answers
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.lock().closed
    }

    /// A guard has ended: its claim is to be released. Returns the task if it is to be started.
    pub(crate) fn release(&self, key: &Arc<str>, release: Release) -> Option<Arc<Notify>> {
        let mut state = self.lock();
        let name = state.names.entry(Arc::clone(key)).or_default();
        name.is_held = false;
        name.releasing = Some(Box::new(release));
        name.wake()
    }

    /// The release of a claim is confirmed. Forgets the name, unless a waiter has come.
    pub(crate) fn released_at_once(&self, key: &str) -> Option<(Box<Release>, Option<Arc<Held>>)> {
        let mut state = self.lock();
        let name = state.names.get_mut(key)?;
        if name.has_waiters() {
            return None;
        }
        let released = name.released(true);
        state.names.remove(key);
        released
    }

    /// The guard with `claim` has ended: takes out the first waiter, which gets the same claim with `token`. `None` if the claim is to be
    /// released.
    pub(crate) fn hand_on(&self, key: &str, claim: &Claim, token: FencingToken, now: Stamp) -> Option<Granted> {
        // Dropped without the mutex.
        let _kept;
        let mut state = self.lock();
        let up_to = state.last_serial;
        if state.closed {
            return None;
        }
        let name = state.names.get_mut(key)?;
        // Those are refused that came while the client was about to release what it kept.
        let served = name.serve(claim, token, up_to, now)?;
        _kept = name.kept.take();
        if name.front().is_none()
            && let Some(task) = &name.task
        {
            task.notify_one();
        }
        Some(served)
    }

    /// Keeps a claim while no guard has it. Refused if a waiter has come, if the hold has ended, or if the client is to keep nothing.
    pub(crate) fn keep(&self, key: &str, idle: &Arc<Held>) -> bool {
        let mut state = self.lock();
        let may_keep = !state.closed && state.draining == 0 && !idle.has_ended() && !state.sharing.contains_key(key);
        match state.names.get_mut(key) {
            Some(name) if may_keep && name.is_held && name.front().is_none() => {
                name.kept = Some(Arc::clone(idle));
                true
            }
            _ => false,
        }
    }

    /// Looks at a name that the client uses, or changes it. What `look` takes out is to be returned, so that it is dropped without the mutex.
    /// Waiters up to the given serial have come before.
    pub(crate) fn with<T>(&self, key: &str, look: impl FnOnce(&mut Name, u64) -> T) -> Option<T> {
        let mut state = self.lock();
        let up_to = state.last_serial;
        state.names.get_mut(key).map(|name| look(name, up_to))
    }

    /// The claim that is kept for a name. It counts as kept until it is released or [resumed](Name::resumed).
    pub(crate) fn kept(&self, key: &str) -> Option<Arc<Held>> {
        self.with(key, |name, _| name.kept.clone())?
    }

    /// All claims that are kept. None is until the result is dropped.
    pub(crate) fn keep_none(&self) -> (Vec<Arc<Held>>, impl Drop) {
        struct Draining<'a>(&'a Names);
        impl Drop for Draining<'_> {
            fn drop(&mut self) {
                self.0.lock().draining -= 1;
            }
        }
        let mut state = self.lock();
        state.draining += 1;
        let kept = state.names.values().filter_map(|name| name.kept.clone()).collect();
        (kept, Draining(self))
    }

    /// Forgets a name whose task cannot run any more.
    pub(crate) fn give_up(&self, key: &str, error: &LockError) -> Answers {
        let mut state = self.lock();
        let name = state.names.remove(key);
        drop(state);
        let queue = name.and_then(|mut name| name.queue.take());
        let waiters = queue.into_iter().flat_map(|queue| queue.waiters);
        waiters.map(|waiter| (waiter, error.clone())).collect()
    }

    /// Decides what the task of a name does next. `clean_up` makes the release of a claim that has no use any more.
    pub(crate) fn next(
        &self,
        key: &str,
        clean_up: impl FnOnce(Claim, Option<Lease>, Option<Releasing>) -> Release,
    ) -> Step {
        // Dropped without the mutex.
        let (_queue, mut unwanted);
        let mut state = self.lock();
        let Some(name) = state.names.get_mut(key) else {
            return Step::End;
        };
        _queue = name.queue.take_if(|queue| queue.waiters.is_empty());
        if let Some(release) = &name.releasing {
            return release.step();
        }
        if name.is_held {
            if name.next_expiry().is_some() {
                return Step::Hold;
            }
            name.task = None;
            return Step::End;
        }
        unwanted = name.asking.take_if(|asking| !asking.serves(name.queue.as_deref()));
        if let Some(asking) = unwanted.as_mut().filter(|asking| asking.sent) {
            let (shared, counted) = (asking.shared.take(), asking.abandoned.take());
            let release = name
                .releasing
                .insert(Box::new(clean_up(asking.claim.clone(), shared, counted)));
            return release.step();
        }
        match name.ask(&self.owners, self.lingers) {
            Some(ask) => Step::Ask(ask),
            None => {
                state.names.remove(key);
                Step::End
            }
        }
    }

    #[cfg(test)]
    pub(crate) fn is_idle(&self) -> bool {
        self.lock().names.is_empty()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing here panics while holding the mutex.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Name {
    /// The claim that was kept has a guard again.
    pub(crate) fn resumed(
        &mut self,
        claim: &Claim,
        token: FencingToken,
        up_to: u64,
        now: Stamp,
    ) -> (Answers, Option<Arc<Held>>) {
        let kept = self.kept.take();
        (self.serves(0, claim, token, up_to, now), kept)
    }

    /// The release of the claim is confirmed, or given up.
    pub(crate) fn released(&mut self, is_confirmed: bool) -> Option<(Box<Release>, Option<Arc<Held>>)> {
        let release = self.releasing.take()?;
        self.is_contended |= self.front().is_some();
        self.holder.take_if(|holder| matches!(holder, KnownHolder::Here { .. }));
        if is_confirmed && let Some(queue) = &mut self.queue {
            queue.failure = None;
        }
        Some((release, self.kept.take()))
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

    /// The claim that is being released.
    pub(crate) fn releasing(&mut self) -> Option<&mut Release> {
        self.releasing.as_deref_mut()
    }

    /// The server says busy. `ends` the request, or it goes on waiting there.
    pub(crate) fn busy(&mut self, busy: &Busy, ends: bool, up_to: u64, now: Stamp) -> Answers {
        if ends {
            // It leaves nothing behind. The backend may have released the claim, and the network may deliver that once more: the next request is
            // for a claim of its own.
            self.asking = None;
        } else if let Some(asking) = &mut self.asking {
            asking.busy = true;
        }
        self.tenure = None;
        self.settle(KnownHolder::Elsewhere(Box::new(busy.clone())), up_to);
        let mut answers = self.refuse_impatient(now);
        if ends && let Some(queue) = &mut self.queue {
            answers.extend(queue.end(|waiter| waiter.is_over(up_to, now).then(|| waiter.timed_out(now, busy))));
        }
        answers
    }

    /// A request failed, and left nothing at the server if it was `unsent`. What may pass is waited out by those who have the time. A failure
    /// `for_good` ends every wait.
    ///
    /// If its wait was over (`is_over`), the backend may have begun to release the claim, and the network may deliver that later: the next request
    /// is for a claim of its own.
    pub(crate) fn failed(&mut self, error: &LockError, unsent: bool, is_over: bool, up_to: u64, now: Stamp) -> Answers {
        let for_good = !matches!(error, LockError::Unavailable { .. });
        self.holder = None;
        if let Some(asking) = &mut self.asking {
            // A server that has said busy knows of the claim.
            asking.sent &= !unsent || asking.busy;
            asking.busy = false;
            asking.failed |= for_good || is_over;
        }
        let Some(queue) = &mut self.queue else {
            return Answers::new();
        };
        queue.failure = Some((error.clone(), up_to));
        let (up_to, soon) = (queue.busy_up_to, now + TOO_LATE);
        queue.end(|waiter| {
            let ends = for_good || waiter.is_impatient || waiter.is_over(up_to, soon);
            ends.then(|| error.clone())
        })
    }

    /// The claim is granted: takes out the waiter that gets it. `None` if no waiter wants it, and it is to be released: other locks may keep
    /// its lease alive.
    pub(crate) fn granted(&mut self, grant: &Grant, up_to: u64, now: Stamp) -> Option<(Granted, Option<Box<Asking>>)> {
        let is_wanted = self.asking.as_ref().is_some_and(|asking| !asking.failed);
        let served = is_wanted.then(|| self.serve(&grant.claim, grant.first_token(), up_to, now));
        match served.flatten() {
            Some(served) => {
                self.is_held = true;
                Some((served, self.asking.take()))
            }
            None => {
                self.granted_in_vain(&grant.lease);
                None
            }
        }
    }

    /// The claim is granted to the request that has begun first. Returns the task if others have come that need it.
    pub(crate) fn granted_at_once(
        &mut self,
        grant: &Grant,
        serial: u64,
        up_to: u64,
        now: Stamp,
    ) -> (Answers, Option<Box<Asking>>, Option<Arc<Notify>>) {
        self.is_held = true;
        let asking = self.asking.take();
        let refused = self.serves(serial, &grant.claim, grant.first_token(), up_to, now);
        if self.next_expiry().is_none() {
            self.task = None;
        }
        (refused, asking, self.task.clone())
    }

    /// The claim was granted with that lease, and is to be released.
    pub(crate) fn granted_in_vain(&mut self, lease: &Lease) {
        if let Some(asking) = self.asking.as_mut().filter(|_| lease.claim().is_none()) {
            asking.shared = Some(lease.clone());
        }
    }

    /// Whether the request that is under way waits at the server for no caller that is still there.
    pub(crate) fn is_wait_over(&self) -> bool {
        let (asking, queue) = (self.asking.as_ref(), self.queue.as_deref());
        asking.is_none_or(|asking| asking.busy && !asking.serves(queue))
    }

    /// When the time of a waiter ends first.
    pub(crate) fn next_expiry(&self) -> Option<Stamp> {
        self.queue.as_ref()?.next_expiry
    }

    /// Ends the requests whose time is over. The response to the request that is under way decides about those that wait until
    /// `asked_until` or longer.
    pub(crate) fn expire(&mut self, now: Stamp, asked_until: Option<Stamp>, core: &ClientInner) -> Answers {
        let Some(queue) = &mut self.queue else {
            return Answers::new();
        };
        let (up_to, failure, holder) = (queue.busy_up_to, queue.failure.clone(), &self.holder);
        let answers = queue.end(|waiter| {
            waiter.expiry.take_if(|at| *at <= now)?;
            let knows_busy = waiter.knows_busy(up_to);
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

    /// Whether a waiter is there.
    pub(crate) fn has_waiters(&self) -> bool {
        self.front().is_some()
    }

    /// Whether callers that do not wait are refused without a request.
    fn is_busy(&self) -> bool {
        // One that was kept and has ended is about to be released, and so is one whose caller is gone.
        self.is_held && self.kept.is_none() && !self.is_undelivered
            || self.releasing.is_none() && self.asking.as_ref().is_some_and(|asking| asking.busy)
    }

    /// Takes out the first waiter, if a grant of `claim` is what it asks for.
    fn serve(&mut self, claim: &Claim, token: FencingToken, up_to: u64, now: Stamp) -> Option<Granted> {
        let queue = self.queue.as_mut()?;
        let first = queue.front().filter(|front| front.options.is_served_by(claim))?.serial;
        let waiter = queue.remove(first)?;
        Some((waiter, self.serves(first, claim, token, up_to, now)))
    }

    /// The request with that serial gets the guard. The lock is busy for those up to another one.
    fn serves(&mut self, serial: u64, claim: &Claim, token: FencingToken, up_to: u64, now: Stamp) -> Answers {
        self.served = serial;
        self.is_undelivered = false;
        let holder = KnownHolder::Here {
            claim: claim.clone(),
            token,
            since: SystemTime::now(),
        };
        self.settle(holder, up_to);
        self.refuse_impatient(now)
    }

    fn front(&self) -> Option<&Waiter> {
        self.queue.as_ref()?.front()
    }

    /// Counts the clean-up of a claim that no waiter wants any more.
    fn count_abandoned(&mut self, count: impl FnOnce() -> Releasing) {
        let queue = self.queue.as_deref();
        if let Some(asking) = self
            .asking
            .as_mut()
            .filter(|asking| asking.sent && !asking.serves(queue))
        {
            asking.abandoned.get_or_insert_with(count);
        }
    }

    /// The claim has a waiter again: what counted its clean-up, to be dropped without the mutex.
    fn wanted_again(&mut self) -> Option<Releasing> {
        let queue = self.queue.as_deref();
        let asking = self.asking.as_mut().filter(|asking| asking.serves(queue))?;
        asking.abandoned.take()
    }

    /// Wakes the task, or returns the one that is to be started.
    fn wake(&mut self) -> Option<Arc<Notify>> {
        if let Some(task) = &self.task {
            task.notify_one();
            return None;
        }
        let task = Arc::new(Notify::new());
        self.task = Some(Arc::clone(&task));
        Some(task)
    }

    /// The next request for the first waiter.
    fn ask(&mut self, owners: &Owners, lingers: bool) -> Option<Ask> {
        let queue = self.queue.as_ref()?;
        let is_impatient = queue.front()?.is_impatient;
        if self.asking.is_none() {
            let claim = queue.claim(owners.next(), lingers || self.is_contended)?;
            self.asking = Some(Box::new(Asking::new(claim)));
        }
        let last_deadline = self.last_deadline()?;
        let (asking, task) = (self.asking.as_mut()?, self.task.as_ref()?);
        let wait = (!is_impatient).then(|| SharedWait::new(last_deadline, task));
        asking.busy = false;
        let was_sent = std::mem::replace(&mut asking.sent, true);
        Some(Ask {
            claim: asking.claim.clone(),
            wait,
            was_sent,
        })
    }

    /// Until when the claim is waited for by one of those that it goes to, one after the other: it keeps its place at the server when the first
    /// of them leaves.
    pub(crate) fn last_deadline(&self) -> Option<Stamp> {
        let (asking, queue) = (self.asking.as_ref()?, self.queue.as_ref()?);
        let waiters = queue.waiters.iter();
        let served = waiters.take_while(|waiter| waiter.options.is_served_by(&asking.claim));
        served.map(|waiter| waiter.deadline.unwrap_or(Stamp::MAX)).max()
    }

    fn settle(&mut self, holder: KnownHolder, up_to: u64) {
        self.holder = Some(holder);
        if let Some(queue) = &mut self.queue {
            queue.busy_up_to = up_to;
            queue.failure = None;
        }
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
    fn busy(&self) -> Busy {
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

impl Release {
    fn step(&self) -> Step {
        Step::Release(self.claim.clone(), self.reservation)
    }
}

impl Asking {
    fn new(claim: Claim) -> Self {
        Self {
            claim,
            sent: false,
            busy: false,
            failed: false,
            shared: None,
            abandoned: None,
        }
    }

    /// Whether the first waiter can have the claim.
    fn serves(&self, queue: Option<&Queue>) -> bool {
        let front = queue.and_then(Queue::front);
        !self.failed && front.is_some_and(|front| front.options.is_served_by(&self.claim))
    }
}

impl fmt::Debug for Names {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.lock();
        f.debug_struct("Names").field("names", &state.names.len()).finish()
    }
}
