//! All sessions of a client.

use std::collections::HashMap;
use std::fmt;
#[cfg(feature = "tls")]
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use lock_core::{Clock, Lease, LockError, OwnerId, background};
use tokio::runtime::Handle;
use tokio::sync::{Mutex as AsyncMutex, Semaphore};
use tokio::time::timeout;
use tokio_postgres::error::SqlState;
use tokio_util::sync::CancellationToken;

use crate::config::Tls;
use crate::counter;
use crate::failure::Failure;
use crate::holdings::Holdings;
use crate::keys::Keys;
use crate::safety::{self, Server};
use crate::schema::{Schema, literal};
use crate::session::{Duty, Session, limits, millis, settings};
use crate::to_its_end::ToItsEnd;
use crate::wire::Wire;

/// How many sessions that carry nothing are kept for the next claim that wants one of its own.
const SPARES: usize = 2;

/// How many sessions wait for locks at the same time. Whoever finds none asks again and again instead.
const WAITING: usize = 2;

/// The ttl of a session that carries no lock.
const PLAIN_TTL: Duration = Duration::from_secs(30);

/// What the client was configured with.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) server: tokio_postgres::Config,
    pub(crate) tls: Tls,
    #[cfg(feature = "tls")]
    pub(crate) root_certificate: Option<PathBuf>,
    pub(crate) keys: Keys,
    pub(crate) schema: Schema,
    pub(crate) op_timeout: Duration,
    pub(crate) allow_unsafe: bool,
    pub(crate) runtime: Option<Handle>,
}

impl Settings {
    /// What sessions are called on the server. It cuts after 63 bytes, and shows other letters than those of ASCII as `?`.
    pub(crate) fn application_name(&self) -> String {
        let host = lock_core::Holder::of(&anyone()).host.unwrap_or_default();
        let host: String = host.chars().filter(|c| c.is_ascii_graphic()).take(24).collect();
        let host = if host.is_empty() { "?" } else { &host };
        format!("fencelock {} {} {host}", self.keys.mark(), std::process::id())
    }
}

type Shared = Arc<AsyncMutex<Option<Arc<Session>>>>;

/// All sessions of a client, and what they hold.
pub(crate) struct Sessions {
    pub(crate) settings: Settings,
    pub(crate) clock: Clock,
    pub(crate) holdings: Holdings,
    /// The highest token that this client has seen.
    pub(crate) seen: AtomicU64,
    pub(crate) waiting: Arc<Semaphore>,
    /// By the ttl in milliseconds: the session that carries the locks that were free when they were asked for.
    shared: Mutex<HashMap<u64, Shared>>,
    spares: Mutex<Vec<Arc<Session>>>,
    all: Mutex<Vec<Weak<Session>>>,
    closed: CancellationToken,
}

impl Sessions {
    pub(crate) fn new(settings: Settings) -> Self {
        Self {
            settings,
            clock: Clock::system(),
            holdings: Holdings::default(),
            seen: AtomicU64::new(0),
            waiting: Arc::new(Semaphore::new(WAITING)),
            shared: Mutex::default(),
            spares: Mutex::default(),
            all: Mutex::default(),
            closed: CancellationToken::new(),
        }
    }

    /// Does `work` to its end: a caller who goes away leaves nothing half done. What is said of it is said within the time
    /// for one operation; the work itself ends at the latest with its session.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        operation: &'static str,
        work: impl Future<Output = Result<T, Failure>> + Send + 'static,
    ) -> Result<T, LockError> {
        let limit = self.settings.op_timeout;
        match timeout(limit, self.unlimited(operation, work)).await {
            Ok(done) => done,
            Err(_) => Err(LockError::no_answer(operation, limit)),
        }
    }

    /// The same for work that takes as long as it takes.
    pub(crate) async fn unlimited<T: Send + 'static>(
        &self,
        operation: &'static str,
        work: impl Future<Output = Result<T, Failure>> + Send + 'static,
    ) -> Result<T, LockError> {
        if self.closed.is_cancelled() {
            return Err(LockError::Closed);
        }
        let runtime = self.runtime()?;
        // Elsewhere it might not be polled for long, and keep others waiting meanwhile.
        let done = if Handle::try_current().is_ok_and(|here| here.id() == runtime.id()) {
            ToItsEnd::new(work, runtime).await
        } else {
            match runtime.spawn(work).await {
                Ok(done) => done,
                Err(error) => return Err(LockError::unavailable(operation, error)),
            }
        };
        done.map_err(|failure| failure.explain(operation))
    }

    fn runtime(&self) -> Result<Handle, LockError> {
        match &self.settings.runtime {
            Some(runtime) => Ok(runtime.clone()),
            None => background(),
        }
    }

    /// Connects, so that whatever is wrong shows now.
    pub(crate) async fn warm_up(self: &Arc<Self>) -> Result<(), LockError> {
        let sessions = Arc::clone(self);
        self.run("connecting", async move {
            let session = sessions.any().await?;
            sessions.spare(session);
            Ok(())
        })
        .await
    }

    /// The session that carries the locks of that ttl that were free when they were asked for.
    pub(crate) async fn shared(self: &Arc<Self>, ttl: Duration) -> Result<Arc<Session>, Failure> {
        let slot = Arc::clone(lock(&self.shared).entry(millis(ttl)).or_default());
        let mut slot = slot.lock().await;
        if let Some(session) = slot.as_ref().filter(|session| session.is_useful()) {
            return Ok(Arc::clone(session));
        }
        *slot = None;
        let session = self.empty(ttl, Duty::Many).await?;
        *slot = Some(Arc::clone(&session));
        Ok(session)
    }

    /// A session for a single lock.
    pub(crate) async fn own(self: &Arc<Self>, ttl: Duration) -> Result<Arc<Session>, Failure> {
        self.empty(ttl, Duty::One).await
    }

    /// A session for a question that takes no lock.
    pub(crate) async fn any(self: &Arc<Self>) -> Result<Arc<Session>, Failure> {
        self.empty(PLAIN_TTL, Duty::Many).await
    }

    /// A session that carries nothing, kept by the server for `ttl`.
    async fn empty(self: &Arc<Self>, ttl: Duration, duty: Duty) -> Result<Arc<Session>, Failure> {
        loop {
            // Not in the condition, which would keep the mutex.
            let spare = lock(&self.spares).pop();
            let Some(spare) = spare else { break };
            if !spare.is_useful() {
                continue;
            }
            if spare.limits() == (ttl, duty) {
                return Ok(spare);
            }
            match spare.set_limits(ttl, duty).await {
                Ok(()) => return Ok(spare),
                Err(failure) => tracing::debug!(?failure, "a spare session was of no use"),
            }
        }
        // Boxed, as it is large and rare: whatever may open a session would be as large.
        Box::pin(self.open(ttl, duty)).await
    }

    /// Takes back a session that carries nothing any more.
    pub(crate) fn spare(&self, session: Arc<Session>) {
        session.wire().keep(None);
        let mut spares = lock(&self.spares);
        if session.is_over() {
            // What ended it may have ended them, unnoticed so far.
            spares.clear();
        }
        spares.retain(|spare| !spare.is_over());
        if self.closed.is_cancelled() || spares.len() >= SPARES || !session.is_useful() {
            session.wire().end();
        } else {
            spares.push(session);
        }
    }

    /// The session that keeps that shared lease now.
    pub(crate) fn by_lease(&self, lease: &Lease) -> Option<Arc<Session>> {
        let all = lock(&self.all);
        let keeps = |session: &Arc<Session>| session.wire().lease().is_some_and(|kept| kept.id() == lease.id());
        all.iter().filter_map(Weak::upgrade).find(keeps)
    }

    /// Whether the session with that backend is one of this client.
    pub(crate) fn by_pid(&self, pid: i32) -> bool {
        let all = lock(&self.all);
        all.iter().filter_map(Weak::upgrade).any(|session| session.pid == pid)
    }

    /// Some session that is alive. One that is alive now and was before has seen no crash of the server in between.
    pub(crate) fn witness(&self) -> Option<Arc<Session>> {
        let all = lock(&self.all);
        all.iter().filter_map(Weak::upgrade).find(|session| !session.is_over())
    }

    async fn open(self: &Arc<Self>, ttl: Duration, duty: Duty) -> Result<Arc<Session>, Failure> {
        let runtime = self.runtime()?;
        let limit = self.settings.op_timeout;
        let opening = timeout(limit, self.open_now(ttl, duty, &runtime)).await;
        let session = opening.unwrap_or_else(|_| Err(LockError::no_answer("connecting", limit).into()))?;
        session.look_after(&runtime);
        let mut all = lock(&self.all);
        all.retain(|session| session.strong_count() > 0);
        all.push(Arc::downgrade(&session));
        // It may have been closed meanwhile.
        if self.closed.is_cancelled() {
            session.wire().end();
            return Err(LockError::Closed.into());
        }
        Ok(session)
    }

    async fn open_now(self: &Arc<Self>, ttl: Duration, duty: Duty, runtime: &Handle) -> Result<Arc<Session>, Failure> {
        let wire = Wire::open(&self.settings, runtime).await?;
        let server = Server::look(&wire).await?;
        server.check(self.settings.allow_unsafe)?;
        self.make_sure_of_own_session(&wire, &server, runtime).await?;
        let sequence = self.sequence(&wire, &server).await?;
        let seen = self.seen.load(Ordering::Acquire);
        let (settings, limits) = (
            settings(self.settings.op_timeout),
            limits(ttl, duty, self.settings.op_timeout),
        );
        let raise = counter::raise(&self.settings.schema, sequence, seen);
        let raise = format!("{settings}; {raise}; {limits}");
        // Not every system that Postgres runs on can do that, so it is asked for by itself.
        let check = millis((ttl / 4).min(Duration::from_secs(1)));
        let check = format!("SET client_connection_check_interval = {check}");
        let (rows, checking) = tokio::join!(wire.ask(&raise), wire.ask(&check));
        match checking {
            Err(Failure::Postgres(error)) if error.code() == Some(&SqlState::INVALID_PARAMETER_VALUE) => {}
            other => drop(other?),
        }
        let start = counter::raised(&rows?, sequence)?;
        Ok(Session::new(
            wire,
            OwnerId::random().to_string().into(),
            self.clock.clone(),
            self.settings.schema.clone(),
            &server,
            start,
            self.settings.application_name(),
            self.settings.op_timeout,
            (ttl, duty),
        ))
    }

    /// Before anything is set.
    async fn make_sure_of_own_session(&self, wire: &Wire, server: &Server, runtime: &Handle) -> Result<(), Failure> {
        let allow_unsafe = self.settings.allow_unsafe;
        if let Some(session) = self.witness() {
            match safety::not_pooled(server, session.wire(), allow_unsafe).await {
                // It ended meanwhile.
                Err(_) if session.is_over() => {}
                compared => return compared,
            }
        }
        let other = wire.open_another(&self.settings, runtime).await?;
        safety::not_pooled(server, &other, allow_unsafe).await
    }

    /// The sequence, which is made with its schema if it is missing. Asked before anything is set, and together with whether
    /// this is still the same session.
    async fn sequence(&self, wire: &Wire, server: &Server) -> Result<u32, Failure> {
        let schema = &self.settings.schema;
        let name = literal(&format!("{}.token", schema.quoted()));
        let look = format!(
            "SELECT pg_backend_pid(); SELECT seqrelid::oid::bigint, seqcache, seqcycle FROM pg_sequence WHERE seqrelid = to_regclass({name})"
        );
        let mut rows = wire.ask(&look).await?;
        let pid: i32 = rows.iter().next().ok_or(Failure::Nonsense)?.number(0)?;
        safety::own_session(pid == server.pid, self.settings.allow_unsafe)?;
        if rows.iter().count() < 2 {
            let made = self.make_schema(wire, server).await;
            // If somebody else has made it anew since the first look, this role need not be able to.
            match wire.ask(&look).await {
                Ok(again) if again.iter().count() == 2 => rows = again,
                looked => {
                    made?;
                    rows = looked?;
                }
            }
        }
        let row = rows.iter().nth(1).ok_or(Failure::Nonsense)?;
        safety::sequence(row.number(1)?, row.truth(2)?, self.settings.allow_unsafe)?;
        row.number(0)
    }

    async fn make_schema(&self, wire: &Wire, server: &Server) -> Result<(), Failure> {
        let schema = &self.settings.schema;
        let unlogged = server.has_unlogged_sequences();
        match wire.ask(&schema.create_alone(unlogged)).await {
            Ok(_) => Ok(()),
            Err(failure) if failure.code() == Some(&SqlState::INSUFFICIENT_PRIVILEGE) => {
                let user = self.settings.server.get_user().unwrap_or("ROLE");
                let sql = schema.create(unlogged) + &schema.grant(user);
                let source = match failure {
                    Failure::Postgres(error) => Some(error.into()),
                    _ => None,
                };
                Err(LockError::Configuration {
                    message: format!(
                        "the schema of fencelock is missing in this database, and the role may not make it; have this run \
                         by somebody who may:\n{sql}"
                    ),
                    source,
                }
                .into())
            }
            Err(failure) => Err(failure),
        }
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.is_cancelled()
    }

    /// Ends when the client is closed.
    pub(crate) async fn closed(&self) {
        self.closed.cancelled().await;
    }

    /// Ends all sessions, and so lets go of everything.
    pub(crate) fn close(&self) {
        self.closed.cancel();
        for session in lock(&self.all).drain(..).filter_map(|session| session.upgrade()) {
            session.wire().end();
        }
        lock(&self.spares).clear();
        lock(&self.shared).clear();
    }
}

impl Drop for Sessions {
    fn drop(&mut self) {
        self.close();
    }
}

impl fmt::Debug for Sessions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sessions")
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}

/// A claim of nobody in particular, for what all claims of this process have in common.
fn anyone() -> lock_core::Claim {
    #[expect(clippy::expect_used, reason = "the name is a usable one")]
    let name = lock_core::LockName::new("anything").expect("a usable name");
    lock_core::Claim::new(name, PLAIN_TTL)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing here panics while holding a mutex.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
