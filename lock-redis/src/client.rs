//! What all clones of a client share.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use lock_core::{Claim, Clock, Holder, LockError, LockName, OwnerId, Released, Stamp};
use tokio::time::{sleep, timeout};

use crate::connection::{Connection, Feed};
use crate::error::Failure;
use crate::router::{Next, Router};
use crate::settings::Settings;
use crate::subscriptions::Subscriptions;

/// Before a request is sent again, at first and at most.
const FIRST_PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_millis(100);

/// How much sooner than `op_timeout` a request is given up, at most.
const SOONER: Duration = Duration::from_millis(250);

const LISTING: &str = "listing locks";

/// How the servers know a client.
#[derive(Clone)]
pub(crate) struct Identity {
    pub(crate) clock: Clock,
    began: Stamp,
    /// Names this client on the server.
    client: String,
    pub(crate) subscriptions: Subscriptions,
}

impl Identity {
    /// A new client.
    pub(crate) fn new() -> Self {
        let clock = Clock::system();
        Self {
            began: clock.now(),
            clock,
            client: OwnerId::random().to_string(),
            subscriptions: Subscriptions::default(),
        }
    }

    /// What connections of this client are subscribed to.
    pub(crate) fn feed(&self, settings: &Settings) -> Feed {
        Feed {
            channel: format!("{}{}", settings.keys.channels(), self.client),
            subscriptions: self.subscriptions.clone(),
        }
    }
}

/// What all clones of a client share.
pub(crate) struct Client {
    settings: Arc<Settings>,
    identity: Identity,
    /// How the channels of all clients of the namespace begin.
    channels: String,
    router: Box<dyn Router>,
}

impl Client {
    pub(crate) fn new(settings: Arc<Settings>, identity: Identity, router: impl Router + 'static) -> Self {
        Self {
            channels: settings.keys.channels(),
            settings,
            identity,
            router: Box::new(router),
        }
    }

    pub(crate) fn settings(&self) -> &Settings {
        &self.settings
    }

    pub(crate) fn clock(&self) -> &Clock {
        &self.identity.clock
    }

    pub(crate) fn router(&self) -> &dyn Router {
        &*self.router
    }

    /// What this client is called at the server that `connection` leads to: the end of the channel that it is subscribed to there.
    pub(crate) fn client_at(&self, connection: &Connection) -> Cow<'_, str> {
        let client = &self.identity.client;
        match self.settings.is_cluster() {
            true => format!("{client}/{}", connection.run_id()).into(),
            false => client.into(),
        }
    }

    pub(crate) fn channels(&self) -> &str {
        &self.channels
    }

    pub(crate) fn subscriptions(&self) -> &Subscriptions {
        &self.identity.subscriptions
    }

    /// Microseconds since the client began: what a stamp is called on the server.
    pub(crate) fn micros(&self, stamp: Stamp) -> u64 {
        u64::try_from(stamp.since(self.identity.began).as_micros()).unwrap_or(u64::MAX)
    }

    /// The stamp that is called so on the server.
    pub(crate) fn stamp(&self, micros: u64) -> Stamp {
        self.identity.began + Duration::from_micros(micros)
    }

    /// Makes the first connection.
    pub(crate) async fn connect(&self) -> Result<(), LockError> {
        self.limited("connecting", async { self.router.all().await.map(drop) })
            .await
    }

    /// Does `work` within the time that one operation may take.
    pub(crate) async fn limited<T>(
        &self,
        operation: &'static str,
        work: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, LockError> {
        let limit = self.settings.op_timeout;
        match timeout(limit, work).await {
            Ok(done) => done.map_err(|failure| failure.explain(operation)),
            Err(_) => Err(LockError::no_answer(operation, limit)),
        }
    }

    /// Sends a request about a name until its server has answered, within the time that one operation may take.
    ///
    /// The second argument of `work` says whether the request has been sent before and may have been carried out.
    pub(crate) async fn call<T, F>(
        &self,
        operation: &'static str,
        name: &LockName,
        work: impl Fn(Connection, bool) -> F,
    ) -> Result<T, LockError>
    where
        F: Future<Output = Result<T, Failure>>,
    {
        let limit = self.settings.op_timeout;
        let mut progress = Progress::default();
        // A little sooner than the caller gives up, so that it gets the reason.
        let soon = limit - (limit / 10).min(SOONER);
        match timeout(soon, self.call_until_answered(operation, name, work, &mut progress)).await {
            Ok(done) => done,
            Err(_) => {
                let why = progress.last.take().or_else(|| self.router.trouble());
                Err(progress.mark(why.unwrap_or_else(|| LockError::no_answer(operation, limit))))
            }
        }
    }

    /// The same without a limit.
    async fn call_until_answered<T, F>(
        &self,
        operation: &'static str,
        name: &LockName,
        work: impl Fn(Connection, bool) -> F,
        progress: &mut Progress,
    ) -> Result<T, LockError>
    where
        F: Future<Output = Result<T, Failure>>,
    {
        let (mut pause, mut asking) = (Duration::ZERO, None);
        loop {
            let is_asking = asking.is_some();
            let connection = match asking.take() {
                Some(connection) => Ok(connection),
                None => self.router.connection(name).await,
            };
            let (failure, at) = match connection {
                Err(failure) => (failure, None),
                Ok(connection) => {
                    let resent = progress.may_be_done;
                    // Until it is answered.
                    progress.may_be_done = true;
                    let failure = tokio::select! {
                        biased;
                        done = work(connection.clone(), resent) => match done {
                            Ok(done) => return Ok(done),
                            Err(failure) => failure,
                        },
                        () = self.router.moved(name, &connection), if !is_asking => Failure::Broken,
                    };
                    progress.may_be_done = resent || failure.is_lost_connection();
                    (failure, Some(connection))
                }
            };
            match self.router.failed(operation, name, at.as_ref(), failure).await {
                Next::Ask(connection) => asking = Some(connection),
                Next::Fail(error) => return Err(progress.mark(error)),
                Next::Retry(error) => {
                    progress.last = Some(error);
                    sleep(next(&mut pause)).await;
                }
            }
        }
    }

    /// Releases the claim, and leaves the name reserved for `keep` from now on.
    pub(crate) async fn release(
        &self,
        operation: &'static str,
        claim: &Claim,
        keep: Option<Duration>,
    ) -> Result<Released, LockError> {
        // Whatever becomes of the request: nothing is kept here of a claim whose release never succeeds.
        self.subscriptions().forget(claim.owner());
        self.call(operation, claim.name(), |connection, resent| async move {
            match self.release_on(&connection, claim, keep).await? {
                Released::NotHeld if resent => Err(Failure::PerhapsReleased),
                released => Ok(released),
            }
        })
        .await
    }

    pub(crate) async fn holders(&self, name: &LockName) -> Result<Vec<Holder>, LockError> {
        self.call("asking who holds a lock", name, |connection, _| async move {
            let holders = self.holders_on(&connection, std::slice::from_ref(name)).await?;
            holders.into_iter().next().unwrap_or(Err(Failure::Nonsense))
        })
        .await
    }

    /// Lists everything that is held under names that start with `prefix`. Each page has the time that one operation may take.
    pub(crate) async fn list(&self, prefix: &str) -> Result<Vec<Holder>, LockError> {
        let mut found = match self.list_all(prefix).await {
            // A server may have left the cluster meanwhile.
            Err(LockError::Closed { .. }) if !self.router.is_closed() => self.list_all(prefix).await,
            found => found,
        }?;
        if let Some(message) = self.unserved() {
            return Err(LockError::unavailable(
                LISTING,
                format!("the list would not be complete: {message}"),
            ));
        }
        let mut holders = Vec::new();
        while let Some((name, found)) = found.pop_first() {
            match found {
                Ok(found) => holders.extend(found),
                Err(failure @ Failure::Foreign(_)) => {
                    tracing::warn!(target: "fencelock", "left out of the list: {}", failure.explain(LISTING));
                }
                // Its slot is being moved.
                Err(Failure::Redis(_)) if self.settings.is_cluster() => holders.extend(self.holders(&name).await?),
                Err(failure) => return Err(failure.explain(LISTING)),
            }
        }
        Ok(holders)
    }

    async fn list_all(&self, prefix: &str) -> Result<BTreeMap<LockName, Result<Vec<Holder>, Failure>>, LockError> {
        let pattern = self.settings.keys.pattern(prefix);
        let mut holders = BTreeMap::new();
        // A cursor means nothing to another server, so all pages of one come over one connection.
        for connection in self.limited(LISTING, self.router.all()).await? {
            let mut cursor = "0".to_owned();
            loop {
                let page = self.list_page_on(&connection, &pattern, &cursor, &mut holders);
                cursor = self.limited(LISTING, page).await?;
                if cursor == "0" {
                    break;
                }
            }
        }
        Ok(holders)
    }

    /// What to say of the slots of a cluster that no node serves.
    pub(crate) fn unserved(&self) -> Option<String> {
        match self.router.unserved() {
            0 => None,
            slots => Some(format!(
                "{slots} of 16384 slots have no node. Look at CLUSTER SHARDS, and assign them"
            )),
        }
    }

    /// Releases what the client holds, and closes all connections for good. Without a connection, one is made for it.
    pub(crate) async fn close(&self) -> Result<(), LockError> {
        // Also if this is dropped.
        let _closing = Closing(self);
        let now = self.clock().now();
        let held = self.subscriptions().holding().into_iter();
        let releasing = held.map(|(claim, reserved_until)| async move {
            let rest = reserved_until.map(|until| until.since(now));
            self.release("close", &claim, rest.filter(|rest| !rest.is_zero())).await
        });
        let released = join_all(releasing).await;
        released.into_iter().try_for_each(|released| released.map(drop))
    }
}

/// What became of a request so far.
#[derive(Default)]
struct Progress {
    /// Whether a server may have carried it out although there is no answer.
    may_be_done: bool,
    /// Why there is no answer yet.
    last: Option<LockError>,
}

impl Progress {
    /// The error as the caller gets it: not as one of a request that was never sent, if one was.
    fn mark(&self, error: LockError) -> LockError {
        match self.may_be_done {
            true => error.maybe_sent(),
            false => error,
        }
    }
}

/// Closes all connections when it is dropped.
struct Closing<'a>(&'a Client);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        self.0.router.close();
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client")
            .field("settings", &self.settings)
            .field("client", &self.identity.client)
            .finish_non_exhaustive()
    }
}

/// How long to wait now: not at all the first time, and longer each time after that.
fn next(pause: &mut Duration) -> Duration {
    let now = *pause;
    *pause = (now * 2).clamp(FIRST_PAUSE, LONGEST_PAUSE);
    now
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
