//! Waiting for a name: one watcher per client, whoever waits and for how many names.

use std::time::Duration;

use lock_core::{Attempt, Busy, Claim, Clock, LockError, LockName, OwnerId, Stamp};

use crate::failure::{Failure, row_damaged};
use crate::session::Reply;
use crate::store::Store;

/// Between looks after something changed in the database.
const SHORTEST: Duration = Duration::from_millis(1);

/// The longest time between looks if releases by other processes are not told.
pub(crate) const LONGEST: Duration = Duration::from_millis(10);

/// The longest time between looks if they are: a process that ends between its release and the wake-up tells nobody, and a
/// program other than fencelock never does.
pub(crate) const PLANNED_LOOKS: Duration = Duration::from_millis(250);

/// Those who wait, and when to look next.
///
/// A look asks the database for its version, which costs microseconds whatever it holds. Only when another process has
/// changed something, a lease has run out, or this client let go, are the names themselves looked at; and only one that
/// seems free is tried for. So waiting keeps nobody from writing, and holds up the requests of the same client no longer
/// than one look takes.
///
/// A newcomer asks for its own name only. The others wait for the next planned look, however many newcomers there are.
#[derive(Default)]
pub(crate) struct Waiters {
    waiting: Vec<Waiter>,
    /// The version of the database at the last look.
    version: Option<i64>,
    /// The longest time between looks while releases by other processes are told.
    planned_looks: Duration,
    pause: Duration,
    /// When to look next; at once if there is none.
    wake: Option<Stamp>,
    /// Not before this time after a wake-up by another process.
    rest: Option<Stamp>,
    /// When the database last answered a look.
    heard: Option<Stamp>,
}

/// One who waits.
pub(crate) struct Waiter {
    claim: Claim,
    /// When the name was found busy.
    since: Stamp,
    deadline: Option<Stamp>,
    reply: Reply<Attempt>,
    busy: Busy,
    /// When the lease of the name runs out. Until then only a change can free it; if there is none, look at once.
    due: Option<Stamp>,
}

impl Waiter {
    pub(crate) fn new(claim: Claim, since: Stamp, deadline: Option<Stamp>, reply: Reply<Attempt>) -> Self {
        Self {
            claim,
            since,
            deadline,
            reply,
            busy: Busy::default(),
            due: None,
        }
    }

    pub(crate) fn deadline(&self) -> Option<Stamp> {
        self.deadline
    }
}

impl Waiters {
    pub(crate) fn new(planned_looks: Duration) -> Self {
        Self {
            planned_looks,
            ..Self::default()
        }
    }

    /// Asks for the newcomer's name. If it is busy, the newcomer waits with the others, whose next look stays as planned.
    pub(crate) fn join(&mut self, mut newcomer: Waiter, store: &mut Store, clock: &Clock) -> Result<(), Failure> {
        let asked = newcomer.ask(store, clock);
        let (due, deadline) = (newcomer.due, newcomer.deadline);
        let failed = match asked {
            Ok(Some(attempt)) => return newcomer.answer(attempt, store),
            Ok(None) => None,
            Err(Failure::Row(name)) => {
                let _ = newcomer.reply.send(Err(row_damaged(&name)));
                return Ok(());
            }
            Err(failure) => Some(failure),
        };
        let is_first = self.waiting.is_empty();
        self.waiting.push(newcomer);
        if let Some(failure) = failed {
            return Err(failure);
        }
        let now = clock.now();
        self.heard = Some(now);
        if is_first {
            self.pause = SHORTEST;
            self.schedule(now, SHORTEST);
        } else if let Some(wake) = &mut self.wake {
            for end in [due, deadline].into_iter().flatten() {
                *wake = end.min(*wake);
            }
        }
        Ok(())
    }

    /// Another client has freed a name.
    pub(crate) fn woken(&mut self, now: Stamp) {
        if let Some(wake) = &mut self.wake {
            // Jitter, or the process that runs first would get every lock.
            let soon = now + SHORTEST.mul_f64(fastrand::f64());
            *wake = self.rest.map_or(soon, |rest| rest.max(soon)).min(*wake);
        }
    }

    /// Ends the wait of a claim, if it waits.
    pub(crate) fn remove(&mut self, owner: OwnerId) {
        for gone in self.waiting.extract_if(.., |w| w.claim.owner() == owner) {
            let _ = gone.reply.send(Ok(gone.busy.into()));
        }
    }

    /// This client let go of the name. Its own changes do not show in the version.
    pub(crate) fn freed(&mut self, name: &LockName) {
        for waiter in self.waiting.iter_mut().filter(|w| w.claim.name() == name) {
            waiter.due = None;
            self.wake = None;
        }
    }

    /// How long until the next look; none if nobody waits.
    pub(crate) fn next_look(&self, now: Stamp) -> Option<Duration> {
        let anybody = !self.waiting.is_empty();
        anybody.then(|| self.wake.map_or(Duration::ZERO, |wake| wake.since(now)))
    }

    /// Grants what has become free, and tells those whose time is over.
    pub(crate) fn look(&mut self, store: &mut Store, clock: &Clock) -> Result<(), Failure> {
        let begun = clock.now();
        store.check_place()?;
        let version = store.version()?;
        // Set at the end only: after a failure all names are looked at again.
        let changed = self.version.take() != Some(version);
        let mut index = 0;
        while let Some(waiter) = self.waiting.get_mut(index) {
            let answered = if !waiter.reply.is_wanted() {
                true
            } else if changed || waiter.due.is_none_or(|due| due <= begun) {
                match waiter.ask(store, clock) {
                    Ok(Some(attempt)) => {
                        self.waiting.swap_remove(index).answer(attempt, store)?;
                        continue;
                    }
                    Ok(None) => false,
                    // No concern of those who wait for other names.
                    Err(Failure::Row(name)) => {
                        let gone = self.waiting.swap_remove(index);
                        let _ = gone.reply.send(Err(row_damaged(&name)));
                        continue;
                    }
                    Err(failure) => return Err(failure),
                }
            } else {
                false
            };
            if answered {
                self.waiting.swap_remove(index);
            } else {
                index += 1;
            }
        }
        self.version = Some(version);
        let now = clock.now();
        self.heard = Some(now);
        let listening = store.is_listening();
        let (shortest, longest) = if listening {
            (self.planned_looks / 64, self.planned_looks)
        } else {
            (SHORTEST, LONGEST)
        };
        self.pause = if changed && !listening {
            shortest
        } else {
            (self.pause * 5 / 4).clamp(shortest, longest)
        };
        // With very many names to look at, most of the time is still left for requests.
        let rest = now.since(begun) * 4;
        self.rest = Some(now + rest.max(SHORTEST));
        self.schedule(now, self.pause.max(rest));
        self.expire(now);
        Ok(())
    }

    /// Tells those whose time is over that the name is busy.
    fn expire(&mut self, now: Stamp) {
        for late in self.waiting.extract_if(.., |w| w.is_over(now)) {
            let _ = late.reply.send(Ok(late.busy.into()));
        }
    }

    /// Tells the same after a look that got no answer, or says so if there was none for `patience`: before that somebody else
    /// may just have been writing, and the name is as busy as it was.
    pub(crate) fn expire_unanswered(&mut self, now: Stamp, patience: Duration, error: &LockError) {
        let heard = self.heard;
        for late in self.waiting.extract_if(.., |w| w.is_over(now)) {
            let heard = heard.map_or(late.since, |heard| heard.max(late.since));
            let _ = late.reply.send(if now.since(heard) < patience {
                Ok(late.busy.into())
            } else {
                Err(error.clone())
            });
        }
    }

    /// For how long a look has had no answer, if one was wanted.
    pub(crate) fn unanswered(&self, now: Stamp) -> Duration {
        let first = self.waiting.iter().map(|w| w.since).min();
        now.since(self.heard.max(first).unwrap_or(now))
    }

    /// Tells everybody that it went wrong.
    pub(crate) fn fail(&mut self, error: &LockError) {
        for waiter in self.waiting.drain(..) {
            let _ = waiter.reply.send(Err(error.clone()));
        }
    }

    /// When the first of those who wait gives up.
    pub(crate) fn first_deadline(&self) -> Option<Stamp> {
        self.waiting.iter().filter_map(|w| w.deadline).min()
    }

    /// Plans the next look, some jitter around `pause` from `now`, but no later than the first who is due.
    pub(crate) fn schedule(&mut self, now: Stamp, pause: Duration) {
        // Jitter, or processes that once woke together would forever.
        let next = now + pause.mul_f64(0.5 + fastrand::f64());
        let ends = self.waiting.iter().flat_map(|w| [w.due, w.deadline]).flatten();
        // What is past has been looked at just now, or could not be; that is what the pause is for.
        let first = ends.filter(|&end| end > now).min();
        self.wake = Some(first.map_or(next, |first| first.min(next)));
    }
}

impl Waiter {
    fn is_over(&self, now: Stamp) -> bool {
        self.deadline.is_some_and(|deadline| deadline <= now)
    }

    /// Takes the name if it is free. An answer ends the wait.
    fn ask(&mut self, store: &mut Store, clock: &Clock) -> Result<Option<Attempt>, Failure> {
        let busy = match store.records().holder(self.claim.name())? {
            Some(holder) if holder.owner != Some(self.claim.owner()) => Busy::default()
                .with_retry_after(holder.remaining.unwrap_or_default())
                .with_holder(holder),
            _ => match store.try_acquire(&self.claim, clock.now(), &|| self.reply.is_wanted()) {
                Ok(Attempt::Busy(busy)) => busy,
                Err(Failure::Abandoned) => Busy::default(),
                done => return done.map(Some),
            },
        };
        self.due = Some(clock.now() + busy.retry_after.unwrap_or_default());
        self.busy = busy;
        Ok(None)
    }

    /// Answers with the grant, or takes it back if nobody is there to hear of it.
    fn answer(self, attempt: Attempt, store: &mut Store) -> Result<(), Failure> {
        if self.reply.send(Ok(attempt)).is_err() {
            store.release(&self.claim)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;

    use super::*;

    const PATIENCE: Duration = Duration::from_millis(250);

    /// What somebody is told whose wait is over a second after it began, by a look without an answer then.
    fn told(heard_before_the_end: Option<Duration>) -> Result<Attempt, LockError> {
        let since = Clock::system().now();
        let end = since + Duration::from_secs(1);
        let claim = Claim::new("n".parse().unwrap(), Duration::from_secs(2));
        let (reply, mut answer) = oneshot::channel();
        let mut waiters = Waiters::default();
        waiters.waiting.push(Waiter::new(claim, since, Some(end), Reply(reply)));
        waiters.heard = heard_before_the_end.map(|before| since + (Duration::from_secs(1) - before));
        waiters.expire_unanswered(end, PATIENCE, &LockError::unavailable("acquire", "no answer"));
        answer.try_recv().unwrap()
    }

    #[test]
    fn a_wait_that_ends_while_somebody_else_writes_ends_busy() {
        assert!(matches!(told(Some(PATIENCE / 2)), Ok(Attempt::Busy(_))));
    }

    #[test]
    fn a_wait_that_ends_after_a_long_silence_says_so() {
        for heard in [Some(PATIENCE * 2), None] {
            assert!(matches!(told(heard), Err(LockError::Unavailable { .. })));
        }
    }
}
