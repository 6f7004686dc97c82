//! What all clones of a client share.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use etcd_client::{Compare, CompareOp, ResponseHeader};
use lock_core::{Claim, Clock, Executor, ExitDelay, LockError, LockGuard};
use lock_transport::{Endpoint, Secret, TlsFiles};
use tokio::sync::Mutex;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::failure::{self, Failure};
use crate::keys::Keys;
use crate::leases::Kept;
use crate::line::{Line, line};
use crate::link::Link;
use crate::patience::Patience;
use crate::requests::After;
use crate::table::Table;
use crate::tokens;

/// What the client was configured with.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) hosts: Vec<Endpoint>,
    pub(crate) tls: Option<TlsFiles>,
    pub(crate) login: Option<(String, Secret)>,
    pub(crate) keys: Keys,
    pub(crate) op_timeout: Duration,
    pub(crate) allow_unsafe: bool,
    pub(crate) executor: Executor,
}

/// How long a request that failed with its connection rests before it is repeated on another one.
pub(crate) const PAUSE: Duration = Duration::from_millis(20);

/// How long members that have no leader are left alone before they are asked again.
const ELECTION: Duration = Duration::from_millis(100);

/// What all clones of a client share.
pub(crate) struct Session {
    settings: Arc<Settings>,
    clock: Clock,
    line: Line,
    patience: Patience,
    table: Arc<Table>,
    closing: AtomicBool,
    /// Held by whoever makes a shared lease.
    making: Mutex<()>,
    /// The highest token that anyone can have drawn, as far as this client has seen.
    highest: AtomicU64,
    /// The highest base that it has seen.
    highest_base: AtomicU64,
}

impl Session {
    /// Starts without a connection; the first request makes one.
    pub(crate) fn new(settings: Settings) -> Self {
        let settings = Arc::new(settings);
        let table = Arc::new(Table::default());
        let patience = Patience::new(settings.op_timeout, Arc::clone(&table));
        Self {
            line: line(&settings, patience.clone()),
            patience,
            settings,
            clock: Clock::system(),
            table,
            closing: AtomicBool::new(false),
            making: Mutex::new(()),
            highest: AtomicU64::new(0),
            highest_base: AtomicU64::new(0),
        }
    }

    pub(crate) fn settings(&self) -> &Arc<Settings> {
        &self.settings
    }

    pub(crate) fn clock(&self) -> &Clock {
        &self.clock
    }

    pub(crate) fn table(&self) -> &Table {
        &self.table
    }

    pub(crate) fn patience(&self) -> &Patience {
        &self.patience
    }

    pub(crate) fn making(&self) -> &Mutex<()> {
        &self.making
    }

    pub(crate) fn highest(&self) -> u64 {
        self.highest.load(Ordering::Acquire)
    }

    pub(crate) fn highest_base(&self) -> u64 {
        self.highest_base.load(Ordering::Acquire)
    }

    /// Records a base, and a revision up to which tokens can have been drawn over it.
    pub(crate) fn saw(&self, base: u64, revision: i64) {
        self.highest_base.fetch_max(base, Ordering::AcqRel);
        self.highest
            .fetch_max(tokens::highest(base, revision), Ordering::AcqRel);
    }

    /// The revision of an answer.
    pub(crate) fn seen(&self, header: Option<&ResponseHeader>) -> i64 {
        header.map_or(0, ResponseHeader::revision)
    }

    /// Does `work`, which may be done twice, on the connection, within the time that one operation may take; again, with another member,
    /// as often as the connection ends under it.
    ///
    /// What changes something may be done twice because each transaction compares, or can only change, the claim's own key: a claim is put
    /// where no key of its name is, or not under its own; a repeat finds the first one's key, and has it. A release deletes the
    /// claim's own key, which no other claim has while it may be on its way, and other deletions name the create revision, as reservations
    /// do. A lease that was made twice ends by itself.
    pub(crate) async fn on_link<T, F>(
        &self,
        operation: &'static str,
        work: impl Fn(Arc<Link>) -> F,
    ) -> Result<T, LockError>
    where
        F: Future<Output = Result<T, Failure>>,
    {
        self.limited(operation, async {
            let mut link = self.link().await?;
            loop {
                match work(Arc::clone(&link)).await {
                    Err(failure) if is_worth_another(&link, &failure) => sleep(PAUSE).await,
                    done => return done,
                }
                link = self.next_link().await?;
            }
        })
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

    /// The connection; if there is none, or it is broken, a new one. Waits for an election, for most of an operation's time: what is left
    /// when that is over is for telling why.
    pub(crate) async fn link(&self) -> Result<Arc<Link>, Failure> {
        let began = self.clock.now();
        loop {
            if self.is_closed() {
                return Err(LockError::closed().into());
            }
            match self.line.get().await.map_err(Failure::from) {
                Err(failure)
                    if failure::awaits_an_election(&failure)
                        && self.clock.now().since(began) < self.settings.op_timeout * 3 / 4 =>
                {
                    sleep(ELECTION).await;
                }
                linked => return linked,
            }
        }
    }

    /// The same for another request after a first one.
    pub(crate) async fn next_link(&self) -> Result<Arc<Link>, Failure> {
        self.link().await.map_err(Failure::maybe_sent)
    }

    /// Connects, and finds out whether the user may read and write what locks need.
    pub(crate) async fn greet(&self) -> Result<(), LockError> {
        let greeting = |link: Arc<Link>| async move { self.drawing(&link).await.map(drop) };
        self.on_link("connecting", greeting).await
    }

    /// The claim is given up: its core will release it.
    pub(crate) fn abandon(&self, claim: &Claim, after: After) {
        self.table.leave(claim, after, self.clock.now());
    }

    pub(crate) fn compares(&self, guard: &LockGuard) -> Option<Vec<Compare>> {
        if !guard.is_held() {
            return None;
        }
        // The lock goes back to the server with this guard, so that its transactions fail under the next one.
        let _ = guard.owner();
        let (key, created) = self.table.holding(guard.name(), guard.token())?;
        Some(vec![Compare::create_revision(&*key, CompareOp::Equal, created)])
    }

    /// Ends the session: its leases are revoked, and with them all that it has on the server, if there is a connection for it.
    pub(crate) async fn close(&self) -> Result<(), LockError> {
        // A waiter must not come again with another lease.
        self.closing.store(true, Ordering::Release);
        let mut outcome = Ok(());
        if let Some(link) = self.line.current() {
            let ending = async {
                let known = revoke(Arc::clone(&link), self.table.take_leases()).await;
                // And a shared lease that was being made meanwhile.
                let _making = self.making.lock().await;
                known.and(revoke(link, self.table.take_leases()).await)
            };
            outcome = self.limited("close", ending).await;
        }
        self.line.close();
        outcome
    }

    /// Fails if the session is closed.
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

impl Drop for Session {
    /// Whoever goes without a word leaves no leases either.
    fn drop(&mut self) {
        let leases = self.table.take_leases();
        let (false, Some(link)) = (leases.is_empty(), self.line.current()) else {
            return;
        };
        let limit = self.settings.op_timeout;
        let delay = ExitDelay::begin();
        link.runtime().clone().spawn(async move {
            let _delay = delay;
            if !matches!(timeout(limit, revoke(link, leases)).await, Ok(Ok(()))) {
                tracing::debug!(target: "fencelock", "leases of a client that was dropped were not revoked; they end by themselves");
            }
        });
    }
}

/// Whether a request that failed on that connection is repeated on the next one.
pub(crate) fn is_worth_another(link: &Link, failure: &Failure) -> bool {
    link.is_broken() && failure.is_worth_another_connection()
}

/// Ends leases, and all that they keep.
async fn revoke(link: Arc<Link>, leases: Vec<Arc<Kept>>) -> Result<(), Failure> {
    let mut revoked = JoinSet::new();
    for kept in leases {
        let link = Arc::clone(&link);
        revoked.spawn(async move {
            kept.ended();
            link.revoke(kept.id()).await
        });
    }
    while let Some(ended) = revoked.join_next().await {
        match ended {
            Ok(Err(failure)) if !matches!(failure, Failure::LeaseGone) => return Err(failure),
            _ => {}
        }
    }
    Ok(())
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session")
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}
