//! A client's requests.
//!
//! One that finds the file busy is answered so by the [thread](crate::worker) and comes again a little later, so that none waits behind another
//! one's wait; one whose caller has gone away does nothing. So a release, which comes after its claim's request was dropped, is never overtaken
//! by that request.

use std::fmt;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use lock_core::{
    Attempt, Capabilities, Claim, Clock, DistributedLock, Executor, ExitDelay, Holder, Lease, LockError, LockName,
    Options, Released, Renewal, Scope, ServerInfo, Wait,
};
use tokio::sync::{Notify, oneshot};
use tokio::time::{sleep, timeout};

use crate::commands::{Key, Tx};
use crate::error::{Failure, no_answer};
use crate::wait::Wake;
use crate::worker::{Job, Order, Worker};
use crate::{SqliteConfig, SqliteLock, file_identity, read_only};

/// Longest pause before a request that found the file busy comes again.
const LONGEST_PAUSE: Duration = Duration::from_millis(20);

/// How long a request that does not wait lets one transaction of another process keep it from the file.
const STANDSTILL: Duration = Duration::from_secs(1);

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
        let (jobs, wake) = Worker::start(config.clone())?;
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
        let limit = self.client.config.op_timeout;
        self.client.attempt(claim, false, STANDSTILL, limit).await
    }

    async fn renew(&self, lease: &Lease) -> Result<Renewal, LockError> {
        match lease.claim() {
            Some(claim) => {
                self.client
                    .keep("renew", claim, false, |tx, claim| tx.renew(claim))
                    .await
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
            worker.renewed(&claim, None);
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

    async fn acquire(&self, claim: &Claim, mut wait: Wait) -> Result<Attempt, LockError> {
        let (client, deadline, clock) = (&*self.client, wait.deadline(), Clock::system());
        let left = || deadline.map_or(Duration::MAX, |deadline| deadline.since(clock.now()));
        let limit = || left().max(LAST_ATTEMPT).min(client.config.op_timeout);
        let busy = match client.attempt(claim, false, Duration::MAX, limit()).await? {
            Attempt::Busy(busy) => busy,
            granted => return Ok(granted),
        };
        if left().is_zero() {
            wait.busy(&busy);
            return Ok(busy.into());
        }
        // Before the claim has a row among the waiters, so that no release is missed after that.
        let mut waiting = Waiting::begin(client, claim);
        loop {
            let busy = match client.attempt(claim, true, Duration::MAX, limit()).await? {
                Attempt::Busy(busy) => busy,
                granted => {
                    waiting.has_row = false;
                    return Ok(granted);
                }
            };
            // Not before: a claim that is said to wait holds up those that come after it.
            wait.busy(&busy);
            if left().is_zero() {
                waiting.end().await;
                return Ok(busy.into());
            }
            let _ = timeout(client.wake.pause(&busy).min(left()), waiting.woken.notified()).await;
        }
    }

    async fn holders(&self, name: &LockName) -> Result<Vec<Holder>, LockError> {
        let (client, name) = (&self.client, name.clone());
        client
            .read("asking who holds a lock", move |tx| tx.holders(&name))
            .await
    }

    async fn list(&self, prefix: &str) -> Result<Vec<Holder>, LockError> {
        let (mut held, mut next) = (Vec::new(), Some(Key::from((prefix.to_owned(), String::new()))));
        while let Some(after) = next {
            let prefix = prefix.to_owned();
            let page = self
                .client
                .read("listing locks", move |tx| tx.list(&prefix, &after))
                .await?;
            held.extend(page.0);
            next = page.1;
        }
        held.sort_by(|a, b| (&a.name, a.token).cmp(&(&b.name, b.token)));
        Ok(held)
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
        let (client, limit) = (&self.client, self.client.config.op_timeout);
        let done = client.call("close", Order::First, limit, Worker::close).await;
        client.wake.wake(None);
        match done {
            Err(LockError::Closed { .. }) => Ok(()),
            done => done,
        }
    }
}

impl Client {
    /// Reads what is held. A client that only reads opens the file for it anew.
    pub(crate) async fn read<T: Default + Send + 'static>(
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

    /// Gives up as soon as one transaction of another process has kept the file for `standstill`.
    async fn attempt(
        &self,
        claim: &Claim,
        waits: bool,
        standstill: Duration,
        limit: Duration,
    ) -> Result<Attempt, LockError> {
        let claim = claim.clone();
        let work = move |worker: &mut Worker| {
            let sent = Clock::system().now();
            if waits {
                worker.begin_wait(&claim);
            }
            let attempt = worker.write(|database| database.acquire(&claim, sent, waits));
            if attempt.as_ref().is_err_and(Failure::is_busy) && worker.stuck_for() >= standstill {
                let message = no_answer(&worker.config.path, worker.stuck_for());
                return Err(LockError::unavailable("acquire", message).into());
            }
            if let Ok(Attempt::Granted(grant)) = &attempt {
                worker.granted(grant, sent);
            }
            attempt
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
            let sent = Clock::system().now();
            let is_held = match worker.write(|database| database.write(durably, |tx| keep(tx, &claim))) {
                // What lies there now knows of the lock at best what was true when it was copied.
                Err(Failure::Lost(_)) => false,
                done => done?,
            };
            worker.renewed(&claim, is_held.then_some(sent));
            Ok(match is_held {
                true => Renewal::Renewed,
                false => Renewal::NotHeld,
            })
        };
        self.first(operation, work).await
    }

    /// Has the thread write before it works requests to acquire.
    async fn first<T: Send + 'static>(
        &self,
        operation: &'static str,
        work: impl Fn(&mut Worker) -> Result<T, Failure> + Send + Sync + 'static,
    ) -> Result<T, LockError> {
        self.call(operation, Order::First, self.config.op_timeout, work).await
    }

    /// Has the thread do `work`, and waits for that for at most `limit`.
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
            let job = Job::new(order, move |worker| {
                if !reply.is_closed() {
                    // Explained by the thread that met it: rights may belong to threads.
                    let done = work(worker).map_err(|failure| match failure.is_busy() {
                        true => failure,
                        false => failure.explain(operation, &worker.config.path, begun.elapsed()).into(),
                    });
                    let _ = reply.send(done);
                }
            });
            self.send(job)?;
            let failure = match timeout(limit.saturating_sub(begun.elapsed()), answer).await {
                Ok(Ok(Ok(done))) => return Ok(done),
                Ok(Ok(Err(failure))) => failure,
                Ok(Err(_)) => {
                    // The thread has ended, or is still there.
                    self.send(Job::new(Order::First, |_| ()))?;
                    return Err(LockError::unavailable(operation, "it panicked; please report it"));
                }
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
    fn send(&self, job: Job) -> Result<(), LockError> {
        self.jobs.send(job).map_err(|_| LockError::closed())
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // A process that ends while it closes the file leaves a log behind, which only a client that may write can bring in.
        let delay = ExitDelay::begin();
        let _ = self.send(Job::new(Order::First, move |worker| {
            worker.end();
            drop(delay);
        }));
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Client");
        shown.field("config", &self.config).finish_non_exhaustive()
    }
}

/// A claim that waits. Dropping it ends the wait.
struct Waiting<'a> {
    client: &'a Client,
    claim: &'a Claim,
    woken: Arc<Notify>,
    /// Whether it may have a row among the waiters. The grant takes that away.
    has_row: bool,
}

impl<'a> Waiting<'a> {
    fn begin(client: &'a Client, claim: &'a Claim) -> Self {
        let woken = client.wake.join(claim.owner());
        Self {
            client,
            claim,
            woken,
            has_row: true,
        }
    }

    /// Takes the row away, so that it holds up no others. If the file is busy for so long, [`Drop`] sees to that.
    async fn end(mut self) {
        let claim = self.claim.clone();
        let leave = move |worker: &mut Worker| worker.change(|tx| tx.leave(&claim));
        let limit = LEAVING.min(self.client.config.op_timeout);
        let left = self.client.call("acquire", Order::First, limit, leave).await;
        self.has_row = left.is_err();
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.client.wake.leave(self.claim.owner());
        if self.has_row {
            let claim = self.claim.clone();
            let leave = move |worker: &mut Worker| worker.end_wait(claim);
            let _ = self.client.send(Job::new(Order::First, leave));
        }
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
        let locks = Locks::new(lock.clone());
        let guard = locks.lock("n").await.unwrap();
        let panicking = |_: &mut Worker| -> Result<(), Failure> { panic!("on purpose") };
        let failed = lock.client.first("panicking", panicking).await.unwrap_err();
        assert!(failed.to_string().contains("panicked"), "{failed}");
        guard.renew_now().await.unwrap();
        guard.release().await.unwrap();
        locks.lock("n").await.unwrap().release().await.unwrap();
    }

    #[tokio::test]
    async fn requests_that_keep_or_end_a_claim_go_before_those_that_acquire() {
        let dir = tempfile::tempdir().unwrap();
        let lock = SqliteLock::open(dir.path().join("locks.db")).await.unwrap();
        let (go, gate) = mpsc::channel();
        let (done, order) = mpsc::channel();
        let job = |order, number| {
            let done = done.clone();
            Job::new(order, move |_| done.send(number).unwrap())
        };
        // Three requests come while the thread is at work.
        let held_up = Job::new(Order::First, move |_| gate.recv().unwrap());
        for job in [
            held_up,
            job(Order::InTurn, 2),
            job(Order::InTurn, 3),
            job(Order::First, 1),
        ] {
            lock.client.jobs.send(job).unwrap();
        }
        go.send(()).unwrap();
        assert_eq!(order.iter().take(3).collect::<Vec<_>>(), [1, 2, 3]);
    }
}
