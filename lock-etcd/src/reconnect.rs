//! A connection that is made again when it breaks, to whichever endpoint answers.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use lock_core::LockError;
use lock_transport::Connect;
use tokio::runtime::Handle;
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::connection::Connection;
use crate::error;
use crate::registry::Registry;
use crate::settings::Settings;

/// How long an endpoint may keep the next one from being tried as well.
const HEAD_START: Duration = Duration::from_millis(250);

/// One connection at a time, to one of the endpoints.
pub(crate) type Reconnecting = lock_transport::Reconnecting<Members>;

pub(crate) struct Members {
    settings: Arc<Settings>,
    registry: Arc<Registry>,
    /// The endpoint to begin with.
    next: AtomicUsize,
}

/// Starts without a connection; the first request makes one.
pub(crate) fn reconnecting(settings: &Arc<Settings>, registry: &Arc<Registry>) -> Reconnecting {
    let members = Members {
        settings: Arc::clone(settings),
        registry: Arc::clone(registry),
        next: AtomicUsize::new(0),
    };
    Reconnecting::new(members, settings.executor.clone(), settings.op_timeout)
}

impl Connect for Members {
    type Connection = Connection;

    async fn connect(&self, runtime: Handle) -> Result<Connection, LockError> {
        self.open_any(runtime).await
    }

    fn is_broken(connection: &Connection) -> bool {
        connection.is_broken()
    }

    fn close(connection: &Connection) {
        connection.close();
    }
}

impl Members {
    /// Tries the endpoints, each a moment after the one before it, and takes the first that can be used. The next time the one after it comes
    /// first.
    ///
    /// While one of them is silent, those that failed are tried again: when the leader stops, the others can be used a moment later.
    async fn open_any(&self, runtime: Handle) -> Result<Connection, LockError> {
        let hosts = self.settings.hosts.len();
        let first = self.next.load(Ordering::Relaxed);
        let mut waiting: VecDeque<_> = (0..hosts).map(|turn| (first + turn) % hosts).collect();
        let mut tries = JoinSet::new();
        let mut failures: Vec<Option<LockError>> = (0..hosts).map(|_| None).collect();
        let mut at_once = true;
        loop {
            if at_once && let Some(at) = waiting.pop_front() {
                let (settings, registry) = (Arc::clone(&self.settings), Arc::clone(&self.registry));
                let runtime = runtime.clone();
                tries.spawn(async move { (at, Connection::open(settings, at, registry, runtime).await) });
            }
            let is_one_waiting = !waiting.is_empty();
            tokio::select! {
                ended = tries.join_next() => match ended {
                    Some(Ok((at, Ok(connection)))) => {
                        self.next.store(at + 1, Ordering::Relaxed);
                        return Ok(connection);
                    }
                    Some(Ok((at, Err(failure)))) => {
                        let failure = failure.explain("connecting");
                        let again = failure.is_retryable();
                        // Those that come for the first time do so now.
                        at_once = failures.iter().enumerate().any(|(at, failed)| failed.is_none() && waiting.contains(&at));
                        failures[at] = Some(failure);
                        if tries.is_empty() && !at_once {
                            return Err(error::no_endpoint(failures.into_iter().flatten().collect()));
                        }
                        if again {
                            waiting.push_back(at);
                        }
                    }
                    Some(Err(_)) => return Err(error::unavailable("connecting", "the runtime that worked on it ended")),
                    None => return Err(error::no_endpoint(failures.into_iter().flatten().collect())),
                },
                () = sleep(HEAD_START), if is_one_waiting => at_once = true,
            }
        }
    }
}
