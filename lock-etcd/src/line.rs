//! A connection that is made again when it breaks, to whichever endpoint answers.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lock_core::LockError;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::failure::{self, Failure};
use crate::link::Link;
use crate::patience::Patience;
use crate::session::Settings;

/// How long an endpoint may keep the next one from being tried as well.
const HEAD_START: Duration = Duration::from_millis(250);

/// The way to the cluster, through as many connections as it takes, one at a time.
pub(crate) struct Line {
    settings: Arc<Settings>,
    patience: Patience,
    state: Arc<Mutex<State>>,
    /// The endpoint to begin with.
    next: Arc<AtomicUsize>,
}

enum State {
    Idle,
    /// The answer to whoever wants a connection meanwhile.
    Opening(watch::Receiver<Option<Opened>>),
    Open(Arc<Link>),
    Closed,
}

type Opened = Result<Arc<Link>, LockError>;

impl Line {
    /// Starts without a connection; the first request makes one.
    pub(crate) fn new(settings: Arc<Settings>, patience: Patience) -> Self {
        Self {
            settings,
            patience,
            state: Arc::new(Mutex::new(State::Idle)),
            next: Arc::default(),
        }
    }

    /// The connection; if there is none, or it is broken, a new one. Whoever asks meanwhile gets the same.
    pub(crate) async fn link(&self) -> Result<Arc<Link>, Failure> {
        let mut opening = {
            let mut state = self.lock();
            match &*state {
                State::Closed => return Err(LockError::closed().into()),
                State::Open(link) if !link.is_broken() => return Ok(Arc::clone(link)),
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
        let patience = self.patience.clone();
        let next = Arc::clone(&self.next);
        let state = Arc::downgrade(&self.state);
        let executor = self.settings.executor.clone();
        executor.spawn(Box::pin(async move {
            let limit = settings.op_timeout;
            let opened = match timeout(limit, open_any(&settings, &patience, &next, Handle::current())).await {
                Ok(Ok(link)) => Ok(Arc::new(link)),
                Ok(Err(error)) => Err(error.unsent()),
                Err(_) => Err(LockError::no_answer("connecting", limit).unsent()),
            };
            // Nobody is left, or the client was closed meanwhile: the link is dropped, and that closes it.
            let Some(state) = state.upgrade() else { return };
            let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
            if !matches!(*state, State::Closed) {
                *state = match &opened {
                    Ok(link) => State::Open(Arc::clone(link)),
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

/// Tries the endpoints, each a moment after the one before it, and takes the first that can be used. The next time the one
/// after it comes first.
///
/// While one of them is silent, those that failed are tried again: when the leader stops, the others can be used a moment later.
async fn open_any(
    settings: &Arc<Settings>,
    patience: &Patience,
    next: &AtomicUsize,
    runtime: Handle,
) -> Result<Link, LockError> {
    let hosts = settings.hosts.len();
    let first = next.load(Ordering::Relaxed);
    let mut waiting: VecDeque<_> = (0..hosts).map(|turn| (first + turn) % hosts).collect();
    let mut tries = JoinSet::new();
    let mut failures: Vec<Option<LockError>> = (0..hosts).map(|_| None).collect();
    let mut at_once = true;
    loop {
        if at_once && let Some(at) = waiting.pop_front() {
            let (settings, patience, runtime) = (Arc::clone(settings), patience.clone(), runtime.clone());
            tries.spawn(async move {
                let opened = Link::open(&settings, &settings.hosts[at], patience, runtime);
                (at, opened.await)
            });
        }
        let is_one_waiting = !waiting.is_empty();
        tokio::select! {
            ended = tries.join_next() => match ended {
                Some(Ok((at, Ok(link)))) => {
                    next.store(at + 1, Ordering::Relaxed);
                    return Ok(link);
                }
                Some(Ok((at, Err(failure)))) => {
                    let failure = failure.explain("connecting");
                    let again = failure.is_retryable();
                    // Those that come for the first time do so now.
                    at_once = failures.iter().enumerate().any(|(at, failed)| failed.is_none() && waiting.contains(&at));
                    failures[at] = Some(failure);
                    if tries.is_empty() && !at_once {
                        return Err(failure::no_endpoint(failures.into_iter().flatten().collect()));
                    }
                    if again {
                        waiting.push_back(at);
                    }
                }
                Some(Err(_)) => return Err(failure::unavailable("connecting", "the runtime that worked on it ended")),
                None => return Err(failure::no_endpoint(failures.into_iter().flatten().collect())),
            },
            () = sleep(HEAD_START), if is_one_waiting => at_once = true,
        }
    }
}
