//! The Postgres backend of fencelock: advisory locks on sessions that the server ends by itself, with fencing tokens.
//!
//! ```no_run
//! # async fn example() -> Result<(), lock_core::LockError> {
//! use lock_core::Locks;
//! use lock_postgres::PostgresLock;
//!
//! let locks = Locks::new(PostgresLock::connect("postgres://localhost/shop").await?);
//! let guard = locks.lock("stock/10000").await?;
//! println!("token {}", guard.token());
//! guard.release().await?;
//! # Ok(()) }
//! ```
//!
//! # What is promised
//!
//! One holder at a time among all who use the same database and namespace. A lock is freed one ttl after the last sign of
//! life of its holder, and at once when its process ends: the server itself ends a session that has been silent for that
//! long. A thousand locks with one ttl are one connection and one heartbeat every third of it. Locking and unlocking a free
//! name are one round trip each, and write no log.
//!
//! Tokens rise across everything: release, expiry, a crash of the server or of one of its processes, a restart, a dump that
//! is restored, an older copy, the promotion of a standby that lags. `docs/postgres.md` of the project says how, and where
//! a clock that was set back matters.
//!
//! # What to know
//!
//! - **A session can be ended** by an administrator, by a restart or a failover. Its holders are told at once, if the server or
//!   the network can tell, and otherwise at their deadline. The lock may be held by another by then, and only the fencing
//!   token protects the resource.
//! - **One session carries many locks**: those with the same ttl that were free when they were asked for. If it ends they all
//!   end. [`force_release`](DistributedLock::force_release) ends the session that holds the name, *with all of its locks*.
//! - **Names** are not stored: the server has 64 bits of a hash. Two names that share them wait for each other. Inspection
//!   shows sessions: host, process, and the label of a session that holds one lock.
//! - **Waiters** of different processes are served in no particular order, one of them as soon as the lock is free. A client
//!   waits on two connections at most, whatever it waits for; a lock that was waited for keeps its connection until it is
//!   released.
//! - **Poolers** that share sessions among clients (PgBouncer with `pool_mode` transaction or statement) are refused. With
//!   `pool_mode = session` they do no harm.
//! - **Rights**: [`schema_sql`] has the least that a role needs.
//!
//! The resource's side for data in Postgres is in [`fence`]; a lock that ends with a transaction of yours is
//! [`PostgresLock::in_transaction`].

pub mod fence;

mod address;
mod config;
mod counter;
mod failure;
mod holdings;
mod inspect;
mod keys;
mod password;
mod requests;
mod rows;
mod safety;
mod schema;
mod session;
mod sessions;
#[cfg(feature = "tls")]
mod tls;
mod to_its_end;
mod transaction;
mod wait;
mod wire;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use lock_core::{
    Attempt, BackendVersion, Capabilities, Claim, DistributedLock, HandOver, Holder, Lease, LockError, LockName,
    Released, Renewal, Scope, Stamp,
};
use tokio_util::sync::CancellationToken;

pub use config::{PostgresConfig, Tls};
pub use schema::schema_sql;
/// The version of the client library that [`fence`] and [`PostgresConfig::new`] work with.
pub use tokio_postgres;
pub use transaction::TransactionSql;

use sessions::{Sessions, Settings};

/// Locks in a Postgres database.
///
/// A client has one connection for each ttl that is in use, one for each lock that was waited for or is not to be renewed,
/// and at most two more; clones share them. Dropping the last clone closes them, and with them whatever it held;
/// [`close`](DistributedLock::close) does the same.
#[derive(Clone, Debug)]
pub struct PostgresLock {
    sessions: Arc<Sessions>,
}

impl PostgresLock {
    /// Connects to the server at an address such as `postgres://user:password@host:5432/database`; see
    /// [`PostgresConfig::from_url`].
    ///
    /// # Errors
    ///
    /// As [`PostgresConfig::from_url`] and [`PostgresConfig::connect`].
    pub async fn connect(url: impl AsRef<str>) -> Result<Self, LockError> {
        PostgresConfig::from_url(url.as_ref())?.connect().await
    }

    pub(crate) fn new(settings: Settings) -> Self {
        Self {
            sessions: Arc::new(Sessions::new(settings)),
        }
    }

    pub(crate) fn sessions(&self) -> &Arc<Sessions> {
        &self.sessions
    }

    /// The key of the advisory lock that a name stands for, for those who lock by SQL of their own.
    #[must_use]
    pub fn key(&self, name: &LockName) -> i64 {
        self.sessions.settings.keys.of(name)
    }
}

/// One call that is worked to its end. With `unwanted`, which comes last, it takes a lock only if somebody still wants it.
macro_rules! run {
    ($self:ident, $operation:literal, $call:ident($($argument:ident),*)) => {{
        let sessions = Arc::clone(&$self.sessions);
        $(let $argument = $argument.to_owned();)*
        $self
            .sessions
            .run($operation, async move { sessions.$call($(&$argument),*).await })
            .await
    }};
    ($self:ident, $operation:literal, $call:ident($($argument:ident),*; unwanted)) => {{
        let unwanted = CancellationToken::new();
        let _wanted = unwanted.clone().drop_guard();
        let unwanted = &unwanted;
        run!($self, $operation, $call($($argument,)* unwanted))
    }};
}

#[async_trait]
impl DistributedLock for PostgresLock {
    fn capabilities(&self) -> Capabilities {
        Capabilities::new(Scope::Server)
            .with_op_timeout(self.sessions.settings.op_timeout)
            // The server wakes whoever waits there.
            .with_give_way(Duration::ZERO)
            .with_shared_leases()
            .with_inspection()
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, LockError> {
        run!(self, "acquire", try_acquire(claim; unwanted))
    }

    async fn renew(&self, lease: &Lease) -> Result<Renewal, LockError> {
        run!(self, "renew", renew(lease))
    }

    async fn release(&self, claim: &Claim) -> Result<Released, LockError> {
        run!(self, "release", release(claim))
    }

    async fn acquire(&self, claim: &Claim, deadline: Option<Stamp>) -> Result<Attempt, LockError> {
        let unwanted = CancellationToken::new();
        let _wanted = unwanted.clone().drop_guard();
        let (sessions, claim) = (Arc::clone(&self.sessions), claim.clone());
        let waiting = self.sessions.unlimited(
            "acquire",
            async move { sessions.wait(&claim, deadline, &unwanted).await },
        );
        tokio::select! {
            biased;
            attempt = waiting => attempt,
            () = self.sessions.closed() => Err(LockError::Closed),
        }
    }

    async fn hand_over(&self, from: &Claim, to: &Claim) -> Result<HandOver, LockError> {
        run!(self, "hand-over", hand_over(from, to; unwanted))
    }

    async fn holder(&self, name: &LockName) -> Result<Option<Holder>, LockError> {
        run!(self, "asking who holds a lock", holder(name))
    }

    async fn list(&self, prefix: &str) -> Result<Vec<Holder>, LockError> {
        run!(self, "listing locks", list(prefix))
    }

    async fn force_release(&self, name: &LockName) -> Result<Option<Holder>, LockError> {
        run!(self, "forced release", force_release(name))
    }

    async fn backend_version(&self) -> Result<BackendVersion, LockError> {
        run!(self, "asking for the version", version())
    }

    async fn close(&self) -> Result<(), LockError> {
        self.sessions.close();
        Ok(())
    }

    fn queue_key(&self, name: &LockName) -> Arc<str> {
        keys::shown(self.key(name)).into()
    }
}
