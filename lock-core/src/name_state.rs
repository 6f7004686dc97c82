//! What callers, guards and the task of one name share, and how it changes.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::Notify;

use crate::held::Held;
use crate::queue::{Answer, Known, Queue, Waiter};
use crate::release::{Release, Releasing};
use crate::wait::SharedWait;
use crate::{Busy, Claim, Lease, LockError, Stamp};

#[derive(Default)]
pub(crate) struct Name {
    /// Wakes the task, while there is one.
    pub(crate) task: Option<Arc<Notify>>,
    /// The hold that has the claim. If it `is_kept`, it has ended, and the next request gets the claim.
    pub(crate) hold: Option<Arc<Held>>,
    pub(crate) is_kept: bool,
    /// The claim that is being released.
    pub(crate) release: Option<Box<Release>>,
    /// The claim that is asked for.
    pub(crate) asks: Option<Claim>,
    /// That of the request to acquire that is under way.
    pub(crate) wait: Option<Arc<SharedWait>>,
    /// The server has said busy in response to that request, and the claim may wait there.
    pub(crate) waits: bool,
    /// It outlives the state that it came with, but not a failure.
    pub(crate) known: Option<Known>,
    /// Most names never have any.
    pub(crate) queue: Option<Box<Queue>>,
    /// Counts the clean-up of the claim that is asked for while no request wants it.
    pub(crate) abandoned: Option<Box<Releasing>>,
    /// Since when waiters of this client have had the lock one after the other.
    pub(crate) tenure: Option<Stamp>,
    /// A release of this client has found a waiter.
    pub(crate) is_contended: bool,
}

/// A request to acquire, which waits at the server with a `wait`.
pub(crate) type Ask = (Claim, Option<Arc<SharedWait>>);

/// A claim that is kept no more: its hold, and the task of its name, if it is to be started.
pub(crate) type Unkept = (Arc<Held>, Option<Arc<Notify>>);

impl Name {
    pub(crate) fn front(&self) -> Option<&Waiter> {
        self.queue.as_ref()?.front()
    }

    /// The serial up to which all that wait have come by now.
    pub(crate) fn last_serial(&self) -> u64 {
        self.queue.as_ref().map_or(0, |queue| queue.last_serial())
    }

    /// Wakes the task, or returns the one that is to be started.
    pub(crate) fn wake(&mut self) -> Option<Arc<Notify>> {
        match self.notify() {
            true => None,
            false => Some(Arc::clone(self.task.insert(Arc::default()))),
        }
    }

    /// Wakes the task, if there is one.
    pub(crate) fn notify(&self) -> bool {
        self.task.as_ref().is_some_and(|task| {
            task.notify_one();
            true
        })
    }

    pub(crate) fn refuse_all(&mut self, error: &LockError) -> Vec<Answer> {
        let queue = self.queue.take();
        queue
            .map(|mut queue| queue.end(|_| Some(error.clone())))
            .unwrap_or_default()
    }

    /// Whether callers that do not wait are refused without a request.
    pub(crate) fn is_busy(&self) -> bool {
        // A hold that has ended, or whose caller left before it had the guard, is about to be released.
        let is_held = |hold: &Arc<Held>| !hold.has_ended() && !hold.is_undelivered.load(Ordering::Relaxed);
        self.waits || self.hold.as_ref().is_some_and(is_held)
    }

    /// Whether the first waiter wants the claim that is asked for.
    pub(crate) fn is_wanted(&self) -> bool {
        let (front, claim) = (self.front(), self.asks.as_ref());
        front.is_some_and(|front| claim.is_some_and(|claim| front.options.is_served_by(claim)))
    }

    /// Whether the request that is under way waits at the server for no caller that is still there.
    pub(crate) fn is_wait_over(&self) -> bool {
        self.waits && !self.is_wanted()
    }

    /// Begins the next request for the claim that is asked for. `None` if the first waiter does not want it.
    ///
    /// It waits at the server until the last end of the waiters: it keeps its place there when the first of them leaves. What no waiter wants is cut
    /// off.
    pub(crate) fn ask(&mut self) -> Option<Ask> {
        let claim = self.asks.clone().filter(|_| self.is_wanted())?;
        let (queue, task) = (self.queue.as_ref()?, self.task.as_ref()?);
        let waits = queue.front().is_some_and(|front| !front.is_impatient);
        self.wait = waits.then(|| SharedWait::new(queue.latest.unwrap_or(Stamp::MAX), task));
        self.waits = false;
        Some((claim, self.wait.clone()))
    }

    /// Puts off the end of the wait at the server for one that may get the claim after those that are there.
    pub(crate) fn put_off(&self, waiter: &Waiter) {
        if let (Some(claim), Some(wait)) = (&self.asks, &self.wait)
            && waiter.options.is_served_by(claim)
        {
            wait.put_off(waiter.deadline.unwrap_or(Stamp::MAX));
        }
    }

    /// The server says busy. The claim `waits` there, or the request has ended.
    pub(crate) fn busy(&mut self, busy: Busy, waits: bool, now: Stamp) -> Vec<Answer> {
        (self.waits, self.tenure) = (waits, None);
        if !waits {
            // It leaves nothing behind. The backend may have released the claim, and the network may deliver that once more: the next request is
            // for a claim of its own.
            (self.asks, self.wait) = (None, None);
        }
        self.settle(Known::Elsewhere(Box::new(busy)), !waits, now)
    }

    /// A request failed. If it was a release, that says nothing to requests that came after it was sent, up to `sent`.
    pub(crate) fn failed(&mut self, error: &LockError, sent: u64, now: Stamp) -> Vec<Answer> {
        (self.known, self.wait, self.waits) = (None, None, false);
        let queue = self.queue.as_mut();
        queue.map(|queue| queue.fail(error, sent, now)).unwrap_or_default()
    }

    /// Gives the claim to the first waiter, if it is what that asks for. `hold` makes the hold.
    pub(crate) fn serve(
        &mut self,
        claim: &Claim,
        now: Stamp,
        hold: impl FnOnce(&Waiter) -> Arc<Held>,
    ) -> Option<(Box<Waiter>, Arc<Held>, Vec<Answer>)> {
        let queue = self.queue.as_mut()?;
        let first = queue.front().filter(|front| front.options.is_served_by(claim))?.serial;
        let waiter = queue.remove(first)?;
        let held = hold(&waiter);
        let refused = self.hold(&held, now);
        Some((waiter, held, refused))
    }

    /// A request gets a guard. The lock is busy for all others.
    pub(crate) fn hold(&mut self, held: &Arc<Held>, now: Stamp) -> Vec<Answer> {
        (self.hold, self.is_kept) = (Some(Arc::clone(held)), false);
        (self.asks, self.wait, self.waits) = (None, None, false);
        self.settle(Known::Here(Arc::clone(held)), false, now)
    }

    fn settle(&mut self, known: Known, if_over: bool, now: Stamp) -> Vec<Answer> {
        let queue = self.queue.as_mut();
        let answers = queue.map(|queue| queue.settle(now, &known, if_over));
        self.known = Some(known);
        answers.unwrap_or_default()
    }

    /// Has a claim released, instead of what the client did with the name before.
    pub(crate) fn release(&mut self, release: Release) {
        (self.hold, self.is_kept) = (None, false);
        (self.asks, self.wait, self.waits) = (None, None, false);
        self.release = Some(Box::new(release));
    }

    /// The claim that is being released.
    pub(crate) fn releasing(&mut self) -> Option<&mut Release> {
        self.release.as_deref_mut()
    }

    /// The release of the claim is confirmed, or given up.
    pub(crate) fn released(&mut self, is_confirmed: bool) -> Option<Box<Release>> {
        self.is_contended |= self.front().is_some();
        self.known.take_if(|known| matches!(known, Known::Here(_)));
        if is_confirmed && let Some(queue) = &mut self.queue {
            queue.failure = None;
        }
        self.release.take()
    }

    /// Has a claim that is kept released. Returns its hold.
    pub(crate) fn unkeep(&mut self, counted: impl FnOnce() -> Releasing, now: Stamp) -> Option<Unkept> {
        let held = self.hold.clone().filter(|_| self.is_kept)?;
        self.release(Release::new(
            held.grant.claim.clone(),
            Some(held.lease()),
            now,
            counted(),
        ));
        Some((held, self.wake()))
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

    /// Gives up the claim that is asked for. It is released if the server may know of it (`is_sent`).
    pub(crate) fn give_up(
        &mut self,
        is_sent: bool,
        lease: Option<&Lease>,
        now: Stamp,
        counted: impl FnOnce() -> Releasing,
    ) {
        (self.wait, self.waits) = (None, false);
        if let Some(claim) = self.asks.take().filter(|_| is_sent) {
            let counted = self.abandoned.take().map_or_else(counted, |counted| *counted);
            self.release(Release::new(claim, lease, now, counted));
        }
    }
}
