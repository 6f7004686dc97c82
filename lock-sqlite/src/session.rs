//! The requests of one client, and the queue to the thread that works the database for it.

use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use lock_core::{Attempt, Claim, Clock, ExitDelay, Holder, LockError, LockName, Released, Renewal, Stamp};
use tokio::sync::oneshot;

use crate::failure::{self, Failure};
use crate::patience;
use crate::reader;
use crate::records::Records;
use crate::store::{Store, Wanted};
use crate::wait::{Waiter, Waiters};
use crate::wake::Alarm;
use crate::worker::{Job, Worker};

/// One client's way to the database: requests are worked one after the other, in the order in which they came.
///
/// The order is what makes dropping a request safe: whatever releases its claim comes later in the same queue. A request
/// whose caller has gone away does nothing any more.
pub(crate) struct Session {
    jobs: mpsc::Sender<Job>,
    alarm: Arc<Alarm>,
    closed: AtomicBool,
    settings: Settings,
}

/// What the client was configured with.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    /// Absolute.
    pub(crate) path: PathBuf,
    pub(crate) op_timeout: Duration,
    pub(crate) allow_unsafe: bool,
    /// Nothing is written, and nothing is made.
    pub(crate) read_only: bool,
    /// The time between looks while releases by other processes are told.
    pub(crate) planned_looks: Duration,
}

/// How long a request that does not wait lets one transaction of another process keep it from the file.
const STANDSTILL: Duration = Duration::from_secs(1);

const CLOSE: &str = "close";

impl Session {
    /// Starts the thread; the file is opened by the first request.
    pub(crate) fn start(settings: Settings) -> Result<Self, LockError> {
        let (jobs, queue) = mpsc::channel::<Job>();
        let alarm = Arc::new(Alarm::new());
        let worker = Worker::new(settings.clone(), Clock::system(), Arc::clone(&alarm));
        thread::Builder::new()
            .name("fencelock-sqlite".to_owned())
            .spawn(move || worker.work(&queue))
            .map_err(|e| LockError::failed("starting the thread that works the database", e))?;
        Ok(Self {
            jobs,
            alarm,
            closed: AtomicBool::new(false),
            settings,
        })
    }

    pub(crate) fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Does `work` on the open database and waits for the outcome, for at most the operation's time. Nothing is done if
    /// the caller has gone away by then.
    #[cfg(test)]
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        operation: &'static str,
        work: impl FnOnce(&mut Store, Wanted<'_>) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, LockError> {
        self.submit(operation, move |worker, reply| {
            let done = worker.on_store(|store| work(store, &|| reply.is_wanted()));
            let _ = reply.send(worker.explained(operation, done));
        })
        .await
    }

    /// Reads what is held. A client that only reads opens the file for it anew.
    pub(crate) async fn read<T: Default + Send + 'static>(
        &self,
        operation: &'static str,
        work: impl Fn(&Records<'_>) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, LockError> {
        self.submit(operation, move |worker, reply| {
            let settings = &worker.settings;
            let done = if settings.read_only {
                patience::but_for_no_standstill(&settings.path, STANDSTILL);
                reader::read(&settings.path, settings.allow_unsafe, &work)
            } else {
                worker.on_store(|store| {
                    store.check_place()?;
                    work(&store.records())
                })
            };
            let _ = reply.send(worker.explained(operation, done));
        })
        .await
    }

    /// Fails if the client only reads.
    fn may_write(&self) -> Result<(), LockError> {
        if !self.settings.read_only {
            return Ok(());
        }
        Err(LockError::configuration(format!(
            "this client has opened {} read-only, and can only tell what is held; to take, renew or release locks, connect \
             without mode=ro",
            self.settings.path.display()
        )))
    }

    /// Takes the name if no other claim holds it. A grant whose caller has gone away is taken back. If it does not wait, it fails as soon as
    /// one transaction of another process has kept it from the file for [`STANDSTILL`].
    pub(crate) async fn attempt(&self, claim: &Claim, waits: bool) -> Result<Attempt, LockError> {
        self.may_write()?;
        let asked = claim.clone();
        let mut answer = self.ask(Some(claim), move |worker, reply| {
            let sent = worker.clock.now();
            if !waits {
                patience::but_for_no_standstill(&worker.settings.path, STANDSTILL);
            }
            let done = worker.on_store(|store| store.try_acquire(&asked, sent, &|| reply.is_wanted()));
            if reply.send(worker.explained("acquire", done)).is_err() {
                worker.take_back(&asked);
            }
        })?;
        answer.within("acquire", self.settings.op_timeout).await
    }

    /// Waits until the claim is granted, or for `deadline`.
    pub(crate) async fn wait(&self, claim: &Claim, deadline: Option<Stamp>) -> Result<Attempt, LockError> {
        self.may_write()?;
        let (waiting, since) = (claim.clone(), Clock::system().now());
        let mut answer = self.ask(Some(claim), move |worker, reply| {
            worker.join(Waiter::new(waiting, since, deadline, reply));
        })?;
        // The thread answers at the deadline, unless it is stuck.
        let left = deadline.map_or(Duration::MAX, |deadline| deadline.since(since));
        answer
            .within("acquire", left.saturating_add(self.settings.op_timeout))
            .await
    }

    /// Keeps the claim for another ttl, if it is still there.
    pub(crate) async fn renew(&self, claim: &Claim) -> Result<Renewal, LockError> {
        let claim = claim.clone();
        self.keeping("renew", move |store, wanted| store.renew(&claim, wanted))
            .await
    }

    /// Reserves the name if the claim holds it.
    pub(crate) async fn reserve(&self, claim: &Claim, length: Duration) -> Result<Renewal, LockError> {
        let claim = claim.clone();
        self.keeping("reserve", move |store, wanted| store.reserve(&claim, length, wanted))
            .await
    }

    /// Does `work`, for what keeps a claim, and answers that the claim is not held if the file is another one now.
    async fn keeping(
        &self,
        operation: &'static str,
        work: impl FnOnce(&mut Store, Wanted<'_>) -> Result<Renewal, Failure> + Send + 'static,
    ) -> Result<Renewal, LockError> {
        self.may_write()?;
        self.submit(operation, move |worker, reply| {
            let done = match worker.on_store(|store| work(store, &|| reply.is_wanted())) {
                // Told at once: what lies there now knows of the lock at best what was true when it was copied.
                Err(Failure::Moved(_) | Failure::WentBack) => Ok(Renewal::NotHeld),
                done => done,
            };
            let _ = reply.send(worker.explained(operation, done));
        })
        .await
    }

    /// Releases the claim, also when the caller does not stay for the answer.
    pub(crate) async fn release(&self, claim: &Claim) -> Result<Released, LockError> {
        let released = claim.clone();
        self.releasing(claim, move |store| store.release(&released)).await
    }

    /// The same, and leaves the name reserved for `rest`.
    pub(crate) async fn release_reserved(&self, claim: &Claim, rest: Duration) -> Result<Released, LockError> {
        let released = claim.clone();
        self.releasing(claim, move |store| store.release_reserved(&released, rest))
            .await
    }

    async fn releasing(
        &self,
        claim: &Claim,
        release: impl Fn(&mut Store) -> Result<Released, Failure> + Send + 'static,
    ) -> Result<Released, LockError> {
        self.may_write()?;
        let claim = claim.clone();
        self.submit("release", move |worker, reply| {
            worker.waiters.remove(claim.owner());
            let done = match worker.on_store(&release) {
                // What lies there now may be a copy that has the lock.
                Err(Failure::Moved(_) | Failure::WentBack) => worker.on_store(&release),
                done => done,
            };
            worker.waiters.freed(claim.name());
            let _ = reply.send(worker.explained("release", done));
        })
        .await
    }

    /// Takes the name away from whoever holds it, also when the caller does not stay for the answer.
    pub(crate) async fn force_release(&self, name: &LockName) -> Result<Option<Holder>, LockError> {
        self.may_write()?;
        let name = name.clone();
        self.submit("forced release", move |worker, reply| {
            let done = worker.on_store(|store| store.force_release(&name));
            worker.waiters.freed(&name);
            let _ = reply.send(worker.explained("forced release", done));
        })
        .await
    }

    /// Lets go of all that this client holds and ends the thread.
    pub(crate) async fn close(&self) -> Result<(), LockError> {
        if self.closed.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        let mut answer = self.queue(None, |worker, reply| {
            worker.ended = true;
            worker.waiters = Waiters::new(worker.settings.planned_looks);
            let done = worker.store.take().map_or(Ok(()), |mut store| store.release_all());
            let _ = reply.send(worker.explained(CLOSE, done));
        })?;
        answer.within(CLOSE, self.settings.op_timeout).await
    }

    async fn submit<T: Send + 'static>(
        &self,
        operation: &'static str,
        job: impl FnOnce(&mut Worker, Reply<T>) + Send + 'static,
    ) -> Result<T, LockError> {
        let mut answer = self.ask(None, job)?;
        answer.within(operation, self.settings.op_timeout).await
    }

    /// Queues `job`. If its answer may grant `claim`, dropping the answer unheard takes that back.
    fn ask<T: Send + 'static>(
        &self,
        claim: Option<&Claim>,
        job: impl FnOnce(&mut Worker, Reply<T>) + Send + 'static,
    ) -> Result<Answer<'_, T>, LockError> {
        if self.closed.load(Ordering::Acquire) {
            return Err(LockError::closed());
        }
        self.queue(claim, job)
    }

    fn queue<T: Send + 'static>(
        &self,
        claim: Option<&Claim>,
        job: impl FnOnce(&mut Worker, Reply<T>) + Send + 'static,
    ) -> Result<Answer<'_, T>, LockError> {
        let limit = self.settings.op_timeout;
        let (reply, answer) = oneshot::channel();
        // A little less than the caller's patience, so that the caller hears SQLite's own words.
        let asked = Instant::now();
        let until = asked + limit.mul_f64(0.9);
        self.send(Box::new(move |worker| {
            worker.asked = asked;
            patience::until(until.max(Instant::now() + limit / 10));
            job(worker, Reply(reply));
        }))?;
        Ok(Answer {
            session: self,
            answer,
            claim: claim.cloned(),
        })
    }

    fn send(&self, job: Job) -> Result<(), LockError> {
        self.jobs.send(job).map_err(|_| self.gone())?;
        self.alarm.raise();
        Ok(())
    }

    /// Why the thread is not there any more.
    fn gone(&self) -> LockError {
        if self.closed.load(Ordering::Acquire) {
            LockError::closed()
        } else {
            LockError::unavailable(
                "asking the thread that works the database",
                "it ended unexpectedly; connect again".to_owned(),
            )
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // A process that ends in the middle of closing the file leaves a log without its index behind, which only a client that may write
        // can put right.
        let delay = ExitDelay::begin();
        // The end of the queue alone would not end a sleep of the thread.
        let _ = self.send(Box::new(move |worker| {
            worker.ended = true;
            worker.store = None;
            drop(delay);
        }));
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session")
            .field("settings", &self.settings)
            .field("closed", &self.closed)
            .finish_non_exhaustive()
    }
}

/// Where an answer comes from.
struct Answer<'a, T: Send + 'static> {
    session: &'a Session,
    answer: oneshot::Receiver<Result<T, LockError>>,
    /// What to take back if the answer is never heard.
    claim: Option<Claim>,
}

impl<T: Send + 'static> Answer<'_, T> {
    async fn within(&mut self, operation: &'static str, limit: Duration) -> Result<T, LockError> {
        let asked = Instant::now();
        let Ok(answered) = tokio::time::timeout(limit, &mut self.answer).await else {
            return Err(LockError::unavailable(
                operation,
                failure::busy(&self.session.settings.path, asked.elapsed()),
            ));
        };
        self.claim = None;
        answered.unwrap_or_else(|_| Err(self.session.gone()))
    }
}

impl<T: Send + 'static> Drop for Answer<'_, T> {
    fn drop(&mut self) {
        let Some(claim) = self.claim.take() else { return };
        // Either the thread finds this end closed and takes the grant back itself, or the answer is here already.
        self.answer.close();
        if let Ok(Ok(_)) = self.answer.try_recv() {
            let _ = self.session.send(Box::new(move |worker| worker.take_back(&claim)));
        }
    }
}

/// Where an answer goes.
pub(crate) struct Reply<T>(pub(crate) oneshot::Sender<Result<T, LockError>>);

impl<T> Reply<T> {
    /// Whether the caller is still there.
    pub(crate) fn is_wanted(&self) -> bool {
        !self.0.is_closed()
    }

    /// Fails if the caller has gone away.
    pub(crate) fn send(self, answer: Result<T, LockError>) -> Result<(), Result<T, LockError>> {
        self.0.send(answer)
    }
}
