//! The thread that works the database for one client.

use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError, TryRecvError};
use std::time::{Duration, Instant};

use lock_core::{Claim, Clock, LockError, Outage, Outages, OwnerId, Stamp};

use crate::failure::Failure;
use crate::patience;
use crate::session::Settings;
use crate::store::Store;
use crate::wait::{LONGEST, Waiter, Waiters};
use crate::wake::Alarm;

pub(crate) type Job = Box<dyn FnOnce(&mut Worker) + Send>;

/// How long others may be writing before a wait that ends meanwhile fails: what is stopped inside a transaction takes longer.
const PASSING: Duration = Duration::from_millis(250);

/// Between looks while another process keeps the file to itself.
const RETRY: Duration = Duration::from_millis(20);

/// What the thread owns.
pub(crate) struct Worker {
    pub(crate) settings: Settings,
    client: OwnerId,
    pub(crate) clock: Clock,
    pub(crate) store: Option<Store>,
    seen: u64,
    pub(crate) waiters: Waiters,
    /// When what is being done was asked for.
    pub(crate) asked: Instant,
    alarm: Arc<Alarm>,
    /// When the thread last took note of releases by others.
    listened: Stamp,
    outages: Outages,
    /// While other processes keep the file to themselves.
    outage: Option<Outage>,
    pub(crate) ended: bool,
}

impl Worker {
    pub(crate) fn new(settings: Settings, clock: Clock, alarm: Arc<Alarm>) -> Self {
        Self {
            waiters: Waiters::new(settings.planned_looks),
            settings,
            client: OwnerId::random(),
            listened: clock.now(),
            clock,
            store: None,
            seen: 0,
            asked: Instant::now(),
            alarm,
            outages: Outages::default(),
            outage: None,
            ended: false,
        }
    }

    pub(crate) fn work(mut self, queue: &mpsc::Receiver<Job>) {
        while !self.ended {
            match self.next(queue) {
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => self.step(None),
                Ok(job) => self.step(Some(job)),
            }
        }
    }

    /// Waits for a request, or until the next look is due.
    fn next(&mut self, queue: &mpsc::Receiver<Job>) -> Result<Job, RecvTimeoutError> {
        let now = self.clock.now();
        let Some(pause) = self.waiters.next_look(now) else {
            return queue.recv().map_err(|_| RecvTimeoutError::Disconnected);
        };
        let alarm = Arc::clone(&self.alarm);
        let Some(pipe) = self.store.as_mut().and_then(|store| store.listen(&alarm)) else {
            return queue.recv_timeout(pause);
        };
        let next = || match queue.try_recv() {
            Ok(job) => Some(Ok(job)),
            Err(TryRecvError::Empty) => None,
            Err(TryRecvError::Disconnected) => Some(Err(RecvTimeoutError::Disconnected)),
        };
        let mut woken = None;
        let job = alarm.sleep_unless(next, || woken = Some(pipe.sleep(pause)));
        // A client that always has something to do hears of releases, too.
        if woken.is_none() && now.since(self.listened) >= LONGEST {
            woken = Some(pipe.sleep(Duration::ZERO));
        }
        if let Some(woken) = woken {
            self.listened = self.clock.now();
            if woken {
                self.waiters.woken(self.listened);
            }
        }
        job.unwrap_or(Err(RecvTimeoutError::Timeout))
    }

    /// Does what was asked for, and looks for those who wait if that is due.
    pub(crate) fn step(&mut self, job: Option<Job>) {
        if let Some(job) = job {
            job(self);
        }
        let pause = self.waiters.next_look(self.clock.now());
        if pause.is_some_and(|pause| pause.is_zero()) {
            self.look();
        }
    }

    /// Asks for one more waiter, which stays if the name is busy.
    pub(crate) fn join(&mut self, newcomer: Waiter) {
        let end = newcomer.deadline();
        self.for_waiters(end, |waiters, store, clock| waiters.join(newcomer, store, clock));
    }

    /// Sees to those who wait.
    fn look(&mut self) {
        let end = self.waiters.first_deadline();
        self.for_waiters(end, Waiters::look);
    }

    /// Does `work`, for whom time is over at `end`.
    fn for_waiters(
        &mut self,
        end: Option<Stamp>,
        work: impl FnOnce(&mut Waiters, &mut Store, &Clock) -> Result<(), Failure>,
    ) {
        let mut waiters = std::mem::take(&mut self.waiters);
        let clock = self.clock.clone();
        // Not for long: renewals queue behind this, and whoever gives up is to hear of it in time.
        let longest = self.settings.op_timeout / 4;
        let patience = end.map_or(longest, |end| longest.min(end.since(clock.now())));
        self.asked = Instant::now();
        patience::until(self.asked + patience);
        if let Err(failure) = self.on_store(|store| work(&mut waiters, store, &clock)) {
            let now = clock.now();
            let passing = failure.is_contention();
            let waited = waiters.unanswered(now).max(self.asked.elapsed());
            let error = failure.explain("acquire", &self.settings.path, waited);
            if passing {
                if waited >= longest && self.outage.is_none() {
                    self.outage = Some(self.outages.begin(&error));
                }
                waiters.expire_unanswered(now, longest.min(PASSING), &error);
                waiters.schedule(now, RETRY);
            } else {
                waiters.fail(&error);
            }
        } else if let Some(outage) = self.outage.take() {
            outage.end();
        }
        self.waiters = waiters;
    }

    /// Runs `work` on the open database, opening it if need be, and closes it after whatever makes it doubtful.
    pub(crate) fn on_store<T>(&mut self, work: impl FnOnce(&mut Store) -> Result<T, Failure>) -> Result<T, Failure> {
        let store = match &mut self.store {
            Some(store) => store,
            none => {
                let settings = &self.settings;
                none.insert(Store::open(
                    &settings.path,
                    settings.allow_unsafe,
                    self.client,
                    self.seen,
                )?)
            }
        };
        let mut done = work(store);
        self.seen = self.seen.max(store.seen());
        if let Err(failure) = &done
            && !failure.is_harmless()
        {
            // Most of what SQLite can say about a file that was replaced is better said so.
            if let Err(moved @ Failure::Moved(_)) = store.check_place() {
                done = Err(moved);
            }
            self.store = None;
        }
        done
    }

    /// Undoes a grant that nobody heard of. Should that fail, it expires by itself.
    pub(crate) fn take_back(&mut self, claim: &Claim) {
        if let Err(failure) = self.on_store(|store| store.release(claim)) {
            tracing::debug!(target: "fencelock", ?failure, name = %claim.name(), "a grant that nobody heard of waits for its expiry");
        }
        self.waiters.freed(claim.name());
    }

    pub(crate) fn explained<T>(&self, operation: &'static str, done: Result<T, Failure>) -> Result<T, LockError> {
        done.map_err(|failure| failure.explain(operation, &self.settings.path, self.asked.elapsed()))
    }
}
