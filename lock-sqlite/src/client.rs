//! A client's requests.
//!
//! One that finds the file busy is answered so by the [thread](crate::worker) and comes again a little later, so that none waits behind another
//! one's wait; one whose caller has gone away does nothing. So a release, which comes after its claim's request was dropped, is never overtaken
//! by that request.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak, mpsc};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use lock_core::{
    Attempt, Capabilities, Claim, Clock, DistributedLock, Executor, ExitDelay, Holder, Lease, LockError, LockName,
    Options, Released, Renewal, Scope, ServerInfo, Wait,
};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};

use crate::commands::Tx;
use crate::error::Failure;
use crate::wait::{Listener, Wake};
use crate::worker::{Job, Order, Worker};
use crate::{SqliteConfig, SqliteLock, file_identity, read_only};

/// Longest pause before a request that found the file busy comes again.
const LONGEST_PAUSE: Duration = Duration::from_millis(20);

/// How long a request that does not wait may take, whatever the limit for requests.
const IMPATIENT: Duration = Duration::from_secs(5);

/// A failure that is to come, from a file that another process blocks, is told so soon after the end of a wait.
const LAST_ATTEMPT: Duration = Duration::from_millis(750);

/// How long a claim whose wait has ended waits for its row to be taken away.
const LEAVING: Duration = Duration::from_millis(250);

/// One client's way to the database.
pub(crate) struct Client {
    jobs: mpsc::Sender<Job>,
    config: SqliteConfig,
    wake: Arc<Wake>,
}

impl SqliteConfig {
    /// Opens the file, or makes it unless it is [`read_only`](Self::read_only). Dropping the future leaves at most an empty database behind.
    ///
    /// # Errors
    ///
    /// - [`LockError::Configuration`] if the file cannot hold locks: not a database, that of another program or of a
    ///   newer version, a directory, unreadable or read-only, or in a directory that is missing or unwritable.
    /// - [`LockError::UnsafeConfiguration`] if locks in it might not exclude.
    /// - [`LockError::Unavailable`] if it did not answer in time, or the disk is full.
    pub async fn connect(self) -> Result<SqliteLock, LockError> {
        let lock = self.connect_lazy()?;
        let client = Arc::clone(&lock.client);
        // The caller may be outside of a runtime.
        let connecting = async move { client.read("opening the database", |_| Ok(())).await };
        Executor::default().run("connecting", connecting).await??;
        Ok(lock)
    }

    /// Opens the file at the first request, which fails as [`connect`](Self::connect) does. The next one tries again.
    ///
    /// # Errors
    ///
    /// [`LockError::Configuration`] if the path names no file or the time for requests is zero,
    /// [`LockError::Unavailable`] if the system refuses another thread.
    pub fn connect_lazy(self) -> Result<SqliteLock, LockError> {
        let config = Self {
            path: self.absolute()?,
            op_timeout: Options::usable_op_timeout(self.op_timeout)?,
            ..self
        };
        let wake = Arc::new(Wake::default());
        let jobs = Worker::start(config.clone(), Arc::clone(&wake))?;
        let client = Arc::new(Client { jobs, config, wake });
        Ok(SqliteLock { client })
    }
}

#[async_trait]
impl DistributedLock for SqliteLock {
    fn capabilities(&self) -> Capabilities {
        Capabilities::new(Scope::Machine)
            .with_op_timeout(self.client.config.op_timeout)
            // A claim that was passed over goes first.
            .with_give_way(Duration::ZERO)
            .with_inspection()
            .with_reservations()
            .with_shared()
            .with_permits()
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, LockError> {
        let limit = self.client.config.op_timeout.min(IMPATIENT);
        self.client.attempt(claim, false, limit).await
    }

    async fn acquire(&self, claim: &Claim, mut wait: Wait) -> Result<Attempt, LockError> {
        let (client, deadline, clock) = (&self.client, wait.deadline(), Clock::system());
        let left = || deadline.map_or(Duration::MAX, |deadline| deadline.since(clock.now()));
        let limit = || left().max(LAST_ATTEMPT).min(client.config.op_timeout);
        let busy = match client.attempt(claim, false, limit()).await? {
            Attempt::Busy(busy) => busy,
            granted => return Ok(granted),
        };
        if left().is_zero() {
            wait.busy(&busy);
            return Ok(busy.into());
        }
        // Before the claim has a row among the waiters, so that no release is missed after that.
        let waiting = client.wake.join(claim.owner(), |listener| {
            // A client that cannot listen looks by itself.
            let _ = Executor::default().spawn(listen(Arc::downgrade(client), listener));
        });
        loop {
            let busy = match client.attempt(claim, true, limit()).await? {
                Attempt::Busy(busy) => busy,
                granted => return Ok(granted),
            };
            // Not before: a claim that is said to wait holds up those that come after it.
            wait.busy(&busy);
            if left().is_zero() {
                let claim = claim.clone();
                let leave = move |worker: &mut Worker| worker.change(|tx| tx.leave(&claim));
                let limit = LEAVING.min(client.config.op_timeout);
                // A row that stays counts for a moment only.
                let _ = client.call("acquire", Order::First, limit, leave).await;
                return Ok(busy.into());
            }
            let _ = timeout(client.wake.pause(&busy).min(left()), waiting.woken.notified()).await;
        }
    }

    async fn renew(&self, lease: &Lease) -> Result<Renewal, LockError> {
        match lease.claim() {
            Some(claim) => {
                let renew = |tx: &Tx<'_>, claim: &Claim| tx.renew(claim);
                self.client.keep("renew", claim, false, renew).await
            }
            // Not one of ours.
            None => Ok(Renewal::NotHeld),
        }
    }

    async fn reserve(&self, claim: &Claim, length: Duration) -> Result<Renewal, LockError> {
        let reserve = move |tx: &Tx<'_>, claim: &Claim| tx.reserve(claim, length);
        self.client.keep("reserve", claim, true, reserve).await
    }

    async fn release(&self, claim: &Claim, keep: Option<Duration>) -> Result<Released, LockError> {
        let claim = claim.clone();
        let work = move |worker: &mut Worker| {
            worker.held.remove(&claim.owner());
            let was_held = match worker.change(|tx| tx.release(&claim, keep)) {
                // What lies there now may be a copy that has the lock.
                Err(Failure::Lost(_)) => worker.change(|tx| tx.release(&claim, keep))?,
                done => done?,
            };
            Ok(match was_held {
                true => Released::Released,
                false => Released::NotHeld,
            })
        };
        self.client.first("release", work).await
    }

    async fn holders(&self, name: &LockName) -> Result<Vec<Holder>, LockError> {
        let name = name.clone();
        let read = self.client.read("asking who holds a lock", move |tx| tx.holders(&name));
        read.await
    }

    async fn list(&self, prefix: &str) -> Result<Vec<Holder>, LockError> {
        let prefix = prefix.to_owned();
        self.client.read("listing locks", move |tx| tx.list(&prefix)).await
    }

    async fn force_release(&self, name: &LockName) -> Result<Vec<Holder>, LockError> {
        let name = name.clone();
        let work = move |worker: &mut Worker| worker.change(|tx| tx.force_release(&name));
        self.client.first("forced release", work).await
    }

    async fn server_info(&self) -> Result<ServerInfo, LockError> {
        let warnings = file_identity::warnings(&self.client.config.path);
        Ok(ServerInfo::new("SQLite", rusqlite::version()).with_warnings(warnings))
    }

    /// A client whose close failed goes on, and can be closed again.
    async fn close(&self) -> Result<(), LockError> {
        let done = self.client.first("close", Worker::close).await;
        self.client.wake.wake(None);
        match done {
            Err(LockError::Closed { .. }) => Ok(()),
            done => done,
        }
    }
}

impl Client {
    /// Reads what is held. A client that only reads opens the file for it anew.
    async fn read<T: Default + Send + 'static>(
        &self,
        operation: &'static str,
        read: impl Fn(&Tx<'_>) -> Result<T, Failure> + Send + Sync + 'static,
    ) -> Result<T, LockError> {
        let work = move |worker: &mut Worker| match worker.config.read_only {
            true => read_only::read(&worker.config.path, worker.config.allow_unsafe, &read),
            false => worker.with(|database| database.read(&read)),
        };
        self.call(operation, Order::InTurn, self.config.op_timeout, work).await
    }

    async fn attempt(&self, claim: &Claim, waits: bool, limit: Duration) -> Result<Attempt, LockError> {
        let claim = claim.clone();
        let work = move |worker: &mut Worker| {
            let sent = Clock::system().now();
            let attempt = worker.write(|database| database.acquire(&claim, sent, waits))?;
            if let Attempt::Granted(grant) = &attempt {
                worker.held.insert(claim.owner(), grant.revoker());
            }
            Ok(attempt)
        };
        self.call("acquire", Order::InTurn, limit, work).await
    }

    async fn keep(
        &self,
        operation: &'static str,
        claim: &Claim,
        durably: bool,
        keep: impl Fn(&Tx<'_>, &Claim) -> Result<bool, Failure> + Send + Sync + 'static,
    ) -> Result<Renewal, LockError> {
        let claim = claim.clone();
        let work = move |worker: &mut Worker| {
            match worker.write(|database| database.write(durably, |tx| keep(tx, &claim))) {
                Ok(true) => return Ok(Renewal::Renewed),
                // What lies there now knows of the lock at best what was true when it was copied.
                Ok(false) | Err(Failure::Lost(_)) => {}
                Err(failure) => return Err(failure),
            }
            worker.held.remove(&claim.owner());
            Ok(Renewal::NotHeld)
        };
        self.first(operation, work).await
    }

    /// Has the thread do `work` before requests to acquire.
    async fn first<T: Send + 'static>(
        &self,
        operation: &'static str,
        work: impl Fn(&mut Worker) -> Result<T, Failure> + Send + Sync + 'static,
    ) -> Result<T, LockError> {
        self.call(operation, Order::First, self.config.op_timeout, work).await
    }

    /// Has the thread do `work`, again while the file is busy, and waits for that for at most `limit`.
    async fn call<T: Send + 'static>(
        &self,
        operation: &'static str,
        order: Order,
        limit: Duration,
        work: impl Fn(&mut Worker) -> Result<T, Failure> + Send + Sync + 'static,
    ) -> Result<T, LockError> {
        let (work, begun) = (Arc::new(work), Instant::now());
        let mut pause = Duration::from_millis(1);
        loop {
            let (work, (reply, answer)) = (Arc::clone(&work), oneshot::channel());
            let job = move |worker: &mut Worker| {
                if reply.is_closed() {
                    return;
                }
                let done = catch_unwind(AssertUnwindSafe(|| work(worker)))
                    .unwrap_or_else(|_| Err(LockError::unavailable(operation, "it panicked; please report it").into()));
                // Explained by the thread that met it: rights may belong to threads.
                let _ = reply.send(done.map_err(|failure| match failure.is_busy() {
                    true => failure,
                    false => failure.explain(operation, &worker.config.path, begun.elapsed()).into(),
                }));
            };
            self.send(order, job)?;
            let failure = match timeout(limit.saturating_sub(begun.elapsed()), answer).await {
                Ok(Ok(Ok(done))) => return Ok(done),
                Ok(Ok(Err(failure))) => failure,
                // The thread has ended.
                Ok(Err(_)) => return Err(LockError::closed()),
                Err(_) => Failure::busy(),
            };
            if !failure.is_busy() || begun.elapsed() + pause >= limit {
                return Err(failure.explain(operation, &self.config.path, begun.elapsed()));
            }
            sleep(pause.mul_f64(0.5 + fastrand::f64())).await;
            pause = (2 * pause).min(LONGEST_PAUSE);
        }
    }

    /// Fails if the thread has ended.
    fn send(&self, order: Order, work: impl FnOnce(&mut Worker) + Send + 'static) -> Result<(), LockError> {
        let job = (order, Box::new(work) as _);
        self.jobs.send(job).map_err(|_| LockError::closed())
    }
}

/// Wakes the claims whose names have become free, whenever another client says that one has.
async fn listen(client: Weak<Client>, Listener { pipe, mut ended }: Listener) {
    #[allow(deprecated, reason = "its successor is unsafe, and asks for what an `OwnedFd` is")]
    let Ok(pipe) = AsyncFd::with_interest(pipe, Interest::READABLE) else {
        return;
    };
    loop {
        tokio::select! {
            _ = &mut ended => return,
            ready = pipe.readable() => match ready {
                Ok(mut ready) => ready.clear_ready(),
                Err(_) => return,
            },
        }
        let Some(client) = client.upgrade() else { return };
        match client.wake.waiting() {
            0 => {}
            // It looks by itself.
            1 => client.wake.wake(None),
            _ => {
                let find = |worker: &mut Worker| worker.with(|database| database.read(|tx| tx.may_go()));
                let found = client.first("looking for free names", find).await;
                client.wake.wake(found.ok().as_deref());
            }
        }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // A process that ends while it closes the file leaves a log behind, which only a client that may write can bring in.
        let delay = ExitDelay::begin();
        let _ = self.send(Order::First, move |worker| {
            worker.end();
            drop(delay);
        });
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Client");
        shown.field("config", &self.config).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use lock_core::Locks;

    use super::*;

    #[tokio::test]
    async fn a_request_that_panics_fails_and_the_client_goes_on() {
        let dir = tempfile::tempdir().unwrap();
        let lock = SqliteLock::open(dir.path().join("locks.db")).await.unwrap();
        let guard = Locks::new(lock.clone()).lock("n").await.unwrap();
        let panicking = |_: &mut Worker| -> Result<(), Failure> { panic!("on purpose") };
        let failed = lock.client.first("panicking", panicking).await.unwrap_err();
        assert!(failed.to_string().contains("panicked"), "{failed}");
        guard.renew_now().await.unwrap();
    }

    #[tokio::test]
    async fn requests_that_keep_or_end_a_claim_go_before_those_that_acquire() {
        let dir = tempfile::tempdir().unwrap();
        let lock = SqliteLock::open(dir.path().join("locks.db")).await.unwrap();
        let (go, gate) = mpsc::channel();
        let (done, order) = mpsc::channel();
        // Three requests come while the thread is at work.
        let held_up = move |_: &mut Worker| gate.recv().unwrap();
        lock.client.send(Order::First, held_up).unwrap();
        for (order, number) in [(Order::InTurn, 2), (Order::InTurn, 3), (Order::First, 1)] {
            let done = done.clone();
            lock.client.send(order, move |_| done.send(number).unwrap()).unwrap();
        }
        go.send(()).unwrap();
        assert_eq!(order.iter().take(3).collect::<Vec<_>>(), [1, 2, 3]);
    }
}
