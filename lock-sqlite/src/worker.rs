//! The thread that works a client's requests.
//!
//! It has one connection and works one request at a time. Requests that keep or end a claim go before those that acquire.

use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use lock_core::{Claim, Clock, Grant, LockError, LossReason, OwnerId, Revoker, Stamp};

use crate::commands::Tx;
use crate::config::SqliteConfig;
use crate::connection;
use crate::database::Database;
use crate::error::Failure;
use crate::file_identity::{Inode, with_suffix};
use crate::wait::Wake;

/// How long one request keeps the thread waiting for a transaction of another process. For as long after that, others only try.
const SLICE: Duration = Duration::from_millis(50);

/// Between attempts to take away the rows of waits that have ended.
const AGAIN: Duration = Duration::from_millis(20);

/// Between looks whether the files are still the same, while something is held.
const WATCH: Duration = Duration::from_secs(1);

/// Longest time between two requests that find the file busy because of the same transaction of another process.
const GAP: Duration = Duration::from_secs(1);

/// A request in the queue.
pub(crate) struct Job {
    order: Order,
    work: Box<dyn FnOnce(&mut Worker) + Send>,
}

/// Which requests go first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// They keep or end a claim. Each claim has one of them at most.
    First,
    InTurn,
}

impl Job {
    pub(crate) fn new(order: Order, work: impl FnOnce(&mut Worker) + Send + 'static) -> Self {
        let work = Box::new(work);
        Self { order, work }
    }
}

/// What the thread owns.
pub(crate) struct Worker {
    pub(crate) config: SqliteConfig,
    client: OwnerId,
    jobs: mpsc::Receiver<Job>,
    first: VecDeque<Job>,
    in_turn: VecDeque<Job>,
    database: Option<Database>,
    /// The file that was open last.
    inode: Option<Inode>,
    /// The highest token that the client has seen.
    seen: u64,
    held: HashMap<OwnerId, Held>,
    /// Waits that were dropped, and whose rows the file was too busy to take away.
    ended_waits: Vec<(Claim, Instant)>,
    /// When the files were looked at last.
    watched: Instant,
    stuck: Option<Stuck>,
    wake: Arc<Wake>,
    is_over: bool,
}

/// A claim that this client holds, for all that it knows.
struct Held {
    revoker: Revoker,
    until: Stamp,
}

/// Another process has the write lock.
struct Stuck {
    /// The last change of the log.
    written: Option<SystemTime>,
    /// When requests found the file busy after that change: the first and the last of them.
    since: Instant,
    last: Instant,
}

impl Worker {
    /// Starts the thread. The first request opens the file.
    pub(crate) fn start(config: SqliteConfig) -> Result<(mpsc::Sender<Job>, Arc<Wake>), LockError> {
        let (sender, jobs) = mpsc::channel();
        let finder = sender.clone();
        let wake = Wake::new(move || drop(finder.send(Job::new(Order::First, Self::find))));
        let mut worker = Self {
            config,
            client: OwnerId::random(),
            jobs,
            first: VecDeque::new(),
            in_turn: VecDeque::new(),
            database: None,
            inode: None,
            seen: 0,
            held: HashMap::new(),
            ended_waits: Vec::new(),
            watched: Instant::now(),
            stuck: None,
            wake: Arc::clone(&wake),
            is_over: false,
        };
        let named = thread::Builder::new().name("fencelock-sqlite".to_owned());
        let started = named.spawn(move || worker.run());
        started.map_err(|e| LockError::failed("starting the thread that works the database", e))?;
        Ok((sender, wake))
    }

    fn run(&mut self) {
        let mut may_wait = Instant::now();
        while !self.is_over {
            let job = self.next();
            let begun = Instant::now();
            connection::wait_until(if begun < may_wait { begun } else { begun + SLICE });
            let work = AssertUnwindSafe(|| {
                self.watch();
                if let Some(job) = job {
                    (job.work)(self);
                }
                self.end_waits();
            });
            if catch_unwind(work).is_err() {
                tracing::error!(target: "fencelock", "a request to SQLite panicked; please report it");
                self.database = None;
            }
            if begun.elapsed() >= SLICE {
                may_wait = Instant::now() + SLICE;
            }
        }
    }

    /// The next request. `None` when it is time to look at the files.
    fn next(&mut self) -> Option<Job> {
        while let Ok(job) = self.jobs.try_recv() {
            match job.order {
                Order::First => self.first.push_back(job),
                Order::InTurn => self.in_turn.push_back(job),
            }
        }
        let next = self.first.pop_front().or_else(|| self.in_turn.pop_front());
        next.or_else(|| match (self.ended_waits.is_empty(), self.held.is_empty()) {
            (true, true) => self.jobs.recv().ok(),
            (true, false) => {
                let left = WATCH.saturating_sub(self.watched.elapsed());
                self.jobs.recv_timeout(left).ok()
            }
            (false, _) => self.jobs.recv_timeout(AGAIN).ok(),
        })
    }

    /// Takes away the row of a claim that waits no more: now, or as soon as the file is free.
    pub(crate) fn end_wait(&mut self, claim: Claim) {
        self.ended_waits.push((claim, Instant::now()));
    }

    /// The claim waits again, and has its row for that.
    pub(crate) fn begin_wait(&mut self, claim: &Claim) {
        self.ended_waits.retain(|(ended, _)| ended.owner() != claim.owner());
    }

    fn end_waits(&mut self) {
        for (claim, since) in std::mem::take(&mut self.ended_waits) {
            let left = self.change(|tx| tx.leave(&claim));
            if left.is_err_and(|failure| failure.is_busy()) && since.elapsed() < self.config.op_timeout {
                self.ended_waits.push((claim, since));
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
        let _ = self.with(|database| database.files.check());
    }

    /// Wakes the claims whose names have become free.
    fn find(&mut self) {
        self.wake.begin_to_find();
        let found = self.with(|database| database.read(|tx: &Tx<'_>| tx.may_go()));
        self.wake.wake(found.ok().as_deref());
    }

    /// Notes that this client holds the claim.
    pub(crate) fn granted(&mut self, grant: &Grant, sent: Stamp) {
        let (revoker, until) = (grant.revoker(), sent + grant.claim.ttl());
        self.held.insert(grant.claim.owner(), Held { revoker, until });
    }

    /// Notes that the claim was renewed by a request of that time, or that this client does not hold it.
    pub(crate) fn renewed(&mut self, claim: &Claim, sent: Option<Stamp>) {
        match (self.held.get_mut(&claim.owner()), sent) {
            (Some(held), Some(sent)) => held.until = sent + claim.ttl(),
            _ => drop(self.held.remove(&claim.owner())),
        }
    }

    /// Releases all that this client holds, and ends the thread.
    pub(crate) fn close(&mut self) -> Result<(), Failure> {
        // A file that was closed after a failure may have rows of this client.
        if self.database.is_some() || !self.held.is_empty() {
            self.change(|tx| tx.release_all())?;
        }
        self.end();
        Ok(())
    }

    /// Closes the file, and ends the thread.
    pub(crate) fn end(&mut self) {
        self.ended_waits.clear();
        self.database = None;
        self.is_over = true;
    }

    /// How long one transaction of another process has kept the file busy without writing to it.
    pub(crate) fn stuck_for(&self) -> Duration {
        self.stuck
            .as_ref()
            .map_or(Duration::ZERO, |stuck| stuck.last - stuck.since)
    }

    /// Runs `change` in a transaction that does not wait for the disk.
    pub(crate) fn change<T>(&mut self, change: impl Fn(&mut Tx<'_>) -> Result<T, Failure>) -> Result<T, Failure> {
        self.write(|database| database.write(false, change))
    }

    /// As [`with`](Self::with), for what takes the write lock.
    pub(crate) fn write<T>(&mut self, work: impl FnOnce(&mut Database) -> Result<T, Failure>) -> Result<T, Failure> {
        if self.config.read_only {
            return Err(Failure::configuration(format!(
                "this client has opened {} read-only, and can only tell what is held; to take, renew or release locks, connect without \
                 mode=ro",
                self.config.path.display()
            )));
        }
        let done = self.with(work);
        if done.as_ref().is_err_and(Failure::is_busy) {
            let path = self.config.path.canonicalize();
            // The log is only looked at: closing it would drop SQLite's locks.
            let log = path.and_then(|path| std::fs::metadata(with_suffix(&path, "-wal")));
            let written = log.and_then(|log| log.modified()).ok();
            let now = Instant::now();
            let before = self
                .stuck
                .as_ref()
                .filter(|stuck| stuck.written == written && stuck.last.elapsed() < GAP);
            let since = before.map_or(now, |stuck| stuck.since);
            self.stuck = Some(Stuck {
                written,
                since,
                last: now,
            });
        }
        done
    }

    /// Runs `work` on the open database, opening it if need be, and closes it after what makes it doubtful.
    pub(crate) fn with<T>(&mut self, work: impl FnOnce(&mut Database) -> Result<T, Failure>) -> Result<T, Failure> {
        let mut database = match self.database.take() {
            Some(database) => database,
            None => self.open()?,
        };
        let mut done = work(&mut database);
        self.seen = self.seen.max(database.known.seen);
        if done.is_ok() && std::mem::take(&mut database.known.wakes) {
            self.wake.wake_clients();
        }
        if done.as_ref().is_err_and(Failure::is_doubtful) {
            // Most of what SQLite can say about a file that was replaced is better said so.
            if let Err(lost @ Failure::Lost(_)) = database.files.check() {
                done = Err(lost);
            }
        } else {
            self.database = Some(database);
        }
        if matches!(done, Err(Failure::Lost(_))) {
            self.revoke();
        }
        done
    }

    fn open(&mut self) -> Result<Database, Failure> {
        let SqliteConfig { path, allow_unsafe, .. } = &self.config;
        let database = Database::open(path, *allow_unsafe, self.client, self.seen)?;
        self.wake.set_database(database.files.database());
        let inode = database.files.inode();
        let is_another = self.inode.replace(inode).is_some_and(|before| before != inode);
        if is_another || database.was_set_back {
            self.revoke();
        }
        Ok(database)
    }

    /// What was held is not in the file that is there now, or not for certain.
    fn revoke(&mut self) {
        let held = self.held.drain();
        held.for_each(|(_, held)| held.revoker.revoke(LossReason::NotHeld));
    }
}
