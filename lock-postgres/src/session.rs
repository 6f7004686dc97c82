//! A session that the server ends when nothing is heard of it for a ttl, and all its locks with it.
//!
//! **Invariant.** A session only ever sends single messages of the simple protocol, and bare Syncs; never `BEGIN`, and never
//! the extended protocol. So between two messages it is idle, outside of a transaction, and `idle_session_timeout` runs:
//! whenever the client falls silent, and after whichever byte, the server ends the session one ttl after the last message
//! that arrived as a whole.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use lock_core::{BackendVersion, Clock, FencingToken, Lease, Stamp};
use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};

use crate::counter::{self, Start};
use crate::failure::Failure;
use crate::rows::Rows;
use crate::safety::Server;
use crate::schema::{Schema, literal};
use crate::wire::Wire;

/// How many statements are on their way at once. A heartbeat waits for no more than these, each of which the server gives
/// up soon enough: a lock on our tables loses no lease.
const FLIGHTS: usize = 8;

/// How long a statement has at least, on a machine that is busy.
const SHORTEST_STATEMENT: Duration = Duration::from_millis(100);

/// How long one statement waits for a lock at most. A longer one would keep the vacuum, and the making of indexes, waiting
/// with it; and from a second on the server would look for deadlocks.
const SLICE: Duration = Duration::from_millis(800);

/// How long a session that carries nothing is kept.
const LINGER: Duration = Duration::from_secs(60);

/// What a session is there for, and so how long its statements wait for locks of the server, as those on our tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Duty {
    /// Many locks, which all end if a heartbeat is kept waiting for too long.
    Many,
    /// A single lock, which it may wait for.
    One,
}

impl Duty {
    /// How long a statement of a session with that ttl waits.
    fn patience(self, ttl: Duration) -> Duration {
        match self {
            Self::Many => ttl / 40,
            Self::One => (ttl / 5).min(SLICE),
        }
    }
}

/// One session on the server.
pub(crate) struct Session {
    wire: Wire,
    id: Arc<str>,
    clock: Clock,
    schema: Schema,
    pub(crate) pid: i32,
    pub(crate) version: BackendVersion,
    pub(crate) start: Start,
    ceiling: AtomicU64,
    limits: Mutex<(Duration, Duty)>,
    /// Locks that it carries, and attempts.
    carried: AtomicUsize,
    /// How many locks the lease keeps that they share now, and how many leases there have been.
    sharing: Mutex<(usize, u64)>,
    used: Mutex<Stamp>,
    /// The label that it shows, if that is known.
    label: Mutex<Option<String>>,
    /// Whether it has no token to give any more. What it carries stays.
    dry: AtomicBool,
    application_name: String,
    op_timeout: Duration,
    flights: Semaphore,
}

/// A lock that was granted, by a message sent then.
pub(crate) struct Drawn {
    pub(crate) token: FencingToken,
    pub(crate) sent: Stamp,
}

impl Session {
    #[expect(clippy::too_many_arguments, reason = "each is named at the only call")]
    pub(crate) fn new(
        wire: Wire,
        id: Arc<str>,
        clock: Clock,
        schema: Schema,
        server: &Server,
        start: Start,
        application_name: String,
        op_timeout: Duration,
        limits: (Duration, Duty),
    ) -> Arc<Self> {
        Arc::new(Self {
            wire,
            id,
            used: Mutex::new(clock.now()),
            clock,
            schema,
            pid: server.pid,
            version: server.named(),
            ceiling: AtomicU64::new(start.ceiling),
            start,
            limits: Mutex::new(limits),
            carried: AtomicUsize::new(0),
            sharing: Mutex::default(),
            label: Mutex::new(Some(String::new())),
            dry: AtomicBool::new(false),
            application_name,
            op_timeout,
            flights: Semaphore::new(FLIGHTS),
        })
    }

    pub(crate) fn wire(&self) -> &Wire {
        &self.wire
    }

    pub(crate) fn ttl(&self) -> Duration {
        self.limits().0
    }

    pub(crate) fn limits(&self) -> (Duration, Duty) {
        *self.limits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether nothing can be done with it any more. A session whose lease is over is ended: the server may have done it.
    pub(crate) fn is_over(&self) -> bool {
        let expired = self.wire.lease().is_some_and(|lease| !lease.is_valid(self.clock.now()));
        if expired {
            self.wire.end();
        }
        expired || self.wire.is_ended()
    }

    /// Whether it can take locks. The sequence that it knows may have been dropped, and made anew.
    pub(crate) fn is_useful(&self) -> bool {
        !self.is_over() && !self.dry.load(Ordering::Acquire)
    }

    /// One message, and what it was answered with.
    pub(crate) async fn ask(&self, sql: &str) -> Result<Rows, Failure> {
        let _flight = self.flights.acquire().await.map_err(|_| Failure::Ended)?;
        let sent = self.clock.now();
        // A session with a lease ends with it at the latest; what else it is asked has no more time than one operation.
        let limit = if self.wire.lease().is_some() {
            self.ttl()
        } else {
            self.op_timeout
        };
        let Ok(answer) = timeout(limit, self.wire.ask(sql)).await else {
            self.wire.end();
            return Err(Failure::Ended);
        };
        if !self.wire.is_ended() {
            self.heard(sent);
        }
        answer
    }

    /// Keeps the session for another ttl.
    pub(crate) async fn beat(&self) -> Result<(), Failure> {
        let sent = self.clock.now();
        self.wire.beat().await?;
        self.heard(sent);
        Ok(())
    }

    /// The server answered what was sent then, if only with an error: it began to count anew later than that. A lease that
    /// is shared goes by its renewals alone, which the core takes note of.
    fn heard(&self, sent: Stamp) {
        if let Some(lease) = self.wire.lease().filter(|lease| lease.claim().is_some()) {
            lease.refreshed(sent, self.clock.now());
        }
    }

    /// The lease of a lock that was granted by a message sent then: that of the others, or else one that counts from it.
    pub(crate) fn share(self: &Arc<Self>, sent: Stamp) -> (Lease, Share) {
        let mut sharing = self.sharing.lock().unwrap_or_else(PoisonError::into_inner);
        sharing.0 += 1;
        let lease = self.wire.lease().filter(|_| sharing.0 > 1).unwrap_or_else(|| {
            sharing.1 += 1;
            let lease = Lease::shared(format!("{} lease {}", self.id, sharing.1), self.ttl(), sent);
            self.wire.keep(Some(lease.clone()));
            lease
        });
        (lease, Share(Arc::clone(self)))
    }

    /// Has the server keep the session for that ttl after the last sign of life, for another duty.
    pub(crate) async fn set_limits(&self, ttl: Duration, duty: Duty) -> Result<(), Failure> {
        self.ask(&limits(ttl, duty, self.op_timeout)).await?;
        *self.limits.lock().unwrap_or_else(PoisonError::into_inner) = (ttl, duty);
        Ok(())
    }

    /// Takes the lock if it is free. None: somebody has it.
    ///
    /// The token comes from the sequence itself, after the lock: a table would be read as it was before.
    pub(crate) async fn try_lock(
        &self,
        key: i64,
        label: Option<&str>,
        seen: &AtomicU64,
    ) -> Result<Option<Drawn>, Failure> {
        let sequence = self.start.sequence;
        let show = self.relabel(label);
        let sql = format!("SELECT CASE WHEN pg_try_advisory_lock({key}) THEN nextval({sequence}) END{show}");
        let before = seen.load(Ordering::Acquire);
        let sent = self.clock.now();
        let answer = self.ask(&sql).await.and_then(|rows| match rows.one()?.get(0)? {
            Some(token) => Ok(Some(token.parse().map_err(|_| Failure::Nonsense)?)),
            None => Ok(None),
        });
        match answer {
            Ok(None) => Ok(None),
            Ok(Some(token)) => self.granted(key, token, sent, before, seen).await.map(Some),
            Err(failure) => Err(self.undo(key, failure).await),
        }
    }

    /// Takes the lock, waiting for it for a while, and for no longer than `limit`. None: somebody still has it.
    ///
    /// The token is drawn for the row that says that the lock is there, and so after it.
    pub(crate) async fn wait_lock(
        &self,
        key: i64,
        label: Option<&str>,
        limit: Duration,
        seen: &AtomicU64,
    ) -> Result<Option<Drawn>, Failure> {
        let sequence = self.start.sequence;
        let show = self.relabel(label);
        let (ttl, duty) = self.limits();
        let sooner = if limit < duty.patience(ttl) {
            format!("SET LOCAL lock_timeout = {}; ", millis(limit).max(1))
        } else {
            String::new()
        };
        let sql = format!("{sooner}SELECT nextval({sequence}){show} FROM pg_advisory_lock({key})");
        let before = seen.load(Ordering::Acquire);
        let sent = self.clock.now();
        let answer = self.ask(&sql).await.and_then(|rows| rows.one()?.number(0));
        match answer {
            Ok(token) => {
                let sent = self.refreshed(key, sent).await?;
                self.granted(key, token, sent, before, seen).await.map(Some)
            }
            Err(failure) if failure.is_limit() => {
                self.forget_label();
                // It may have been granted and the limit met all the same.
                if let Err(failure) = self.unlock_all(key).await {
                    self.wire.end();
                    return Err(failure);
                }
                Ok(None)
            }
            Err(failure) => Err(self.undo(key, failure).await),
        }
    }

    /// When the server was last known to hear of the session that was granted a lock, by a message sent then, after a wait:
    /// after a long one it is told once more, so that the lease is not short.
    async fn refreshed(&self, key: i64, sent: Stamp) -> Result<Stamp, Failure> {
        let now = self.clock.now();
        if now.since(sent) <= self.ttl() / 20 {
            return Ok(sent);
        }
        match timeout(self.op_timeout, self.beat()).await {
            Ok(Ok(())) => Ok(now),
            Ok(Err(failure)) => Err(self.undo(key, failure).await),
            Err(_) => {
                self.wire.end();
                Err(Failure::Ended)
            }
        }
    }

    /// The lock is there: makes sure of its token.
    async fn granted(
        &self,
        key: i64,
        token: u64,
        sent: Stamp,
        before: u64,
        seen: &AtomicU64,
    ) -> Result<Drawn, Failure> {
        match self.sure_of(token, before).await {
            Ok(token) => {
                seen.fetch_max(token.get(), Ordering::AcqRel);
                Ok(Drawn { token, sent })
            }
            Err(failure) => Err(self.undo(key, failure).await),
        }
    }

    /// Draws a token for a lock that the session has.
    pub(crate) async fn draw(&self, seen: &AtomicU64) -> Result<Drawn, Failure> {
        let before = seen.load(Ordering::Acquire);
        let sent = self.clock.now();
        let rows = self.ask(&format!("SELECT nextval({})", self.start.sequence)).await?;
        let token = self.sure_of(rows.one()?.number(0)?, before).await?;
        seen.fetch_max(token.get(), Ordering::AcqRel);
        Ok(Drawn { token, sent })
    }

    /// The token, once a ceiling above it is durable. `before` was seen before it was drawn.
    pub(crate) async fn sure_of(&self, token: u64, before: u64) -> Result<FencingToken, Failure> {
        if token <= before {
            // Somebody set the sequence back under our feet. The next session puts it right.
            tracing::error!(
                token,
                seen = before,
                "the sequence of fencing tokens went back; starting a new session"
            );
            self.wire.end();
            return Err(Failure::Ended);
        }
        if token > self.ceiling.load(Ordering::Acquire) {
            // Others may be doing the same.
            let patience = millis(self.ttl() / 4);
            let raise = counter::raise_ceiling(&self.schema, token);
            let rows = self
                .ask(&format!("SET LOCAL lock_timeout = {patience}; {raise}"))
                .await?;
            let ceiling: u64 = rows.one()?.number(0)?;
            if token > ceiling {
                return Err(counter::exhausted().into());
            }
            self.ceiling.fetch_max(ceiling, Ordering::AcqRel);
        }
        FencingToken::new(token).map_err(|_| counter::exhausted().into())
    }

    /// Lets go of the lock. False: it was not there.
    pub(crate) async fn unlock(&self, key: i64) -> Result<bool, Failure> {
        let rows = self.ask(&format!("SELECT pg_advisory_unlock({key})")).await?;
        rows.one()?.truth(0)
    }

    /// Lets go of the lock however often the session has it.
    async fn unlock_all(&self, key: i64) -> Result<(), Failure> {
        while self.unlock(key).await? {}
        Ok(())
    }

    /// Makes sure that a failed attempt left no lock; or else ends the session. An error after the lock was taken keeps it.
    async fn undo(&self, key: i64, failure: Failure) -> Failure {
        if failure.is_about_what_is_gone() {
            self.dry.store(true, Ordering::Release);
        }
        self.forget_label();
        if self.unlock_all(key).await.is_err() {
            self.wire.end();
        }
        failure
    }

    /// What shows the label of the only lock that the session carries, and no label if there are several.
    fn relabel(&self, label: Option<&str>) -> String {
        let alone = self.carried.load(Ordering::Acquire) <= 1;
        let wanted = label.filter(|_| alone).unwrap_or_default();
        let mut shown = self.label.lock().unwrap_or_else(PoisonError::into_inner);
        if shown.as_deref() == Some(wanted) {
            return String::new();
        }
        *shown = Some(wanted.to_owned());
        let name = literal(format!("{} {wanted}", self.application_name).trim_end());
        format!(", set_config('application_name', {name}, false)")
    }

    /// A statement that fails takes its label back.
    fn forget_label(&self) {
        *self.label.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Keeps the session in use until dropped.
    pub(crate) fn carry(self: &Arc<Self>) -> Carried {
        self.carried.fetch_add(1, Ordering::AcqRel);
        Carried(Arc::clone(self))
    }

    pub(crate) fn carries_nothing(&self) -> bool {
        self.carried.load(Ordering::Acquire) == 0
    }

    /// Starts what keeps an unused session for a while, and ends one whose lease is over.
    pub(crate) fn look_after(self: &Arc<Self>, runtime: &Handle) {
        let weak = Arc::downgrade(self);
        runtime.spawn(look_after(weak));
    }
}

/// One of the locks that share a lease.
pub(crate) struct Share(Arc<Session>);

impl Drop for Share {
    fn drop(&mut self) {
        let mut sharing = self.0.sharing.lock().unwrap_or_else(PoisonError::into_inner);
        sharing.0 -= 1;
        if sharing.0 == 0 {
            // Nobody renews it any more.
            self.0.wire.keep(None);
        }
    }
}

/// A session in use.
pub(crate) struct Carried(Arc<Session>);

impl std::ops::Deref for Carried {
    type Target = Arc<Session>;

    fn deref(&self) -> &Arc<Session> {
        &self.0
    }
}

impl Drop for Carried {
    fn drop(&mut self) {
        *self.0.used.lock().unwrap_or_else(PoisonError::into_inner) = self.0.clock.now();
        self.0.carried.fetch_sub(1, Ordering::AcqRel);
    }
}

async fn look_after(session: Weak<Session>) {
    loop {
        let Some(nap) = session.upgrade().map(|session| session.ttl() / 3) else {
            return;
        };
        sleep(nap).await;
        let Some(session) = session.upgrade() else { return };
        if session.is_over() {
            return;
        }
        // Whoever uses it renews it.
        if !session.carries_nothing() {
            continue;
        }
        let used = *session.used.lock().unwrap_or_else(PoisonError::into_inner);
        let beaten = session.clock.now().since(used) < LINGER
            && matches!(timeout(session.op_timeout, session.beat()).await, Ok(Ok(())));
        if !beaten && session.carries_nothing() {
            session.wire.end();
            return;
        }
    }
}

/// What the session sets for itself, whatever the role or the database would have it be. While it is opened it has more
/// patience than later: nobody depends on it so far, and others may be putting the counter right.
pub(crate) fn settings(op_timeout: Duration) -> String {
    let patience = millis(op_timeout / 2);
    format!(
        "SET search_path = pg_catalog; SET default_transaction_isolation = 'read committed'; \
         SET default_transaction_read_only = off; SET default_transaction_deferrable = off; SET synchronous_commit = on; \
         SET tcp_keepalives_idle = 15; SET tcp_keepalives_interval = 5; SET tcp_keepalives_count = 3; \
         SET statement_timeout = {patience}; SET lock_timeout = {patience}"
    )
}

/// The limits that follow from the ttl and the duty.
pub(crate) fn limits(ttl: Duration, duty: Duty, op_timeout: Duration) -> String {
    let statement = millis((ttl / 4).max(SHORTEST_STATEMENT).min(op_timeout / 2));
    format!(
        "SET idle_session_timeout = {}; SET statement_timeout = {statement}; SET lock_timeout = {}",
        millis(ttl),
        millis(duty.patience(ttl))
    )
}

/// The server counts in milliseconds; never less than what was asked for.
pub(crate) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session")
            .field("id", &self.id)
            .field("pid", &self.pid)
            .field("wire", &self.wire)
            .finish_non_exhaustive()
    }
}
