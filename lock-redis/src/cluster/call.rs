//! Requests about a name, to the node that serves it.

use std::sync::Arc;
use std::time::Duration;

use lock_core::{LockError, LockName};
use redis::{ErrorKind, ServerErrorKind};
use tokio::time::{sleep, timeout};

use super::redirect::Redirect;
use super::slots::{Endpoint, slot};
use super::topology::Topology;
use crate::failure::Failure;
use crate::session::Session;

/// Before a request is sent again, at first and at most.
const FIRST_PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_millis(100);

/// After how long without an answer a request looks whether another node serves the slot by now.
pub(super) const SILENCE: Duration = Duration::from_secs(1);

/// How much sooner than `op_timeout` a request is given up, at most.
const SOONER: Duration = Duration::from_millis(250);

/// One of the times that a request is sent.
pub(super) struct Try {
    pub(super) session: Arc<Session>,
    /// Whether it has been sent before and may have been carried out.
    pub(super) lost: bool,
}

impl Topology {
    /// The slot of a name.
    pub(super) fn slot(&self, name: &LockName) -> u16 {
        slot(&self.keys().lock(name))
    }

    /// Sends a request about a slot until the node that serves it has answered, within the time that one operation may take.
    ///
    /// If it may have been carried out already, it is sent again only if `again`.
    pub(super) async fn call<T, F>(
        self: &Arc<Self>,
        operation: &'static str,
        slot: u16,
        again: bool,
        work: impl Fn(Try) -> F,
    ) -> Result<T, LockError>
    where
        F: Future<Output = Result<T, Failure>>,
    {
        let (limit, mut last) = (self.op_timeout(), None);
        // A little sooner than the caller gives up, so that it gets the reason.
        let soon = limit - (limit / 10).min(SOONER);
        let done = match timeout(soon, self.call_until_answered(operation, slot, again, work, &mut last)).await {
            Ok(done) => done,
            Err(_) => Err(last.unwrap_or_else(|| LockError::no_answer(operation, limit))),
        };
        // An earlier request may have been.
        done.map_err(LockError::maybe_sent)
    }

    /// The same without a limit. `last` is why there is no answer yet.
    async fn call_until_answered<T, F>(
        self: &Arc<Self>,
        operation: &'static str,
        slot: u16,
        again: bool,
        work: impl Fn(Try) -> F,
        last: &mut Option<LockError>,
    ) -> Result<T, LockError>
    where
        F: Future<Output = Result<T, Failure>>,
    {
        let (mut pause, mut lost, mut moving) = (Duration::ZERO, false, None);
        loop {
            let seen = self.refreshes();
            let (endpoint, is_moving) = match (moving.take(), self.owner(slot)) {
                (Some(there), _) => (there, true),
                (None, Some(owner)) => (owner, false),
                (None, None) => {
                    sleep(next(&mut pause)).await;
                    self.find(operation, slot, seen, last).await?;
                    continue;
                }
            };
            let session = self.session(&endpoint, is_moving)?;
            let failure = tokio::select! {
                biased;
                done = work(Try { session, lost }) => match done {
                    Ok(done) => return Ok(done),
                    Err(failure) => failure,
                },
                () = self.until_moved(slot, &endpoint), if !is_moving => Failure::Broken,
            };
            match Redirect::after(&failure, &endpoint) {
                Redirect::Moved(to) => {
                    *last = Some(failure.explain(operation));
                    self.moved(slot, to);
                    self.refresh_soon(seen)?;
                    sleep(next(&mut pause)).await;
                }
                Redirect::Moving(to) => {
                    *last = Some(failure.explain(operation));
                    moving = Some(to);
                }
                Redirect::Again => {
                    *last = Some(failure.explain(operation));
                    sleep(next(&mut pause)).await;
                }
                Redirect::Lost if !again => return Err(failure.explain(operation)),
                redirect @ (Redirect::Lost | Redirect::Refused) => {
                    lost |= redirect == Redirect::Lost;
                    *last = Some(match is_down(&failure) {
                        true => self.not_served(operation, slot),
                        false => failure.explain(operation),
                    });
                    sleep(next(&mut pause)).await;
                    self.find(operation, slot, seen, last).await?;
                }
                Redirect::Fail => {
                    // It may have been set up wrong when another one had taken its place.
                    let error = of_node(&endpoint, failure.explain(operation));
                    if self.refresh(seen).await.is_err() || self.owner(slot).as_ref() == Some(&endpoint) {
                        return Err(error);
                    }
                    *last = Some(error);
                }
            }
        }
    }

    /// Finds out which node serves the slot, unless that has been done since `seen`.
    async fn find(
        &self,
        operation: &'static str,
        slot: u16,
        seen: u64,
        last: &mut Option<LockError>,
    ) -> Result<(), LockError> {
        match self.refresh(seen).await {
            Ok(()) if self.owner(slot).is_none() => *last = Some(self.not_served(operation, slot)),
            Ok(()) => {}
            Err(error) if error.is_retryable() => *last = Some(error),
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Reads the slots anew, beside other requests.
    fn refresh_soon(self: &Arc<Self>, seen: u64) -> Result<(), LockError> {
        let topology = Arc::clone(self);
        self.executor().spawn(Box::pin(async move {
            if let Err(error) = topology.refresh(seen).await {
                tracing::debug!(target: "fencelock", "the slots of the Redis Cluster could not be read: {error}");
            }
        }))
    }

    /// Ends once another node serves the slot. Looks for that after a silence, because a node that is cut off does not say so.
    async fn until_moved(&self, slot: u16, endpoint: &Endpoint) {
        loop {
            sleep(SILENCE).await;
            // If it fails there is no other node to ask.
            let _ = self.refresh(self.refreshes()).await;
            if self.owner(slot).as_ref() != Some(endpoint) {
                return;
            }
        }
    }
}

/// How long to wait now: not at all the first time, and longer each time after that.
fn next(pause: &mut Duration) -> Duration {
    let now = *pause;
    *pause = (now * 2).clamp(FIRST_PAUSE, LONGEST_PAUSE);
    now
}

/// Adds to an error that someone has to mend which node it is about.
fn of_node(endpoint: &Endpoint, error: LockError) -> LockError {
    let LockError::Configuration { message, source, .. } = error else {
        return error;
    };
    let error = LockError::configuration(format!("{message}. This is node {endpoint}"));
    match source {
        Some(source) => error.with_source(source),
        None => error,
    }
}

fn is_down(failure: &Failure) -> bool {
    let down = ErrorKind::Server(ServerErrorKind::ClusterDown);
    matches!(failure, Failure::Redis(error) if error.kind() == down)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_up_to_a_limit() {
        let mut pause = Duration::ZERO;
        let pauses: Vec<_> = (0..8).map(|_| next(&mut pause).as_millis()).collect();
        assert_eq!(pauses, [0, 5, 10, 20, 40, 80, 100, 100]);
    }
}
