//! A client's requests, and the thread that works them.
//!
//! The thread has one connection and works one request at a time. Requests that keep or end a claim go before those that acquire. A
//! request that finds the file busy is put back, so that none waits behind another one's wait; one whose caller has gone away does
//! nothing. So a release, which comes after its claim's request was dropped, is never overtaken by that request.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use lock_core::{
    Attempt, Claim, Clock, ExitDelay, Holder, LockError, LockName, LossReason, OwnerId, Released, Renewal, Revoker,
    Stamp, Wait,
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::timeout;

use crate::commands::{Database, Told, View};
use crate::connection;
use crate::error::{Failure, no_answer};
use crate::file_identity::with_suffix;
use crate::read_only;
use crate::wait::{Place, Wake, pause};

/// How many requests to acquire are in the thread's queue at once. More wait outside of it.
const QUEUE: usize = 1_024;

/// How long one request waits for a transaction of another process before others get their turn.
const SLICE: Duration = Duration::from_millis(50);

/// How long a request that does not wait lets one transaction of another process keep it from the file.
const STANDSTILL: Duration = Duration::from_secs(1);

/// Between looks whether the files are still the same, while something is held.
const WATCH: Duration = Duration::from_secs(1);

/// A failure that is to come, from a file that another process blocks, is told so soon after the end of a wait.
const LAST_ATTEMPT: Duration = Duration::from_millis(750);

/// What the client was configured with.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    /// Absolute.
    pub(crate) path: PathBuf,
    pub(crate) op_timeout: Duration,
    pub(crate) allow_unsafe: bool,
    /// Nothing is written, and nothing is made.
    pub(crate) read_only: bool,
}

/// One client's way to the database.
pub(crate) struct Client {
    jobs: mpsc::Sender<Job>,
    places: Arc<Semaphore>,
    closed: AtomicBool,
    settings: Settings,
    wake: Arc<Wake>,
}

/// Which requests go first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    /// They keep or end a claim. Each claim has one of them at most.
    First,
    /// As `First`, and worked also when the caller has gone away.
    Always,
    InTurn,
}

/// A request in the queue.
struct Job {
    order: Order,
    /// Works it. False if the file was busy and there is time left.
    work: Box<dyn FnMut(&mut Worker) -> bool + Send>,
}

impl Client {
    /// Starts the thread. The first request opens the file.
    pub(crate) fn start(settings: Settings) -> Result<Self, LockError> {
        let (jobs, queue) = mpsc::channel::<Job>();
        let wake = Arc::new(Wake::default());
        let mut worker = Worker {
            settings: settings.clone(),
            client: OwnerId::random(),
            database: None,
            seen: 0,
            held: HashMap::new(),
            watched: Instant::now(),
            wake: Arc::clone(&wake),
            ended: false,
        };
        let named = thread::Builder::new().name("fencelock-sqlite".to_owned());
        let started = named.spawn(move || worker.run(&queue));
        started.map_err(|e| LockError::failed("starting the thread that works the database", e))?;
        Ok(Self {
            jobs,
            places: Arc::new(Semaphore::new(QUEUE)),
            closed: AtomicBool::new(false),
            settings,
            wake,
        })
    }

    pub(crate) fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Reads what is held. A client that only reads opens the file for it anew.
    pub(crate) async fn read<T: Default + Send + 'static>(
        &self,
        operation: &'static str,
        read: impl Fn(&View<'_>) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, LockError> {
        let work = move |worker: &mut Worker| match worker.settings.read_only {
            true => read_only::read(&worker.settings, &read),
            false => worker.with(|database| database.read(&read)),
        };
        self.ask(operation, Order::InTurn, self.settings.op_timeout, work).await
    }

    /// Takes the name if it is free.
    pub(crate) async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, LockError> {
        let standstill = Some(Standstill(None));
        self.attempt(claim, false, standstill, self.settings.op_timeout).await
    }

    /// Takes the name, and waits for it.
    pub(crate) async fn acquire(&self, claim: &Claim, mut wait: Wait) -> Result<Attempt, LockError> {
        let (deadline, clock) = (wait.deadline(), Clock::system());
        let left = || deadline.map_or(Duration::MAX, |deadline| deadline.since(clock.now()));
        let limit = || left().max(LAST_ATTEMPT).min(self.settings.op_timeout);
        let busy = match self.attempt(claim, false, None, limit()).await? {
            Attempt::Busy(busy) => busy,
            granted => return Ok(granted),
        };
        if left().is_zero() {
            wait.busy(&busy);
            return Ok(busy.into());
        }
        // Before the claim has a row among the waiters, so that no release is missed after that.
        let listening = self.wake.listen();
        let place = Place::new(self, claim);
        loop {
            let woken = self.wake.woken();
            let busy = match self.attempt(claim, true, None, limit()).await? {
                Attempt::Busy(busy) => busy,
                granted => {
                    place.granted();
                    return Ok(granted);
                }
            };
            // Not before: a claim that is said to wait holds up those that come after it.
            wait.busy(&busy);
            if left().is_zero() {
                return Ok(busy.into());
            }
            let _ = timeout(pause(&listening, &busy).min(left()), woken).await;
        }
    }

    async fn attempt(
        &self,
        claim: &Claim,
        waits: bool,
        mut standstill: Option<Standstill>,
        limit: Duration,
    ) -> Result<Attempt, LockError> {
        self.may_write()?;
        let claim = claim.clone();
        let work = move |worker: &mut Worker| {
            let sent = Clock::system().now();
            let done = worker.with(|database| database.acquire(&claim, sent, waits));
            if done.as_ref().is_err_and(Failure::is_busy)
                && let Some(lasted) = standstill
                    .as_mut()
                    .and_then(|still| still.lasted(&worker.settings.path))
            {
                let message = no_answer(&worker.settings.path, lasted);
                return Err(LockError::unavailable("acquire", message).into());
            }
            let attempt = worker.tell(done)?;
            if let Attempt::Granted(grant) = &attempt {
                let (revoker, until) = (grant.revoker(), sent + claim.ttl());
                worker.held.insert(claim.owner(), Held { revoker, until });
            }
            Ok(attempt)
        };
        self.ask("acquire", Order::InTurn, limit, work).await
    }

    /// Keeps the claim for another ttl, if it is still there.
    pub(crate) async fn renew(&self, claim: &Claim) -> Result<Renewal, LockError> {
        self.keep("renew", claim, |database, claim| database.renew(claim)).await
    }

    /// Reserves the name if the claim holds it.
    pub(crate) async fn reserve(&self, claim: &Claim, length: Duration) -> Result<Renewal, LockError> {
        let reserve = move |database: &mut Database, claim: &Claim| database.reserve(claim, length);
        self.keep("reserve", claim, reserve).await
    }

    async fn keep(
        &self,
        operation: &'static str,
        claim: &Claim,
        keep: impl Fn(&mut Database, &Claim) -> Result<Renewal, Failure> + Send + 'static,
    ) -> Result<Renewal, LockError> {
        self.may_write()?;
        let claim = claim.clone();
        let work = move |worker: &mut Worker| {
            let sent = Clock::system().now();
            let renewal = match worker.with(|database| keep(database, &claim)) {
                // What lies there now knows of the lock at best what was true when it was copied.
                Err(Failure::Lost(_)) => Renewal::NotHeld,
                done => done?,
            };
            if renewal == Renewal::NotHeld {
                worker.held.remove(&claim.owner());
            } else if let Some(held) = worker.held.get_mut(&claim.owner()) {
                held.until = sent + claim.ttl();
            }
            Ok(renewal)
        };
        self.ask(operation, Order::First, self.settings.op_timeout, work).await
    }

    /// Releases the claim, also when the caller does not stay for the answer. With `keep` its name stays reserved for that long.
    pub(crate) async fn release(&self, claim: &Claim, keep: Option<Duration>) -> Result<Released, LockError> {
        let claim = claim.clone();
        let work = move |worker: &mut Worker| {
            worker.held.remove(&claim.owner());
            let mut release = || worker.with(|database| database.release(&claim, keep));
            let done = match release() {
                // What lies there now may be a copy that has the lock.
                Err(Failure::Lost(_)) => release(),
                done => done,
            };
            worker.tell(done)
        };
        self.end("release", work).await
    }

    /// Takes the name away from its holders, also when the caller does not stay for the answer.
    pub(crate) async fn force_release(&self, name: &LockName) -> Result<Vec<Holder>, LockError> {
        let name = name.clone();
        let work = move |worker: &mut Worker| {
            let forced = worker.with(|database| database.force_release(&name));
            worker.tell(forced)
        };
        self.may_write()?;
        // Not for a caller that has gone: by then another claim may hold the name.
        self.ask("forced release", Order::First, self.settings.op_timeout, work)
            .await
    }

    async fn end<T: Send + 'static>(
        &self,
        operation: &'static str,
        work: impl FnMut(&mut Worker) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, LockError> {
        self.may_write()?;
        self.ask(operation, Order::Always, self.settings.op_timeout, work).await
    }

    /// Ends the wait of the claim, without waiting for that.
    pub(crate) fn leave(&self, claim: Claim) {
        let leave = move |worker: &mut Worker| {
            let left = worker.with(|database| database.leave(&claim));
            worker.tell(left)
        };
        let _ = self.queue("acquire", Order::Always, None, self.settings.op_timeout, leave);
    }

    /// Releases all that this client holds and ends the thread.
    pub(crate) async fn close(&self) -> Result<(), LockError> {
        if self.closed.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        self.wake.end_waits();
        let limit = self.settings.op_timeout;
        let answer = self.queue("close", Order::Always, None, limit, |worker| {
            let done = worker.database.as_mut().map_or(Ok(()), Database::release_all);
            if !done.as_ref().is_err_and(Failure::is_busy) {
                worker.database = None;
                worker.ended = true;
            }
            worker.tell(done.map(|()| ((), true)))
        })?;
        self.answer("close", limit, answer).await
    }

    fn may_write(&self) -> Result<(), LockError> {
        if !self.settings.read_only {
            return Ok(());
        }
        let path = self.settings.path.display();
        Err(LockError::configuration(format!(
            "this client has opened {path} read-only, and can only tell what is held; to take, renew or release locks, connect without \
             mode=ro"
        )))
    }

    /// Has the thread do `work`, and waits for that for at most `limit`.
    async fn ask<T: Send + 'static>(
        &self,
        operation: &'static str,
        order: Order,
        limit: Duration,
        work: impl FnMut(&mut Worker) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, LockError> {
        if self.closed.load(Ordering::Acquire) {
            return Err(LockError::closed());
        }
        let asked = Instant::now();
        let place = match (order, Arc::clone(&self.places).try_acquire_owned()) {
            (Order::First | Order::Always, _) => None,
            (Order::InTurn, Ok(place)) => Some(place),
            (Order::InTurn, Err(_)) => match timeout(limit, Arc::clone(&self.places).acquire_owned()).await {
                Ok(place) => place.ok(),
                Err(_) => return Err(self.no_answer(operation, limit)),
            },
        };
        let left = limit.saturating_sub(asked.elapsed());
        let answer = self.queue(operation, order, place, left, work)?;
        self.answer(operation, left, answer).await
    }

    fn queue<T: Send + 'static>(
        &self,
        operation: &'static str,
        order: Order,
        place: Option<OwnedSemaphorePermit>,
        limit: Duration,
        mut work: impl FnMut(&mut Worker) -> Result<T, Failure> + Send + 'static,
    ) -> Result<oneshot::Receiver<Result<T, LockError>>, LockError> {
        let (reply, answer) = oneshot::channel();
        let mut reply = Some(reply);
        let asked = Instant::now();
        // A little less than the caller waits, so that the caller hears the reason.
        let until = asked + limit.mul_f64(0.9);
        let work = Box::new(move |worker: &mut Worker| {
            let _place = &place;
            if order != Order::Always && reply.as_ref().is_none_or(oneshot::Sender::is_closed) {
                return true;
            }
            let done = match work(worker) {
                Err(failure) if failure.is_busy() && Instant::now() < until => return false,
                done => done.map_err(|failure| failure.explain(operation, &worker.settings.path, asked.elapsed())),
            };
            if let Some(reply) = reply.take() {
                let _ = reply.send(done);
            }
            true
        });
        self.jobs.send(Job { order, work }).map_err(|_| self.gone())?;
        Ok(answer)
    }

    async fn answer<T>(
        &self,
        operation: &'static str,
        limit: Duration,
        answer: oneshot::Receiver<Result<T, LockError>>,
    ) -> Result<T, LockError> {
        match timeout(limit, answer).await {
            Ok(answered) => answered.unwrap_or_else(|_| Err(self.gone())),
            Err(_) => Err(self.no_answer(operation, limit)),
        }
    }

    fn no_answer(&self, operation: &'static str, limit: Duration) -> LockError {
        LockError::unavailable(operation, no_answer(&self.settings.path, limit))
    }

    /// Why a request was dropped without an answer.
    fn gone(&self) -> LockError {
        match self.closed.load(Ordering::Acquire) {
            true => LockError::closed(),
            false => LockError::unavailable("the request", "it panicked; please report it"),
        }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // A process that ends while it closes the file leaves a log behind, which only a client that may write can bring in.
        let mut delay = Some(ExitDelay::begin());
        let (order, work) = (Order::Always, move |worker: &mut Worker| {
            worker.database = None;
            worker.ended = true;
            drop(delay.take());
            true
        });
        let work = Box::new(work);
        let _ = self.jobs.send(Job { order, work });
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Client");
        shown
            .field("settings", &self.settings)
            .field("closed", &self.closed)
            .finish_non_exhaustive()
    }
}

/// What the thread owns.
struct Worker {
    settings: Settings,
    client: OwnerId,
    database: Option<Database>,
    /// The highest token that the client has seen.
    seen: u64,
    held: HashMap<OwnerId, Held>,
    /// When the files were looked at last.
    watched: Instant,
    wake: Arc<Wake>,
    ended: bool,
}

/// A claim that this client holds, for all that it knows.
struct Held {
    revoker: Revoker,
    until: Stamp,
}

/// The requests that the thread has taken over.
#[derive(Default)]
struct Queues {
    first: VecDeque<Job>,
    in_turn: VecDeque<Job>,
    /// Those that found the file busy in this round.
    busy: Vec<Job>,
    /// How many others have their turn before these have another one: those that were there when the first of them found the file busy.
    round: usize,
}

impl Queues {
    fn push(&mut self, job: Job) {
        match job.order {
            Order::InTurn => self.in_turn.push_back(job),
            Order::First | Order::Always => self.first.push_back(job),
        }
    }

    /// Keeps a request that found the file busy for the next round.
    fn park(&mut self, job: Job) {
        if self.busy.is_empty() {
            self.round = self.first.len() + self.in_turn.len();
        }
        self.busy.push(job);
    }

    /// The next request; `None` if there is none for now. The last one of a client ends the thread.
    fn next(&mut self, jobs: &mpsc::Receiver<Job>, idle: Option<Duration>) -> Option<Job> {
        while let Ok(job) = jobs.try_recv() {
            self.push(job);
        }
        if self.busy.is_empty() || self.round > 0 {
            self.round = self.round.saturating_sub(1);
        } else {
            std::mem::take(&mut self.busy)
                .into_iter()
                .for_each(|job| self.push(job));
        }
        if let Some(job) = self.first.pop_front().or_else(|| self.in_turn.pop_front()) {
            return Some(job);
        }
        // All have had their turn. Those that found the file busy have another one.
        let limit = if self.busy.is_empty() {
            idle
        } else {
            Some(Duration::from_millis(1))
        };
        let next = limit.map_or_else(|| jobs.recv().ok(), |limit| jobs.recv_timeout(limit).ok());
        for job in std::mem::take(&mut self.busy).into_iter().chain(next) {
            self.push(job);
        }
        None
    }
}

impl Worker {
    fn run(&mut self, jobs: &mpsc::Receiver<Job>) {
        let mut queues = Queues::default();
        while !self.ended {
            self.watch();
            let idle = (!self.held.is_empty()).then(|| WATCH.saturating_sub(self.watched.elapsed()));
            let Some(mut job) = queues.next(jobs, idle) else {
                continue;
            };
            // One request of a round waits for the other process; those after it only try.
            let slice = if queues.busy.is_empty() { SLICE } else { Duration::ZERO };
            connection::wait_until(Instant::now() + slice);
            match catch_unwind(AssertUnwindSafe(|| (job.work)(self))) {
                Ok(true) => {}
                Ok(false) => queues.park(job),
                Err(_) => {
                    tracing::error!(target: "fencelock", "a request to SQLite panicked; please report it");
                    self.database = None;
                }
            }
        }
    }

    /// Tells holders soon when the file under them was replaced or removed.
    fn watch(&mut self) {
        if self.held.is_empty() || self.watched.elapsed() < WATCH {
            return;
        }
        self.watched = Instant::now();
        let now = Clock::system().now();
        self.held.retain(|_, held| held.until > now);
        let _ = self.with(|database| database.check());
    }

    /// Runs `work` on the open database, opening it if need be, and closes it after what makes it doubtful.
    fn with<T>(&mut self, work: impl FnOnce(&mut Database) -> Result<T, Failure>) -> Result<T, Failure> {
        let database = match &mut self.database {
            Some(database) => database,
            none => {
                let Settings { path, allow_unsafe, .. } = &self.settings;
                let (database, place) = Database::open(path, *allow_unsafe, self.client, self.seen)?;
                self.wake.set_database(&place.real);
                none.insert(database)
            }
        };
        let mut done = work(database);
        self.seen = self.seen.max(database.seen());
        if done.as_ref().is_err_and(Failure::is_doubtful) {
            // Most of what SQLite can say about a file that was replaced is better said so.
            if let Err(lost @ Failure::Lost(_)) = database.check() {
                done = Err(lost);
            }
            self.database = None;
        }
        if matches!(done, Err(Failure::Lost(_))) {
            self.held
                .drain()
                .for_each(|(_, held)| held.revoker.revoke(LossReason::NotHeld));
        }
        done
    }

    /// Wakes the waiters of all clients if that is wanted.
    fn tell<T>(&self, done: Result<Told<T>, Failure>) -> Result<T, Failure> {
        let (done, wakes) = done?;
        if wakes {
            self.wake.wake_all();
        }
        Ok(done)
    }
}

/// A watch for a file that no process writes to, although one has the write lock: the last change that was seen, and when.
struct Standstill(Option<(Option<SystemTime>, Instant)>);

impl Standstill {
    /// How long none has written, if that is too long.
    fn lasted(&mut self, path: &Path) -> Option<Duration> {
        let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        // The files are only looked at: closing one would drop SQLite's locks.
        let written = |file: PathBuf| std::fs::metadata(file).and_then(|file| file.modified()).ok();
        let last = written(with_suffix(&path, "-wal")).max(written(path));
        match self.0 {
            Some((seen, since)) if seen == last => Some(since.elapsed()).filter(|lasted| *lasted >= STANDSTILL),
            _ => {
                self.0 = Some((last, Instant::now()));
                None
            }
        }
    }
}
#[cfg(test)]
mod tests {
    use std::task::{Context, Waker};

    use lock_core::{DistributedLock, Locks};

    use super::*;
    use crate::{SqliteConfig, SqliteLock};

    #[tokio::test]
    async fn a_request_that_panics_fails_and_the_client_goes_on() {
        let dir = tempfile::tempdir().unwrap();
        let lock = SqliteLock::open(dir.path().join("locks.db")).await.unwrap();
        let locks = Locks::new(lock.clone());
        let guard = locks.lock("n").await.unwrap();
        let ask = lock.client.ask(
            "panicking",
            Order::InTurn,
            Duration::from_secs(60),
            |_| -> Result<(), Failure> { panic!("on purpose") },
        );
        let failed = ask.await.unwrap_err();
        assert!(failed.to_string().contains("panicked"), "{failed}");
        guard.renew_now().await.unwrap();
        guard.release().await.unwrap();
        locks.lock("n").await.unwrap().release().await.unwrap();
    }

    #[test]
    fn a_request_that_found_the_file_busy_has_another_turn_though_others_keep_coming() {
        let (jobs, received) = mpsc::channel();
        let job = |order| Job {
            order,
            work: Box::new(|_| true),
        };
        let mut queues = Queues::default();
        for _ in 0..10 {
            queues.push(job(Order::InTurn));
        }
        queues.park(job(Order::First));
        for turn in 1.. {
            assert!(turn <= 11, "it is the turn of the renewal");
            jobs.send(job(Order::InTurn)).unwrap();
            if queues.next(&received, None).unwrap().order == Order::First {
                break;
            }
        }
    }

    #[tokio::test]
    async fn renewals_go_before_requests_that_wait_for_a_stuck_writer() {
        const TTL: Duration = Duration::from_secs(600);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("locks.db");
        let lock = SqliteConfig::new(&path).op_timeout(TTL).connect().await.unwrap();
        let claims: Vec<_> = (0..200)
            .map(|n| Claim::new(format!("n{n}").parse().unwrap(), TTL))
            .collect();
        let held = Claim::new("held".parse().unwrap(), TTL);
        let grant = lock.try_acquire(&held).await.unwrap().granted().unwrap();
        let stuck = rusqlite::Connection::open(&path).unwrap();
        stuck.execute_batch("BEGIN IMMEDIATE").unwrap();
        let mut context = Context::from_waker(Waker::noop());
        let mut requests: Vec<_> = claims
            .iter()
            .map(|claim| lock.acquire(claim, Wait::until(None)))
            .collect();
        let mut renewal = lock.renew(&grant.lease);
        for request in &mut requests {
            assert!(request.as_mut().poll(&mut context).is_pending());
        }
        assert!(renewal.as_mut().poll(&mut context).is_pending());
        stuck.execute_batch("ROLLBACK").unwrap();
        assert_eq!(renewal.await.unwrap(), Renewal::Renewed);
        for request in requests {
            request.await.unwrap().granted().unwrap();
        }
        let earlier = "SELECT count(*) FROM lock WHERE expires < (SELECT expires FROM lock WHERE name = 'held')";
        let earlier: i64 = stuck.query_row(earlier, [], |row| row.get(0)).unwrap();
        // The one that was being worked when the file came free.
        assert!(earlier <= 1, "{earlier} requests went before the renewal");
    }
}
