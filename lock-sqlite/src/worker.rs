//! The thread that works a client's requests.
//!
//! It has one connection and works one request at a time. Requests that keep or end a claim go before those that acquire.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use lock_core::{LockError, LossReason, OwnerId, Revoker};

use crate::commands::Tx;
use crate::config::SqliteConfig;
use crate::connection;
use crate::database::Database;
use crate::error::Failure;
use crate::file_identity::Inode;
use crate::wait::Wake;

/// How long one request keeps the thread waiting for a transaction of another process. For as long after that, others only try.
const SLICE: Duration = Duration::from_millis(50);

/// Between looks whether the files are still the same, while something is held.
const WATCH: Duration = Duration::from_secs(1);

/// A request, and whether it keeps or ends a claim.
pub(crate) type Job = (Order, Box<dyn FnOnce(&mut Worker) + Send>);

/// Which requests go first.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Order {
    /// They keep or end a claim. Each claim has one of them at most.
    First,
    InTurn,
}

/// What the thread owns.
pub(crate) struct Worker {
    pub(crate) config: SqliteConfig,
    client: OwnerId,
    jobs: mpsc::Receiver<Job>,
    /// By their [`Order`].
    queues: [VecDeque<Job>; 2],
    database: Option<Database>,
    /// The file that was open last.
    inode: Option<Inode>,
    /// The highest token that the client has seen.
    seen: u64,
    /// The claims that this client holds, for all that it knows.
    pub(crate) held: HashMap<OwnerId, Revoker>,
    /// When the files were looked at last.
    watched: Instant,
    wake: Arc<Wake>,
    is_over: bool,
}

impl Worker {
    /// Starts the thread. The first request opens the file.
    pub(crate) fn start(config: SqliteConfig, wake: Arc<Wake>) -> Result<mpsc::Sender<Job>, LockError> {
        let (sender, jobs) = mpsc::channel();
        let worker = Self {
            config,
            client: OwnerId::random(),
            jobs,
            queues: [VecDeque::new(), VecDeque::new()],
            database: None,
            inode: None,
            seen: 0,
            held: HashMap::new(),
            watched: Instant::now(),
            wake,
            is_over: false,
        };
        let named = thread::Builder::new().name("fencelock-sqlite".to_owned());
        let started = named.spawn(move || worker.run());
        started.map_err(|e| LockError::failed("starting the thread that works the database", e))?;
        Ok(sender)
    }

    fn run(mut self) {
        let mut may_wait = Instant::now();
        while !self.is_over {
            let job = self.next();
            let begun = Instant::now();
            connection::wait_until(if begun < may_wait { begun } else { begun + SLICE });
            self.watch();
            if let Some((_, work)) = job {
                work(&mut self);
            }
            if begun.elapsed() >= SLICE {
                may_wait = Instant::now() + SLICE;
            }
        }
    }

    /// The next request. `None` when it is time to look at the files.
    fn next(&mut self) -> Option<Job> {
        while let Ok(job) = self.jobs.try_recv() {
            self.queues[job.0 as usize].push_back(job);
        }
        let next = self.queues.iter_mut().find_map(VecDeque::pop_front);
        next.or_else(|| match self.held.is_empty() {
            true => self.jobs.recv().ok(),
            false => self
                .jobs
                .recv_timeout(WATCH.saturating_sub(self.watched.elapsed()))
                .ok(),
        })
    }

    /// Tells holders soon when the file under them was replaced or removed.
    fn watch(&mut self) {
        if !self.held.is_empty() && self.watched.elapsed() >= WATCH {
            self.watched = Instant::now();
            let _ = self.with(|database| database.files.check());
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
        self.database = None;
        self.is_over = true;
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
        self.with(work)
    }

    /// Runs `work` on the open database, opening it if need be, and closes it after what makes it doubtful: also a panic.
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
        self.wake.set_database(&database.files.database);
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
        held.for_each(|(_, revoker)| revoker.revoke(LossReason::NotHeld));
    }
}
