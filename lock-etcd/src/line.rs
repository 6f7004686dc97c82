//! A connection that is made again when it breaks, to whichever endpoint answers.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use lock_core::LockError;
use lock_transport::{Connect, Reconnecting};
use tokio::runtime::Handle;
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::failure;
use crate::link::Link;
use crate::patience::Patience;
use crate::session::Settings;

/// How long an endpoint may keep the next one from being tried as well.
const HEAD_START: Duration = Duration::from_millis(250);

/// The members, one of which is connected to at a time.
pub(crate) struct Members {
    settings: Arc<Settings>,
    patience: Patience,
    /// The endpoint to begin with.
    next: AtomicUsize,
}

pub(crate) type Line = Reconnecting<Members>;

/// Starts without a connection; the first request makes one.
pub(crate) fn line(settings: &Arc<Settings>, patience: Patience) -> Line {
    let members = Members {
        settings: Arc::clone(settings),
        patience,
        next: AtomicUsize::new(0),
    };
    Reconnecting::new(members, settings.executor.clone(), settings.op_timeout)
}

impl Connect for Members {
    type Connection = Link;

    async fn connect(&self, runtime: Handle) -> Result<Link, LockError> {
        open_any(&self.settings, &self.patience, &self.next, runtime).await
    }

    fn is_broken(link: &Link) -> bool {
        link.is_broken()
    }

    fn close(link: &Link) {
        link.close();
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
