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

    /// Whether the connection is of no more use.
    fn is_broken(connection: &Self::Connection) -> bool;

    /// Closes it, also if others still have it.
    fn close(connection: &Self::Connection);
}

/// A connection that is made again when it breaks. Clones share it.
#[derive(Debug)]
pub struct Reconnecting<C: Connect> {
    connect: Arc<C>,
    executor: Executor,
    op_timeout: Duration,
    rest: Duration,
    state: Arc<Mutex<State<C::Connection>>>,
}

#[derive(Debug)]
enum State<T> {
    Idle,
    /// The result for all callers that want a connection meanwhile.
    Opening(watch::Receiver<Option<Opened<T>>>),
    Open(Arc<T>),
    /// Until then this is the result of the last attempt.
    Failed(LockError, Instant),
    Closed,
}

type Opened<T> = Result<Arc<T>, LockError>;

impl<C: Connect> Reconnecting<C> {
    /// Starts without a connection; the first [`get`](Self::get) makes one, within `op_timeout`.
    pub fn new(connect: C, executor: Executor, op_timeout: Duration) -> Self {
        Self {
            connect: Arc::new(connect),
            executor,
            op_timeout,
            rest: Duration::ZERO,
            state: Arc::new(Mutex::new(State::Idle)),
        }
    }

    /// After an attempt that failed, makes no other one for that long, and returns the same error.
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
        let mut opening = {
            let mut state = self.lock();
            match &*state {
                State::Closed => return Err(LockError::closed()),
                State::Open(open) if !C::is_broken(open) => return Ok(Arc::clone(open)),
                State::Failed(error, until) if Instant::now() < *until => return Err(error.clone()),
                State::Opening(opening) if opening.has_changed().is_ok() => opening.clone(),
                // None yet, a broken one, or an attempt whose task was dropped.
                _ => {
                    let opening = self.open()?;
                    *state = State::Opening(opening.clone());
                    opening
                }
            }
        };
        let opened = opening.wait_for(Option::is_some).await;
        match opened.ok().and_then(|opened| opened.clone()) {
            Some(opened) => opened,
            None if self.is_closed() => Err(LockError::closed()),
            None => Err(self.executor.dropped("connecting")),
        }
    }

    /// Connects on the runtime where the connection will be worked.
    fn open(&self) -> Result<watch::Receiver<Option<Opened<C::Connection>>>, LockError> {
        let (sender, receiver) = watch::channel(None);
        let (connect, state) = (Arc::clone(&self.connect), Arc::downgrade(&self.state));
        let (limit, rest) = (self.op_timeout, self.rest);
        self.executor.spawn(async move {
            let opened = within(limit, "connecting", connect.connect(Handle::current())).await;
            let opened = opened.map(Arc::new).map_err(LockError::unsent);
            // If no clone is left, or it was closed meanwhile, the connection is dropped, which closes it.
            let Some(state) = state.upgrade() else { return };
            let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
            if !matches!(*state, State::Closed) {
                *state = match &opened {
                    Ok(open) => State::Open(Arc::clone(open)),
                    Err(_) if rest.is_zero() => State::Idle,
                    Err(error) => State::Failed(error.clone(), Instant::now() + rest),
                };
                let _ = sender.send(Some(opened));
            }
        })?;
        Ok(receiver)
    }

    /// Returns the connection if there is one; none is made.
    #[must_use]
    pub fn current(&self) -> Option<Arc<C::Connection>> {
        match &*self.lock() {
            State::Open(open) if !C::is_broken(open) => Some(Arc::clone(open)),
            _ => None,
        }
    }

    /// Closes the connection. No other one is made.
    pub fn close(&self) {
        let state = std::mem::replace(&mut *self.lock(), State::Closed);
        if let State::Open(open) = state {
            C::close(&open);
        }
    }

    /// Whether it was closed for good.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        matches!(*self.lock(), State::Closed)
    }

    fn lock(&self) -> MutexGuard<'_, State<C::Connection>> {
        // Nothing here panics while holding the mutex.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<C: Connect> Clone for Reconnecting<C> {
    fn clone(&self) -> Self {
        Self {
            connect: Arc::clone(&self.connect),
            executor: self.executor.clone(),
            op_timeout: self.op_timeout,
            rest: self.rest,
            state: Arc::clone(&self.state),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

    use super::*;

    #[derive(Default)]
    struct Server {
        attempts: Arc<AtomicU32>,
        refuses: Arc<AtomicBool>,
    }

    /// Its number, and whether it is broken.
    struct Numbered(u32, AtomicBool);

    impl Connect for Server {
        type Connection = Numbered;

        async fn connect(&self, _: Handle) -> Result<Numbered, LockError> {
            let number = self.attempts.fetch_add(1, Ordering::Relaxed);
            tokio::time::sleep(Duration::from_secs(1)).await;
            match self.refuses.load(Ordering::Relaxed) {
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

    fn reconnecting(op_timeout: u64) -> (Reconnecting<Server>, Arc<AtomicBool>) {
        let server = Server::default();
        let refuses = Arc::clone(&server.refuses);
        let executor = Executor::new(Some(Handle::current()));
        (
            Reconnecting::new(server, executor, Duration::from_secs(op_timeout)),
            refuses,
        )
    }

    #[tokio::test(start_paused = true)]
    async fn callers_share_a_connection_until_it_breaks_or_is_closed() {
        let (line, _) = reconnecting(5);
        assert!(line.current().is_none());
        let clone = line.clone();
        let (one, other) = tokio::join!(line.get(), clone.get());
        assert_eq!((one.as_ref().unwrap().0, other.unwrap().0), (0, 0));
        Server::close(&one.unwrap());
        assert!(line.current().is_none());
        let next = line.get().await.unwrap();
        assert_eq!((next.0, line.current().unwrap().0), (1, 1));
        line.close();
        assert!(Server::is_broken(&next) && line.is_closed());
        assert!(matches!(line.get().await, Err(LockError::Closed { .. })));
    }

    #[tokio::test(start_paused = true)]
    async fn a_failed_attempt_is_the_answer_for_its_rest_and_sent_nothing() {
        let (line, refuses) = reconnecting(5);
        refuses.store(true, Ordering::Relaxed);
        let error = |opened: Result<_, LockError>| opened.err().map(|error| (error.is_unsent(), error.to_string()));
        assert!(error(line.get().await).unwrap().1.contains("attempt 0"));
        assert!(error(line.get().await).unwrap().1.contains("attempt 1"));
        let line = line.with_rest(Duration::from_secs(3));
        for _ in 0..2 {
            let (unsent, said) = error(line.get().await).unwrap();
            assert!(unsent && said.contains("attempt 2"), "{said}");
        }
        tokio::time::sleep(Duration::from_secs(3)).await;
        refuses.store(false, Ordering::Relaxed);
        assert_eq!(line.get().await.unwrap().0, 3);
    }

    #[tokio::test(start_paused = true)]
    async fn an_attempt_is_limited_and_outlives_its_caller() {
        let (line, _) = reconnecting(5);
        let limit = Duration::from_millis(100);
        assert!(tokio::time::timeout(limit, line.get()).await.is_err());
        assert_eq!(line.get().await.unwrap().0, 0);
        let (slow, _) = reconnecting(0);
        assert!(slow.get().await.err().unwrap().to_string().contains("no answer"));
        let closed = line.clone();
        Server::close(&line.current().unwrap());
        let (opened, ()) = tokio::join!(line.get(), async { closed.close() });
        assert!(matches!(opened, Err(LockError::Closed { .. })));
    }
}
