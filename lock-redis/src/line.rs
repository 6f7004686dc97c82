//! A connection that is made again when it breaks.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use lock_core::LockError;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::time::timeout;

use crate::failure::Failure;
use crate::feed::Feed;
use crate::link::{self, Link};
use crate::session::Settings;

/// The way to the server, through as many connections as it takes, one at a time. Each is subscribed to the same. Clones share them.
#[derive(Clone)]
pub(crate) struct Line {
    settings: Arc<Settings>,
    feed: Feed,
    /// Whether the client has found a primary before.
    was_primary: Arc<AtomicBool>,
    state: Arc<Mutex<State>>,
}

enum State {
    Idle,
    /// The answer to whoever wants a connection meanwhile.
    Opening(watch::Receiver<Option<Opened>>),
    Open(Arc<Link>),
    /// Until then no other attempt is made.
    Failed(LockError, Instant),
    Closed,
}

/// How long a node of several is not tried again after it could not be reached. The majority goes on without it, and an attempt with
/// each request makes lock + release slower for as long as the node is down.
const REST: Duration = Duration::from_millis(50);

type Opened = Result<Arc<Link>, LockError>;

impl Line {
    /// Starts without a connection; the first request makes one.
    pub(crate) fn new(settings: Arc<Settings>, feed: Feed, was_primary: Arc<AtomicBool>) -> Self {
        Self {
            settings,
            feed,
            was_primary,
            state: Arc::new(Mutex::new(State::Idle)),
        }
    }

    /// The connection; if there is none, or it is broken, a new one. Whoever asks meanwhile gets the same.
    pub(crate) async fn link(&self) -> Result<Arc<Link>, Failure> {
        let mut opening = {
            let mut state = self.lock();
            match &*state {
                State::Closed => return Err(LockError::closed().into()),
                State::Open(link) if !link.is_broken() => return Ok(Arc::clone(link)),
                State::Failed(error, until) if Instant::now() < *until => return Err(error.clone().into()),
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
            Some(Ok(link)) => Ok(link),
            Some(Err(error)) => Err(error.into()),
            None if self.is_closed() => Err(LockError::closed().into()),
            None => Err(self.settings.executor.dropped("connecting").into()),
        }
    }

    /// Opens a connection on the runtime where it will be worked, whatever becomes of the caller.
    fn open(&self) -> Result<watch::Receiver<Option<Opened>>, LockError> {
        let (tell, told) = watch::channel(None);
        let settings = Arc::clone(&self.settings);
        let feed = self.feed.clone();
        let was_primary = Arc::clone(&self.was_primary);
        let state = Arc::downgrade(&self.state);
        let executor = self.settings.executor.clone();
        executor.spawn(Box::pin(async move {
            let limit = settings.op_timeout;
            let rests = settings.node.is_some();
            let opening = Link::open(&settings, feed, &was_primary, Handle::current());
            let opened = timeout(limit, opening).await;
            let opened = match opened {
                Ok(Ok(link)) => Ok(Arc::new(link)),
                Ok(Err(failure)) => Err(failure.explain("connecting").unsent()),
                Err(_) => Err(link::no_connection(limit).unsent()),
            };
            // Nobody is left, or the client was closed meanwhile: the link is dropped, and that closes it.
            let Some(state) = state.upgrade() else { return };
            let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
            if !matches!(*state, State::Closed) {
                *state = match &opened {
                    Ok(link) => State::Open(Arc::clone(link)),
                    Err(error) if rests => State::Failed(error.clone(), Instant::now() + REST),
                    Err(_) => State::Idle,
                };
                let _ = tell.send(Some(opened));
            }
        }))?;
        Ok(told)
    }

    /// The connection that there is.
    pub(crate) fn current(&self) -> Option<Arc<Link>> {
        match &*self.lock() {
            State::Open(link) if !link.is_broken() => Some(Arc::clone(link)),
            _ => None,
        }
    }

    /// Ends it for good.
    pub(crate) fn close(&self) {
        let state = std::mem::replace(&mut *self.lock(), State::Closed);
        if let State::Open(link) = state {
            link.close();
        }
    }

    pub(crate) fn is_closed(&self) -> bool {
        matches!(*self.lock(), State::Closed)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing here panics while holding the mutex.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
