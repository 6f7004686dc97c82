//! What all clones of a client share.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use etcd_client::{Compare, CompareOp, ResponseHeader};
use lock_core::{Clock, ExitDelay, LockError, LockGuard};
use lock_transport::within;
use tokio::sync::Mutex;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::connection::Connection;
use crate::error::{Failure, awaits_election};
use crate::lease::EtcdLease;
use crate::reconnect::{Reconnecting, reconnecting};
use crate::registry::Registry;
use crate::settings::Settings;
use crate::tokens;

/// How long a request that failed with its connection rests before it is repeated on another one.
const PAUSE: Duration = Duration::from_millis(20);

/// How long members that have no leader are left alone before they are asked again.
const ELECTION: Duration = Duration::from_millis(100);

/// What all clones of a client share.
pub(crate) struct Client {
    settings: Arc<Settings>,
    clock: Clock,
    connections: Reconnecting,
    registry: Arc<Registry>,
    closing: AtomicBool,
    /// Held while a shared lease is granted.
    granting: Mutex<()>,
    /// The highest token that any client can have drawn, as far as this client has seen.
    highest_token: AtomicU64,
    /// The highest base that it has seen.
    highest_base: AtomicU64,
}

impl Client {
    /// Starts without a connection; the first request makes one.
    pub(crate) fn new(settings: Settings) -> Self {
        let (settings, registry) = (Arc::new(settings), Arc::default());
        Self {
            connections: reconnecting(&settings, &registry),
            settings,
            clock: Clock::system(),
            registry,
            closing: AtomicBool::new(false),
            granting: Mutex::new(()),
            highest_token: AtomicU64::new(0),
            highest_base: AtomicU64::new(0),
        }
    }

    pub(crate) fn settings(&self) -> &Settings {
        &self.settings
    }

    pub(crate) fn clock(&self) -> &Clock {
        &self.clock
    }

    pub(crate) fn registry(&self) -> &Registry {
        &self.registry
    }

    pub(crate) fn granting(&self) -> &Mutex<()> {
        &self.granting
    }

    pub(crate) fn highest_token(&self) -> u64 {
        self.highest_token.load(Ordering::Acquire)
    }

    pub(crate) fn highest_base(&self) -> u64 {
        self.highest_base.load(Ordering::Acquire)
    }

    /// Records a base, and a revision up to which tokens can have been drawn over it.
    pub(crate) fn saw(&self, base: u64, revision: i64) {
        self.highest_base.fetch_max(base, Ordering::AcqRel);
        self.highest_token
            .fetch_max(tokens::highest(base, revision), Ordering::AcqRel);
    }

    /// Sends a request until a member has answered, within the time that one operation may take: again, over another connection, as often as
    /// the connection ends under it.
    ///
    /// The second argument of `work` says whether the request has been sent before and may have been carried out. It can be carried out twice
    /// because each transaction compares: a claim is put where no key of its name is, or not under its own; a repeat finds the first one's key,
    /// and has it. Deletions name the owner or the create revision. A lease that was granted twice ends by itself.
    pub(crate) async fn call<T, F>(
        &self,
        operation: &'static str,
        work: impl Fn(Arc<Connection>, bool) -> F,
    ) -> Result<T, LockError>
    where
        F: Future<Output = Result<T, Failure>>,
    {
        let calling = async {
            let mut resent = false;
            loop {
                let connection = match self.connection().await {
                    Err(failure) if resent => return Err(failure.maybe_sent()),
                    connection => connection?,
                };
                match work(Arc::clone(&connection), resent).await {
                    Err(failure) if connection.is_broken() && failure.is_worth_another_connection() => {
                        resent |= !failure.is_refusal();
                        sleep(PAUSE).await;
                    }
                    done => return done,
                }
            }
        };
        self.limited(operation, calling).await
    }

    /// Does `work` within the time that one operation may take.
    pub(crate) async fn limited<T>(
        &self,
        operation: &'static str,
        work: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, LockError> {
        let done = within(self.settings.op_timeout, operation, work).await;
        done.map_err(|failure| failure.explain(operation))
    }

    /// The connection; if there is none, or it is broken, a new one. Waits for an election, for most of an operation's time: what is left
    /// when that is over is for telling why.
    async fn connection(&self) -> Result<Arc<Connection>, Failure> {
        let began = self.clock.now();
        loop {
            self.still_open()?;
            match self.connections.get().await {
                Err(error)
                    if awaits_election(&error) && self.clock.now().since(began) < self.settings.op_timeout * 3 / 4 =>
                {
                    sleep(ELECTION).await;
                }
                connection => return Ok(connection?),
            }
        }
    }

    /// Connects, and finds out whether the user may read and write what locks need.
    pub(crate) async fn connect(&self) -> Result<(), LockError> {
        self.call("connecting", |connection, _| async move {
            self.base(&connection).await.map(drop)
        })
        .await
    }

    pub(crate) fn compares(&self, guard: &LockGuard) -> Option<Vec<Compare>> {
        if !guard.is_held() {
            return None;
        }
        // The lock goes back to the server with this guard, so that its transactions fail under the next one.
        let _ = guard.owner();
        let (key, created) = self.registry.holding(guard.name(), guard.token())?;
        Some(vec![Compare::create_revision(&*key, CompareOp::Equal, created)])
    }

    /// Ends the client: its leases are revoked, and with them all that it has on the server, if there is a connection for it.
    pub(crate) async fn close(&self) -> Result<(), LockError> {
        // A waiter must not come again with another lease.
        self.closing.store(true, Ordering::Release);
        let mut outcome = Ok(());
        if let Some(connection) = self.connections.current() {
            let ending = async {
                let known = self.revoke_all(Arc::clone(&connection)).await;
                // And a shared lease that was being granted meanwhile.
                let _granting = self.granting.lock().await;
                known.and(self.revoke_all(connection).await)
            };
            outcome = self.limited("close", ending).await;
        }
        self.connections.close();
        outcome
    }

    async fn revoke_all(&self, connection: Arc<Connection>) -> Result<(), Failure> {
        let leases = self.registry.take_leases();
        match revoke(connection, leases.clone()).await {
            Err(failure) if failure.is_refusal() => revoke(self.connections.get().await?, leases).await,
            done => done,
        }
    }

    /// Fails if the client is closed.
    pub(crate) fn still_open(&self) -> Result<(), Failure> {
        match self.is_closed() {
            true => Err(LockError::closed().into()),
            false => Ok(()),
        }
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }
}

/// The revision of an answer.
pub(crate) fn revision(header: Option<&ResponseHeader>) -> i64 {
    header.map_or(0, ResponseHeader::revision)
}

impl Drop for Client {
    /// A client that is not closed leaves no leases either.
    fn drop(&mut self) {
        let leases = self.registry.take_leases();
        let (false, Some(connection)) = (leases.is_empty(), self.connections.current()) else {
            return;
        };
        let limit = self.settings.op_timeout;
        let delay = ExitDelay::begin();
        connection.runtime().clone().spawn(async move {
            let _delay = delay;
            if !matches!(timeout(limit, revoke(connection, leases)).await, Ok(Ok(()))) {
                tracing::debug!(target: "fencelock", "leases of a client that was dropped were not revoked; they end by themselves");
            }
        });
    }
}

/// Ends leases, and all that they keep. Returns the first failure, if there was one.
async fn revoke(connection: Arc<Connection>, leases: Vec<Arc<EtcdLease>>) -> Result<(), Failure> {
    let mut revoked = JoinSet::new();
    for lease in leases {
        let connection = Arc::clone(&connection);
        revoked.spawn(async move {
            lease.ended();
            connection.revoke(lease.id()).await
        });
    }
    let mut outcome = Ok(());
    while let Some(ended) = revoked.join_next().await {
        if let Ok(Err(failure)) = ended
            && !matches!(failure, Failure::LeaseGone)
        {
            outcome = outcome.and(Err(failure));
        }
    }
    outcome
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client")
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}
