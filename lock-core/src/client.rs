//! What stands behind a client: everything that its clones share, and where its work is done.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::{OnceCell, Semaphore};
use tokio::time;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

use crate::call::call;
use crate::names::Names;
use crate::process::{AtExit, Process};
use crate::stats::{Counters, Gauge};
use crate::watchdog::Watchdog;
use crate::{Capabilities, Clock, DistributedLock, Executor, LockError, LossReason, Options, Outages};

/// How long a client may keep a contended lock to itself where the server has no queue.
pub(crate) const TENURE: Duration = Duration::from_millis(100);

/// How many observers of a client look at once. The others wait for their turn within the limit of one request.
const LOOKS: usize = 4;

/// What all clones of a client share. It belongs to the process in which it was made.
pub(crate) struct ClientInner {
    /// The process in which it was made.
    pub(crate) process: Arc<Process>,
    pub(crate) backend: Arc<dyn DistributedLock>,
    pub(crate) capabilities: Capabilities,
    pub(crate) clock: Clock,
    pub(crate) ttl: Duration,
    pub(crate) op_timeout: Duration,
    read_only: bool,
    pub(crate) executor: Executor,
    pub(crate) names: Names,
    pub(crate) watchdog: Watchdog,
    pub(crate) stats: Counters,
    pub(crate) outages: Outages,
    pub(crate) release_outages: Outages,
    pub(crate) release_slots: Semaphore,
    /// For releases that failed before. Those that fail again and again, as on one hung session, do not delay other locks.
    pub(crate) retry_slots: Semaphore,
    pub(crate) releases_answered: AtomicU64,
    /// Looks of observers that are under way: on Postgres each takes a session.
    pub(crate) looks: Semaphore,
    pub(crate) tasks: TaskTracker,
    /// Whether the server has ever answered.
    was_connected: AtomicBool,
    pub(crate) closing: CancellationToken,
    /// How many locks could not be released at the end.
    closed: OnceCell<u64>,
}

impl ClientInner {
    pub(crate) fn new(backend: impl DistributedLock, options: Options) -> Self {
        let capabilities = backend.capabilities();
        let op_timeout = options.op_timeout.unwrap_or(capabilities.op_timeout);
        let op_timeout = op_timeout.min(Options::MAX_OP_TIMEOUT);
        // Where the server has no queue, those who poll would ask in vain for as long.
        let longest = if capabilities.fair { Duration::MAX } else { TENURE };
        let (process, stats) = (Process::current(), Counters::default());
        let names = Names::new(options.linger.min(longest), &process, &stats.releasing);
        Self {
            process,
            clock: backend.clock(),
            ttl: options
                .ttl
                .unwrap_or(Options::DEFAULT_TTL.clamp(capabilities.min_ttl, capabilities.max_ttl)),
            op_timeout,
            read_only: options.read_only,
            executor: Executor::new(options.runtime),
            capabilities,
            backend: Arc::new(backend),
            names,
            watchdog: Watchdog::default(),
            stats,
            outages: Outages::default(),
            release_outages: Outages::of_releases(),
            release_slots: Semaphore::new(128),
            retry_slots: Semaphore::new(16),
            releases_answered: AtomicU64::new(0),
            looks: Semaphore::new(LOOKS),
            tasks: TaskTracker::new(),
            was_connected: AtomicBool::new(false),
            closing: CancellationToken::new(),
            closed: OnceCell::new(),
        }
    }

    /// Starts work that a shutdown waits for. Callable from anywhere in the process of the client.
    pub(crate) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) -> Result<(), LockError> {
        self.executor.spawn(self.tasks.track_future(work))
    }

    /// Keeps a shutdown from ending before what the caller is about to start.
    pub(crate) fn about_to_start(&self) -> TaskTrackerToken {
        self.tasks.token()
    }

    /// Waits on the client's executor, as the caller may be outside of a runtime.
    ///
    /// # Errors
    ///
    /// As [`run_for_caller`](Self::run_for_caller).
    pub(crate) async fn sleep(&self, pause: Duration) -> Result<(), LockError> {
        self.run_for_caller("waiting", time::sleep(pause)).await
    }

    /// Waits for the releases that are under way. Those that a forked child has inherited never end there.
    pub(crate) async fn drain(&self) {
        if !self.is_of_this_process() {
            return;
        }
        let _none = self.end_lingering();
        self.names.releases.drain().await;
    }

    /// Releases all claims that are kept without a guard. None is until the result is dropped.
    pub(crate) fn end_lingering(&self) -> Gauge {
        let none = self.names.draining.hold();
        let unkept = self.names.unkeep_all(self.clock.now());
        unkept.into_iter().for_each(Self::unkept);
        none
    }

    /// What an answer to a request to acquire says. Credentials that are refused to a client that was connected before may be right
    /// again soon, as when a password is changed at the server first: as many clients as there are would end otherwise.
    pub(crate) fn heard<T>(&self, answer: Result<T, LockError>) -> Result<T, LockError> {
        match answer {
            Ok(answer) => {
                self.was_connected.store(true, Ordering::Relaxed);
                Ok(answer)
            }
            Err(error) if self.was_connected.load(Ordering::Relaxed) => Err(error.refused_for_now()),
            Err(error) => Err(error),
        }
    }

    /// False in a forked child. A system call.
    pub(crate) fn is_of_this_process(&self) -> bool {
        self.process.is_current()
    }

    /// Fails in a forked child, where no task of the client runs. Once for each operation.
    pub(crate) fn check_process(&self) -> Result<(), LockError> {
        if self.is_of_this_process() {
            return Ok(());
        }
        Err(LockError::configuration(
            "this client was made before a fork and belongs to the parent process; connect a new client in the child",
        ))
    }

    /// Fails if the client only looks at locks.
    pub(crate) fn may_write(&self) -> Result<(), LockError> {
        if self.read_only {
            return Err(LockError::configuration(
                "this client was made read-only, and can only tell what is held; make one without Options::read_only to take \
                 or release locks",
            ));
        }
        Ok(())
    }

    /// Sends one request to the backend, from the executor, and limits it to `op_timeout`. Dropping the future does not stop the request.
    pub(crate) async fn call<T: Send + 'static>(
        &self,
        operation: &'static str,
        request: impl Future<Output = Result<T, LockError>> + Send + 'static,
    ) -> Result<T, LockError> {
        self.run(operation, call(operation, self.op_timeout, request)).await
    }

    /// Does work that a shutdown waits for, also if the caller goes away.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        operation: &'static str,
        work: impl Future<Output = Result<T, LockError>> + Send + 'static,
    ) -> Result<T, LockError> {
        let work = self.tasks.track_future(work);
        self.check_usable()?;
        self.executor.run(operation, work).await?
    }

    /// Does work without a limit, which ends when the caller goes away.
    ///
    /// # Errors
    ///
    /// [`LockError::Closed`] as soon as the client is shut down, and as [`Executor::run`].
    pub(crate) async fn run_for_caller<T: Send + 'static>(
        &self,
        operation: &'static str,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Result<T, LockError> {
        let work = self.closing.clone().run_until_cancelled_owned(work);
        let work = self.tasks.track_future(work);
        self.check_usable()?;
        let done = self.executor.run_for_caller(operation, work).await?;
        done.ok_or_else(LockError::closed)
    }

    /// Fails if requests cannot be sent.
    fn check_usable(&self) -> Result<(), LockError> {
        self.check_process()?;
        Options::usable_op_timeout(self.op_timeout)?;
        match self.closing.is_cancelled() {
            true => Err(LockError::closed()),
            false => Ok(()),
        }
    }

    /// Ends everything, in a task of its own so that a caller who goes away stops nothing.
    pub(crate) async fn shut_down(self: &Arc<Self>) -> Result<(), LockError> {
        self.check_process()?;
        self.closing.cancel();
        self.answer(self.names.close());
        let core = Arc::clone(self);
        // Not among the tasks that a shutdown waits for.
        self.executor.run("shutdown", async move { core.end().await }).await?
    }

    async fn end(&self) -> Result<(), LockError> {
        let stuck = self
            .closed
            .get_or_init(async || {
                for held in self.watchdog.holds(None) {
                    held.let_go(LossReason::Shutdown, None);
                }
                drop(self.end_lingering());
                self.tasks.close();
                self.tasks.wait().await;
                if let Err(error) = call("close", self.op_timeout, async { self.backend.close().await }).await {
                    tracing::warn!(target: "fencelock", error = format_args!("{error:#}"), "the backend did not close cleanly");
                }
                self.stats.unreleased.get()
            })
            .await;
        match stuck {
            0 => Ok(()),
            n => Err(LockError::unavailable(
                "shutdown",
                format!(
                    "{n} locks, or requests for locks without an answer, could not be released one by one; those that the server keeps by the client's session are \
                     free when it notices the end of that, all others when their ttl is over"
                ),
            )),
        }
    }
}

impl AtExit for ClientInner {
    fn at_exit(&self) {
        if self.is_of_this_process() {
            // For good: nothing is to be kept any more.
            std::mem::forget(self.end_lingering());
        }
    }
}

impl fmt::Debug for ClientInner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stats = self.stats.snapshot();
        f.debug_struct("ClientInner")
            .field("backend", &self.backend)
            .field("held", &stats.held)
            .field("waiting", &stats.waiting)
            .finish_non_exhaustive()
    }
}

impl Drop for ClientInner {
    fn drop(&mut self) {
        if self.is_of_this_process() {
            return self.watchdog.wake.notify_one();
        }
        // A forked child keeps what does something when it is dropped: the connections, which are its parent's, and what takes a mutex.
        std::mem::forget(Arc::clone(&self.backend));
        let none = Names::new(Duration::ZERO, &self.process, &self.stats.releasing);
        std::mem::forget(std::mem::replace(&mut self.names, none));
        std::mem::forget(std::mem::take(&mut self.closing));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Locks, MemoryLock};

    #[tokio::test(start_paused = true)]
    async fn a_client_that_holds_nothing_remembers_nothing() {
        let memory = MemoryLock::new();
        let options = crate::Options::new().runtime(tokio::runtime::Handle::current());
        let locks = Locks::with_options(memory.client(), options);
        let guards = [
            locks.lock("a").await.unwrap(),
            locks.lock("b").max_hold(Duration::from_secs(9)).await.unwrap(),
        ];
        let given_up = tokio::time::timeout(Duration::from_millis(1), locks.lock("a")).await;
        assert!(given_up.is_err());
        for guard in guards {
            guard.release().await.unwrap();
        }
        while locks.stats().waiting + locks.stats().releasing > 0 {
            tokio::task::yield_now().await;
        }
        assert!(locks.core.watchdog.is_idle());
        assert!(locks.core.names.is_idle());
        assert_eq!(memory.waiters(), 0);
    }
}
