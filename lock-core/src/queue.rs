//! Who of this process is next at the server.
//!
//! **Invariant.** For each queue key at most one claim of this client is at the server, be it asking, waiting, held or
//! on its way out. Whoever owns the [`Turn`] may talk to the server; there is one turn per key, and dropping it passes
//! it on, first come first served.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::{Arc, PoisonError};
use std::time::SystemTime;

use crate::guard::LockGuard;
use crate::pending::Pending;
use crate::request::Wish;
use crate::sync::{Mutex, MutexGuard, oneshot};
use crate::{Busy, Claim, FencingToken, Holder, LockError, Stamp};

#[derive(Default)]
pub(crate) struct LocalQueue {
    // Boxed: a table keeps a third of its places empty.
    slots: Mutex<HashMap<Arc<str>, Box<Slot>>>,
}

#[derive(Default)]
struct Slot {
    stage: Stage,
    /// Who holds the lock, by the last word on it. Outlives the stage that it came with, but not a failure.
    known: Option<Known>,
    /// Waiters up to this serial have been told that the lock is held.
    told_up_to: u64,
    /// The last failure of a waiter that goes on trying, until the server answers again.
    failure: Option<Box<RequestFailure>>,
    serial: u64,
    /// Most locks never have any.
    waiters: Option<Box<Waiters>>,
}

#[derive(Default)]
struct Waiters {
    /// In the order of their serials, as is `impatient`.
    patient: VecDeque<Waiter>,
    /// Those who take the next answer, whatever it is.
    impatient: VecDeque<Waiter>,
}

/// What the owner of the turn is doing.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Stage {
    /// The server owes an answer.
    #[default]
    Asking,
    /// The lock is held, here or elsewhere.
    Busy,
    /// A release is under way.
    Releasing,
}

/// Who holds the lock.
enum Known {
    Elsewhere(Box<Busy>),
    Here {
        claim: Claim,
        token: FencingToken,
        since: SystemTime,
    },
}

/// Why a request failed that siblings waited for.
#[derive(Clone)]
struct RequestFailure {
    /// Waiters up to this serial were there when it failed.
    up_to: u64,
    error: LockError,
}

/// Someone who waits for the turn.
pub(crate) struct Waiter {
    serial: u64,
    told_busy: bool,
    pub(crate) wish: Arc<Wish>,
    pub(crate) reply: oneshot::Sender<Next>,
}

/// What a waiter gets in the end.
pub(crate) enum Next {
    /// It is its turn to ask the server.
    Turn { turn: Turn, told_busy: bool },
    /// The guard before it handed the lock over.
    Handed(LockGuard),
    /// A hand-over was tried for it, without success so far.
    Asked {
        pending: Pending,
        answer: Result<Busy, LockError>,
    },
    /// It did not want to wait, and the lock is busy.
    Refused(Busy),
    /// The request it waited for could not reach the server.
    Failed(LockError),
}

pub(crate) enum Entered {
    Turn(Turn),
    Queued(Ticket),
    Busy(Busy),
}

impl LocalQueue {
    /// Asks for the turn. Whoever is not patient takes the next answer, whatever it is.
    pub(crate) fn enter(self: &Arc<Self>, key: Arc<str>, wish: &Arc<Wish>, patient: bool) -> Entered {
        let mut slots = self.lock();
        let Some(slot) = slots.get_mut(&key) else {
            slots.insert(Arc::clone(&key), Box::default());
            return Entered::Turn(Turn {
                queue: Arc::clone(self),
                key,
                stint: None,
                passed: false,
            });
        };
        let busy = slot.stage == Stage::Busy;
        if busy && !patient {
            return Entered::Busy(slot.busy().unwrap_or_default());
        }
        slot.serial += 1;
        let serial = slot.serial;
        let (reply, answer) = oneshot::channel();
        slot.waiters.get_or_insert_default().of(patient).push_back(Waiter {
            serial,
            told_busy: busy,
            wish: Arc::clone(wish),
            reply,
        });
        Entered::Queued(Ticket {
            queue: Arc::clone(self),
            key,
            serial,
            patient,
            told_busy: busy,
            answer,
        })
    }

    #[cfg(test)]
    pub(crate) fn is_idle(&self) -> bool {
        self.lock().is_empty()
    }

    /// How many wait for a turn.
    #[cfg(all(test, shuttle))]
    pub(crate) fn waiting(&self) -> usize {
        let of = |waiters: &Waiters| waiters.patient.len() + waiters.impatient.len();
        self.lock()
            .values()
            .map(|slot| slot.waiters.as_deref().map_or(0, of))
            .sum()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Arc<str>, Box<Slot>>> {
        // Nothing here panics while holding the mutex.
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Slot {
    /// Who holds the lock, if anyone is known to.
    fn busy(&self) -> Option<Busy> {
        match self.known.as_ref()? {
            Known::Elsewhere(busy) => Some(Busy::clone(busy)),
            Known::Here { claim, token, since } => {
                let mut holder = Holder::of(claim);
                (holder.token, holder.acquired_at) = (Some(*token), Some(*since));
                Some(Busy::default().with_holder(holder))
            }
        }
    }

    /// Takes out whoever came first.
    fn pop(&mut self) -> Option<Waiter> {
        let mut waiter = self.waiters.as_mut()?.pop()?;
        waiter.told_busy |= waiter.serial <= self.told_up_to;
        Some(waiter)
    }
}

impl Waiters {
    fn of(&mut self, patient: bool) -> &mut VecDeque<Waiter> {
        if patient {
            &mut self.patient
        } else {
            &mut self.impatient
        }
    }

    fn pop(&mut self) -> Option<Waiter> {
        let serial = |waiters: &VecDeque<Waiter>| waiters.front().map_or(u64::MAX, |w| w.serial);
        let patient = serial(&self.patient) <= serial(&self.impatient);
        self.of(patient).pop_front()
    }
}

/// A place in the queue; dropping it leaves the queue.
pub(crate) struct Ticket {
    queue: Arc<LocalQueue>,
    key: Arc<str>,
    serial: u64,
    patient: bool,
    told_busy: bool,
    answer: oneshot::Receiver<Next>,
}

impl Ticket {
    /// Waits for the turn. `None` if the runtime that owed the answer has ended.
    pub(crate) async fn next(&mut self) -> Option<Next> {
        (&mut self.answer).await.ok()
    }

    /// Whether this waiter has been told that the lock is held.
    pub(crate) fn told_busy(&self) -> bool {
        let slots = self.queue.lock();
        self.told_busy || slots.get(&self.key).is_some_and(|slot| self.serial <= slot.told_up_to)
    }

    /// Why the last request failed that this waiter was there for; `None` if the server has answered since.
    pub(crate) fn failure(&self) -> Option<LockError> {
        let slots = self.queue.lock();
        let failure = slots.get(&self.key)?.failure.as_deref()?;
        (self.serial <= failure.up_to).then(|| failure.error.clone())
    }

    /// Who holds the lock by the last word on it; `None` if there was none, or if the last word was a failure.
    pub(crate) fn busy(&self) -> Option<Busy> {
        self.queue.lock().get(&self.key).and_then(|slot| slot.busy())
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let left = {
            let mut slots = self.queue.lock();
            slots.get_mut(&self.key).and_then(|slot| {
                let waiters = slot.waiters.as_mut()?.of(self.patient);
                let at = waiters.binary_search_by_key(&self.serial, |w| w.serial).ok()?;
                waiters.remove(at)
            })
        };
        drop(left);
    }
}

/// The right to talk to the server about one key.
pub(crate) struct Turn {
    queue: Arc<LocalQueue>,
    key: Arc<str>,
    /// Since when this client has kept the lock to itself, handing it over from one of its holders to the next.
    pub(crate) stint: Option<Stamp>,
    passed: bool,
}

impl Turn {
    /// The server said busy: whoever does not want to wait is refused.
    pub(crate) fn busy(&self, busy: &Busy) {
        self.settle(Known::Elsewhere(Box::new(busy.clone())));
    }

    /// A guard holds the lock now: whoever does not want to wait is refused.
    pub(crate) fn held(&self, claim: &Claim, token: FencingToken) {
        self.settle(Known::Here {
            claim: claim.clone(),
            token,
            since: SystemTime::now(),
        });
    }

    /// The lock is on its way out.
    pub(crate) fn releasing(&self) {
        if let Some(slot) = self.queue.lock().get_mut(&self.key) {
            slot.stage = Stage::Releasing;
        }
    }

    /// The server could not be asked. What it said before counts no more. Callers that do not wait get this answer.
    ///
    /// `is_final`: no request of a waiter that waits for a first answer would do better, so that they get it too. Otherwise they go on
    /// waiting, as the owner of the turn tries again.
    pub(crate) fn failed(&self, error: &LockError, is_final: bool) {
        let failed: Vec<_> = {
            let mut slots = self.queue.lock();
            let Some(slot) = slots.get_mut(&self.key) else { return };
            slot.stage = Stage::Asking;
            slot.known = None;
            let told_up_to = slot.told_up_to;
            slot.failure = Some(Box::new(RequestFailure {
                up_to: slot.serial,
                error: error.clone(),
            }));
            let Some(waiters) = &mut slot.waiters else { return };
            // Those who were not told stand behind those who were.
            let first = match is_final {
                true => waiters
                    .patient
                    .partition_point(|w| w.told_busy || w.serial <= told_up_to),
                false => waiters.patient.len(),
            };
            waiters
                .patient
                .drain(first..)
                .chain(waiters.impatient.drain(..))
                .collect()
        };
        for waiter in failed {
            let _ = waiter.reply.send(Next::Failed(error.clone()));
        }
    }

    /// Takes the first waiter that is still there out of the queue.
    pub(crate) fn take_next(&self) -> Option<Waiter> {
        let mut slots = self.queue.lock();
        let slot = slots.get_mut(&self.key)?;
        // Waiters leave the queue by themselves when they go away, so a closed one is only ever about to do so.
        while let Some(waiter) = slot.pop() {
            if !waiter.reply.is_closed() {
                return Some(waiter);
            }
        }
        None
    }

    fn settle(&self, known: Known) {
        let (refused, busy) = {
            let mut slots = self.queue.lock();
            let Some(slot) = slots.get_mut(&self.key) else { return };
            slot.stage = Stage::Busy;
            slot.known = Some(known);
            slot.told_up_to = slot.serial;
            slot.failure = None;
            let impatient = slot.waiters.as_mut().map(|waiters| &mut waiters.impatient);
            let refused = impatient.map(std::mem::take).unwrap_or_default();
            let busy = if refused.is_empty() { None } else { slot.busy() };
            (refused, busy.unwrap_or_default())
        };
        for waiter in refused {
            let _ = waiter.reply.send(Next::Refused(busy.clone()));
        }
    }

    /// Gives the turn to the first waiter that is still there, or ends the queue of this key.
    fn pass(mut self) {
        self.stint = None;
        loop {
            let waiter = {
                let mut slots = self.queue.lock();
                let Some(slot) = slots.get_mut(&self.key) else { break };
                slot.stage = Stage::Asking;
                match slot.pop() {
                    Some(waiter) => waiter,
                    None => {
                        slots.remove(&self.key);
                        break;
                    }
                }
            };
            // Outside of the mutex: a refused turn comes back and must not be dropped under it.
            match waiter.reply.send(Next::Turn {
                turn: self,
                told_busy: waiter.told_busy,
            }) {
                Err(Next::Turn { turn, .. }) => self = turn,
                _ => return,
            }
        }
        self.passed = true;
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if !self.passed {
            self.passed = true;
            let (queue, key) = (Arc::clone(&self.queue), Arc::clone(&self.key));
            Self {
                queue,
                key,
                stint: None,
                passed: false,
            }
            .pass();
        }
    }
}

impl fmt::Debug for LocalQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalQueue").field("keys", &self.lock().len()).finish()
    }
}

impl fmt::Debug for Turn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Turn").field("key", &self.key).finish_non_exhaustive()
    }
}
