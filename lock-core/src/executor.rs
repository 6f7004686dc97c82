//! Where a client's tasks run.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use tokio::runtime::Handle;

use crate::LockError;
use crate::background::background;
use crate::process::Process;
use crate::sync::oneshot;

/// Runs a client's tasks: on the runtime that the user chose, or on the [background thread](crate::background()) if the user chose none
/// or the chosen runtime has ended.
///
/// A backend that keeps connections has one of these, and opens every connection in a task that it [spawns](Self::spawn). When the
/// chosen runtime ends, its connections end with it; the tasks that open the next ones run on the background thread.
///
/// Cloning is cheap; clones notice the end of the runtime together.
#[derive(Clone)]
pub struct Executor {
    chosen: Option<Arc<Chosen>>,
    process: Arc<Process>,
}

struct Chosen {
    runtime: Handle,
    ended: AtomicBool,
}

impl Default for Executor {
    fn default() -> Self {
        Self::new(None)
    }
}

impl Executor {
    /// Runs tasks on `runtime`, or on the background thread if it is `None`.
    #[must_use]
    pub fn new(runtime: Option<Handle>) -> Self {
        let chosen = |runtime| {
            Arc::new(Chosen {
                runtime,
                ended: AtomicBool::new(false),
            })
        };
        Self {
            chosen: runtime.map(chosen),
            process: Process::current(),
        }
    }

    /// Starts a task. Callable from any thread.
    ///
    /// A task that the chosen runtime drops before its first poll, because the runtime has ended, is started on the background
    /// thread instead. A task that the runtime drops later is lost: its timers and connections belonged to the runtime. `work` shall
    /// clean up when it is dropped, for which it may spawn again.
    ///
    /// # Errors
    ///
    /// [`LockError::Unavailable`] if the system refuses to start the background thread.
    pub fn spawn(&self, work: impl Future<Output = ()> + Send + Unpin + 'static) -> Result<(), LockError> {
        match self.chosen() {
            Some(chosen) => {
                let work = Movable {
                    work: Some(work),
                    begun: false,
                    chosen: Arc::clone(chosen),
                };
                chosen.runtime.spawn(work);
            }
            None => {
                self.process.background()?.spawn(work);
            }
        }
        Ok(())
    }

    /// Starts a task and waits for its result. Dropping the future does not stop the task.
    ///
    /// # Errors
    ///
    /// [`LockError::Unavailable`] if the task panicked, if its runtime ended before it did, or as [`spawn`](Self::spawn).
    pub async fn run<T: Send + 'static>(
        &self,
        operation: &'static str,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Result<T, LockError> {
        let (tell, told) = oneshot::channel();
        self.spawn(Box::pin(async move {
            let _ = tell.send(work.await);
        }))?;
        match told.await {
            Ok(done) => Ok(done),
            Err(_) => Err(LockError::unavailable(
                operation,
                "the task that worked on it panicked, or its runtime ended".to_owned(),
            )),
        }
    }

    /// Whether the caller runs where [`spawn`](Self::spawn) would start a task.
    #[must_use]
    pub fn is_current(&self) -> bool {
        let Ok(here) = Handle::try_current() else {
            return false;
        };
        match self.chosen() {
            Some(chosen) => chosen.runtime.id() == here.id(),
            None => self
                .process
                .started()
                .is_some_and(|background| background.id() == here.id()),
        }
    }

    /// Whether tasks are started on a runtime that the user chose, and that is not known to have ended.
    #[must_use]
    pub fn is_on_chosen_runtime(&self) -> bool {
        self.chosen().is_some()
    }

    /// Starts no more tasks on the chosen runtime, which has ended.
    pub(crate) fn leave_chosen_runtime(&self) {
        if let Some(chosen) = &self.chosen {
            chosen.leave();
        }
    }

    fn chosen(&self) -> Option<&Arc<Chosen>> {
        self.chosen
            .as_ref()
            .filter(|chosen| !chosen.ended.load(Ordering::Acquire))
    }
}

impl Chosen {
    fn leave(&self) {
        if !self.ended.swap(true, Ordering::AcqRel) {
            tracing::warn!(target: "fencelock", "the runtime of a lock client has ended; the client goes on on the background thread");
        }
    }
}

impl fmt::Debug for Executor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_on_chosen_runtime() {
            "Executor::Chosen"
        } else {
            "Executor::Background"
        })
    }
}

/// A task on the chosen runtime. Nobody aborts it, so it is dropped unfinished only if the runtime ends.
struct Movable<F: Future<Output = ()> + Send + Unpin + 'static> {
    // None once it has ended or panicked.
    work: Option<F>,
    begun: bool,
    chosen: Arc<Chosen>,
}

impl<F: Future<Output = ()> + Send + Unpin + 'static> Future for Movable<F> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        // Taken out while it is polled, so that work that panics does not count as unfinished.
        let Some(mut work) = self.work.take() else {
            return Poll::Ready(());
        };
        self.begun = true;
        let polled = Pin::new(&mut work).poll(context);
        if polled.is_pending() {
            self.work = Some(work);
        }
        polled
    }
}

impl<F: Future<Output = ()> + Send + Unpin + 'static> Drop for Movable<F> {
    fn drop(&mut self) {
        let Some(work) = self.work.take() else { return };
        // Before the work is dropped, which may spawn what cleans up.
        self.chosen.leave();
        if self.begun {
            return;
        }
        match background() {
            Ok(background) => {
                background.spawn(work);
            }
            Err(error) => {
                tracing::error!(target: "fencelock", error = format_args!("{error:#}"), "a task of a lock client is lost with its runtime")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use tokio::runtime::{Builder, Runtime};

    use super::*;

    const HANG_LIMIT: Duration = Duration::from_secs(60);

    fn runtime() -> Runtime {
        Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap()
    }

    fn thread_of(executor: &Executor) -> Option<String> {
        let (tell, told) = mpsc::channel();
        let task = async move {
            // Shows that timers work, too.
            tokio::time::sleep(Duration::from_millis(1)).await;
            let _ = tell.send(std::thread::current().name().map(str::to_owned));
        };
        executor.spawn(Box::pin(task)).unwrap();
        told.recv_timeout(HANG_LIMIT).unwrap()
    }

    #[test]
    fn tasks_run_on_the_background_thread_once_the_chosen_runtime_has_ended() {
        let own = runtime();
        let executor = Executor::new(Some(own.handle().clone()));
        let idle = executor.clone();
        assert_ne!(thread_of(&executor).as_deref(), Some("fencelock"));
        assert!(executor.is_on_chosen_runtime());
        drop(own);
        assert_eq!(thread_of(&executor).as_deref(), Some("fencelock"));
        assert!(!idle.is_on_chosen_runtime(), "a clone knows it, too");
    }

    #[test]
    fn an_executor_that_was_first_used_after_the_end_works() {
        let own = runtime();
        let executor = Executor::new(Some(own.handle().clone()));
        drop(own);
        assert_eq!(thread_of(&executor).as_deref(), Some("fencelock"));
    }

    #[test]
    fn tasks_that_were_not_begun_are_moved_and_begun_ones_are_dropped() {
        let own = Builder::new_current_thread().enable_all().build().unwrap();
        let executor = Executor::new(Some(own.handle().clone()));
        let (tell, told) = mpsc::channel();
        let begun = tell.clone();
        let endless = async move {
            let _begun = begun;
            std::future::pending::<()>().await;
        };
        executor.spawn(Box::pin(endless)).unwrap();
        own.block_on(tokio::task::yield_now());
        // Nobody drives the runtime any more.
        executor
            .spawn(Box::pin(async move {
                let _ = tell.send("moved");
            }))
            .unwrap();
        drop(own);
        assert_eq!(told.recv_timeout(HANG_LIMIT), Ok("moved"));
        assert_eq!(
            told.recv_timeout(HANG_LIMIT),
            Err(mpsc::RecvTimeoutError::Disconnected),
            "both senders are dropped"
        );
    }

    #[test]
    fn a_task_that_panics_is_an_error_and_says_nothing_of_the_runtime() {
        let own = runtime();
        let executor = Executor::new(Some(own.handle().clone()));
        let ran = own.block_on(executor.run("a test", async { panic!("on purpose") }));
        let error: LockError = ran.map(|()| "it ran").unwrap_err();
        assert!(error.to_string().contains("panicked"), "{error}");
        assert!(executor.is_on_chosen_runtime());
    }
}
