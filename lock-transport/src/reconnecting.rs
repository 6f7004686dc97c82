use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lock_core::{Executor, LockError};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::within;

/// How a connection is made.
pub trait Connect: Send + Sync + 'static {
    /// The connection. Dropping it closes it.
    type Connection: Send + Sync + 'static;

    /// Connects. Runs on `runtime`, which also works the connection.
    fn connect(&self, runtime: Handle) -> impl Future<Output = Result<Self::Connection, LockError>> + Send;

    /// Returns whether the connection can no longer be used.
    fn is_broken(connection: &Self::Connection) -> bool;

    /// Closes the connection, also if others still have it.
    fn close(connection: &Self::Connection);
}

/// A connection that is made again when it breaks. Clones share it.
#[derive(Debug)]
pub struct Reconnecting<C: Connect> {
    connect: Arc<C>,
    executor: Executor,
    op_timeout: Duration,
    rest: Duration,
    /// `None` after [`close`](Self::close).
    last: Arc<Mutex<Option<Attempt<C::Connection>>>>,
}

/// The result of the last attempt, and its time. `None` as long as the attempt goes on, and if its task was dropped.
type Attempt<T> = watch::Receiver<Option<(Result<Arc<T>, LockError>, Instant)>>;

impl<C: Connect> Reconnecting<C> {
    /// Starts without a connection; the first [`get`](Self::get) makes one, within `op_timeout`.
    pub fn new(connect: C, executor: Executor, op_timeout: Duration) -> Self {
        let (_, none) = watch::channel(None);
        Self {
            connect: Arc::new(connect),
            executor,
            op_timeout,
            rest: Duration::ZERO,
            last: Arc::new(Mutex::new(Some(none))),
        }
    }

    /// Makes no attempt for that long after one that failed, and returns the same error meanwhile.
    #[must_use]
    pub fn with_rest(mut self, rest: Duration) -> Self {
        self.rest = rest;
        self
    }

    /// Returns the connection; a new one if there is none, or if it is broken. All callers share one attempt, which goes on if this future
    /// is dropped.
    ///
    /// # Errors
    ///
    /// Those of [`Connect::connect`], marked as [`unsent`](LockError::unsent); [`LockError::closed`] after [`close`](Self::close).
    pub async fn get(&self) -> Result<Arc<C::Connection>, LockError> {
        let mut attempt = self.attempt()?;
        let opened = attempt.wait_for(Option::is_some).await;
        match opened.ok().and_then(|opened| opened.clone()) {
            // A connection that came too late is closed when it is dropped.
            _ if self.is_closed() => Err(LockError::closed()),
            Some((opened, _)) => opened,
            None => Err(self.executor.dropped("connecting")),
        }
    }

    /// Returns the attempt that goes on or whose result still counts, or starts another one.
    fn attempt(&self) -> Result<Attempt<C::Connection>, LockError> {
        let mut last = self.lock();
        let last = last.as_mut().ok_or_else(LockError::closed)?;
        let is_over = match &*last.borrow() {
            Some((Ok(open), _)) => C::is_broken(open),
            Some((Err(_), failed_at)) => failed_at.elapsed() >= self.rest,
            // None yet, or an attempt whose task was dropped.
            None => last.has_changed().is_err(),
        };
        if is_over {
            let (sender, attempt) = watch::channel(None);
            let (connect, limit) = (Arc::clone(&self.connect), self.op_timeout);
            self.executor.spawn(async move {
                let opened = within(limit, "connecting", connect.connect(Handle::current())).await;
                let opened = opened.map(Arc::new).map_err(LockError::unsent);
                // If no clone is left, or it was closed meanwhile, the connection is dropped, which closes it.
                let _ = sender.send(Some((opened, Instant::now())));
            })?;
            *last = attempt;
        }
        Ok(last.clone())
    }

    /// Returns the connection if there is one; none is made.
    #[must_use]
    pub fn current(&self) -> Option<Arc<C::Connection>> {
        match &*self.lock().as_ref()?.borrow() {
            Some((Ok(open), _)) if !C::is_broken(open) => Some(Arc::clone(open)),
            _ => None,
        }
    }

    /// Closes the connection for good.
    pub fn close(&self) {
        let last = self.lock().take();
        if let Some(Some((Ok(open), _))) = last.as_ref().map(|last| last.borrow()).as_deref() {
            C::close(open);
        }
    }

    /// Returns whether it was closed for good.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.lock().is_none()
    }

    fn lock(&self) -> MutexGuard<'_, Option<Attempt<C::Connection>>> {
        // Nothing here panics while holding the mutex.
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<C: Connect> Clone for Reconnecting<C> {
    fn clone(&self) -> Self {
        Self {
            connect: Arc::clone(&self.connect),
            executor: self.executor.clone(),
            op_timeout: self.op_timeout,
            rest: self.rest,
            last: Arc::clone(&self.last),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

    use super::*;

    /// A server that takes a second to connect, and fails the first so many attempts.
    struct Server(AtomicU32, u32);

    /// Its number, and whether it is broken.
    struct Numbered(u32, AtomicBool);

    impl Connect for Server {
        type Connection = Numbered;

        async fn connect(&self, _: Handle) -> Result<Numbered, LockError> {
            let number = self.0.fetch_add(1, Ordering::Relaxed);
            tokio::time::sleep(Duration::from_secs(1)).await;
            match number < self.1 {
                true => Err(LockError::unavailable("connecting", format!("attempt {number}"))),
                false => Ok(Numbered(number, AtomicBool::new(false))),
            }
        }

        fn is_broken(connection: &Numbered) -> bool {
            connection.1.load(Ordering::Relaxed)
        }

        fn close(connection: &Numbered) {
            connection.1.store(true, Ordering::Relaxed);
        }
    }

    fn reconnecting(failures: u32, op_timeout: u64) -> Reconnecting<Server> {
        let executor = Executor::new(Some(Handle::current()));
        Reconnecting::new(
            Server(AtomicU32::new(0), failures),
            executor,
            Duration::from_secs(op_timeout),
        )
    }

    #[tokio::test(start_paused = true)]
    async fn callers_share_a_connection_until_it_breaks_or_is_closed() {
        let line = reconnecting(0, 5);
        // The attempt outlives its caller.
        let given_up = tokio::time::timeout(Duration::from_millis(100), line.get()).await;
        assert!(given_up.is_err() && line.current().is_none());
        let clone = line.clone();
        let (one, other) = tokio::join!(line.get(), clone.get());
        assert_eq!((one.as_ref().unwrap().0, other.unwrap().0), (0, 0));
        Server::close(&one.unwrap());
        assert!(line.current().is_none());
        let next = line.get().await.unwrap();
        assert_eq!((next.0, line.current().unwrap().0), (1, 1));
        Server::close(&next);
        let (opened, ()) = tokio::join!(line.get(), async { clone.close() });
        assert!(matches!(opened, Err(LockError::Closed { .. })) && line.is_closed());
        assert!(matches!(line.get().await, Err(LockError::Closed { .. })));
        let line = reconnecting(0, 5);
        let open = line.get().await.unwrap();
        line.close();
        assert!(Server::is_broken(&open));
    }

    #[tokio::test(start_paused = true)]
    async fn a_failed_attempt_is_the_answer_for_its_rest_and_sent_nothing() {
        let line = reconnecting(2, 5);
        let resting = line.clone().with_rest(Duration::from_secs(3));
        for (line, says) in [
            (&line, "attempt 0"),
            (&line, "attempt 1"),
            (&resting, "attempt 1"),
            (&resting, "attempt 1"),
            (&reconnecting(0, 0), "no answer"),
        ] {
            let error = line.get().await.err().unwrap();
            assert!(error.is_unsent() && error.to_string().contains(says), "{error}");
        }
        tokio::time::sleep(Duration::from_secs(3)).await;
        assert_eq!(resting.get().await.unwrap().0, 2);
    }
}
