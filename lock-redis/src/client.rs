//! The client of a server, of the primary that sentinels name, or of a cluster; also that of one of several independent servers.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::{join_all, try_join_all};
use lock_core::{
    Attempt, Capabilities, Claim, DistributedLock, Holder, Lease, LockError, LockName, Released, Renewal, Scope,
    ServerInfo, Wait,
};
use lock_transport::within;
use tokio::time::{sleep, timeout};

use crate::cluster::Cluster;
use crate::commands::{Answer, OnBusy};
use crate::config::Target;
use crate::connection::Connection;
use crate::error::Failure;
use crate::router::{Discovery, Next, Opening, Router, SingleServer};
use crate::sentinel::Sentinels;
use crate::server_check::several;
use crate::settings::Settings;

/// Before a request is sent again, at first and at most.
const FIRST_PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_millis(100);

/// How much sooner than `op_timeout` a request is given up, at most.
const SOONER: Duration = Duration::from_millis(250);

const LISTING: &str = "listing locks";

/// Why the answer to a release that was repeated says nothing.
const PERHAPS_RELEASED: &str = "the connection ended before the answer came, and the lock is not held now: it was released, or was lost before that";

const NOT_REPEATED: &str =
    "the connection ended before the answer came; look at the holder, and try again if it is still the same";

/// What all clones of a client share.
pub(crate) struct Client {
    pub(crate) settings: Arc<Settings>,
    pub(crate) router: Box<dyn Router>,
}

impl Client {
    pub(crate) fn new(settings: Settings) -> Self {
        let settings = Arc::new(settings);
        let discovery = match &settings.config.target {
            Target::Server(place) => Discovery::Fixed(place.clone()),
            Target::Sentinels(service) => {
                Discovery::Sentinels(Arc::new(Sentinels::new(service.clone(), settings.config.op_timeout)))
            }
            Target::Cluster(seeds) => {
                let router = Box::new(Cluster::new(seeds.clone(), Arc::clone(&settings)));
                return Self { settings, router };
            }
        };
        let router = Box::new(SingleServer(Opening::reconnecting(discovery, &settings)));
        Self { settings, router }
    }

    /// Makes the first connection.
    pub(crate) async fn connect(&self) -> Result<(), LockError> {
        self.limited("connecting", async { self.router.all().await.map(drop) })
            .await
    }

    /// Does `work` within the time that one operation may take.
    async fn limited<T>(
        &self,
        operation: &'static str,
        work: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, LockError> {
        let done = within(self.settings.config.op_timeout, operation, work).await;
        done.map_err(|failure| failure.explain(operation))
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
        let limit = self.settings.config.op_timeout;
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
                    // Not at all the first time.
                    sleep(pause).await;
                    pause = (pause * 2).clamp(FIRST_PAUSE, LONGEST_PAUSE);
                }
            }
        }
    }

    pub(crate) async fn renew_claim(&self, claim: &Claim) -> Result<Renewal, LockError> {
        let asking = |connection, _| async move { self.settings.renew(&connection, claim).await };
        self.call("renew", claim.name(), asking).await
    }

    /// Every name of a page after the other, with its holders or what is wrong with its keys.
    async fn list_all(&self, prefix: &str) -> Result<BTreeMap<LockName, Result<Vec<Holder>, Failure>>, LockError> {
        let mut holders = BTreeMap::new();
        // A cursor means nothing to another server, so all pages of one come over one connection.
        for connection in self.limited(LISTING, self.router.all()).await? {
            let mut cursor = "0".to_owned();
            loop {
                let page = self.settings.list_page(&connection, prefix, &cursor, &mut holders);
                cursor = self.limited(LISTING, page).await?;
                if cursor == "0" {
                    break;
                }
            }
        }
        Ok(holders)
    }

    /// What to say of the slots of a cluster that no node serves.
    fn unserved(&self) -> Option<String> {
        match self.router.unserved() {
            0 => None,
            slots => Some(format!(
                "{slots} of 16384 slots have no node. Look at CLUSTER SHARDS, and assign them"
            )),
        }
    }
}

#[async_trait]
impl DistributedLock for Client {
    fn capabilities(&self) -> Capabilities {
        Capabilities::new(Scope::Server)
            .with_op_timeout(self.settings.config.op_timeout)
            .with_fairness()
            .with_inspection()
            .with_reservations()
            .with_shared()
            .with_permits()
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, LockError> {
        let (settings, busy) = (&*self.settings, &OnceLock::new());
        let asking = |connection, resent| async move {
            if busy.get().is_none() {
                // If an earlier request was carried out, the same owner gets the same token.
                match settings.acquire(&connection, claim, OnBusy::Fail).await?.0 {
                    Answer::Busy(waiting) if resent => busy.set(waiting.busy).unwrap_or_default(),
                    Answer::Busy(waiting) => return Ok(waiting.busy.into()),
                    Answer::Granted(grant) => return Ok(Attempt::Granted(grant)),
                }
            }
            // It may be carried out yet. From now on the claim is only released: a release that arrives late would end a grant.
            settings.release(&connection, claim, None).await?;
            Ok(busy.get().cloned().unwrap_or_default().into())
        };
        self.call("acquire", claim.name(), asking).await
    }

    async fn renew(&self, lease: &Lease) -> Result<Renewal, LockError> {
        match lease.claim() {
            Some(claim) => self.renew_claim(claim).await,
            // It is not one of ours.
            None => Ok(Renewal::NotHeld),
        }
    }

    async fn release(&self, claim: &Claim, keep: Option<Duration>) -> Result<Released, LockError> {
        // Whatever becomes of the request: nothing is kept here of a claim whose release never succeeds.
        self.settings.subscriptions.forget(claim.owner());
        let asking = |connection, resent| async move {
            match self.settings.release(&connection, claim, keep).await? {
                Released::NotHeld if resent => Err(Failure::Told(PERHAPS_RELEASED.to_owned())),
                released => Ok(released),
            }
        };
        self.call("release", claim.name(), asking).await
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Attempt, LockError> {
        if wait.is_over(self.settings.clock.now()) {
            return self.try_acquire(claim).await;
        }
        self.wait(claim, wait).await
    }

    async fn reserve(&self, claim: &Claim, length: Duration) -> Result<Renewal, LockError> {
        let settings = &*self.settings;
        // Only by the grant that this client knows: an acquire of the same claim that the network held back until after its release may
        // get another one, which a late reservation must not make last.
        let Some(token) = settings.subscriptions.token(claim.owner()) else {
            return Ok(Renewal::NotHeld);
        };
        let asking = |connection, _| async move { settings.reserve(&connection, claim, token, length).await };
        let renewal = self.call("reservation", claim.name(), asking).await?;
        // One of several nodes does not decide.
        if settings.node.is_none() {
            settings
                .subscriptions
                .reserved(claim.owner(), renewal, settings.clock.now() + length);
        }
        Ok(renewal)
    }

    async fn holders(&self, name: &LockName) -> Result<Vec<Holder>, LockError> {
        let asking = |connection, _| async move {
            let holders = self.settings.holders(&connection, std::slice::from_ref(name)).await?;
            holders.into_iter().next().unwrap_or(Err(Failure::Nonsense))
        };
        self.call("asking who holds a lock", name, asking).await
    }

    /// Each page has the time that one operation may take.
    async fn list(&self, prefix: &str) -> Result<Vec<Holder>, LockError> {
        let mut found = match self.list_all(prefix).await {
            // A server may have left the cluster meanwhile.
            Err(LockError::Closed { .. }) if !self.router.is_closed() => self.list_all(prefix).await,
            found => found,
        }?;
        if let Some(message) = self.unserved() {
            let message = format!("the list would not be complete: {message}");
            return Err(LockError::unavailable(LISTING, message));
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

    async fn force_release(&self, name: &LockName) -> Result<Vec<Holder>, LockError> {
        let asking = |connection, resent| async move {
            // A second one would end the hold of the next.
            if resent {
                return Err(Failure::Told(NOT_REPEATED.to_owned()));
            }
            self.settings.force_release(&connection, name).await
        };
        self.call("forced release", name, asking).await
    }

    async fn server_info(&self) -> Result<ServerInfo, LockError> {
        const OPERATION: &str = "asking for the settings of the server";
        let (name, is_cluster) = (LockName::new("none")?, self.settings.is_cluster());
        let unused = &*self.settings.keys.never(&name);
        let asking = |connection: Connection, _| async move { connection.use_rare_commands(unused).await };
        self.call(OPERATION, &name, asking).await?;
        let look = async |connection: &Connection| {
            if is_cluster {
                // For slots that are being moved.
                connection.clone().asking().request(&redis::cmd("PING")).await?;
            }
            let server = connection.look().await?;
            let info = server.named().with_warnings(server.warnings());
            Ok::<_, Failure>((connection.place().to_string(), info))
        };
        let looking = async {
            let connections = self.router.all().await?;
            try_join_all(connections.iter().map(look)).await
        };
        let mut servers = self.limited(OPERATION, looking).await?;
        if !is_cluster && let Some((_, server)) = servers.pop() {
            return Ok(server);
        }
        let product = format!("Redis Cluster of {} primaries:", servers.len());
        Ok(several(product, servers, Vec::from_iter(self.unserved())))
    }

    /// Releases what the client holds, and closes all connections for good. Without a connection, one is made for it.
    async fn close(&self) -> Result<(), LockError> {
        // Also if this is dropped.
        let _closing = Closing(&*self.router);
        let held = self.settings.subscriptions.holding(self.settings.clock.now());
        let releasing = held
            .into_iter()
            .map(|(claim, keep)| async move { self.release(&claim, keep).await });
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
struct Closing<'a>(&'a dyn Router);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        self.0.close();
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let servers = self.settings.config.target.to_string();
        f.debug_struct("Client")
            .field("servers", &servers)
            .finish_non_exhaustive()
    }
}
