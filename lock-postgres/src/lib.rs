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
//! long. A thousand locks with one ttl are one connection and one heartbeat every third of it. Ttls are rounded up to a few
//! classes, by half at most, so that locks share connections. Locking and unlocking a free
//! name are one round trip each, and write no log.
//!
//! Tokens rise across everything: release, expiry, a crash of the server or of one of its processes, a restart, a dump that
//! is restored, an older copy, the promotion of a standby that lags. The last three take data back: there the server's clock
//! must be above the last token, which it is unless the clock was behind at an earlier start. `docs/postgres.md` of the project
//! has the exact conditions.
//!
//! # What to know
//!
//! - **A session can be ended** by an administrator, by a restart or a failover. Its holders are told at once, if the server or
//!   the network can tell, and otherwise at their deadline. The lock may be held by another by then, and only the fencing
//!   token protects the resource.
//! - **One session carries many locks**: a thousand with ttls of one class, and the next ones go to another. If it ends they all
//!   end. [`force_release`](DistributedLock::force_release) asks the holder to give the one lock up; it ends the session,
//!   *with all of its locks*, only if the holder does not answer. [`Holder::also_released`] says how many others went with it.
//! - **Names** are not stored: the server has 64 bits of a hash. Two names that share them wait for each other. Inspection asks
//!   the clients, which know names, tokens, labels and times. A client that does not answer within a third of `op_timeout` is
//!   shown by its sessions: key, host, process, and the label of a session that holds one lock.
//! - **Waiters** of different processes are served in no particular order. One of them is woken when the lock is released; a lock
//!   whose holder was killed is found free within 750 ms. A client that holds nothing waits on one connection, whatever it waits
//!   for.
//! - **Poolers** are refused, since those that share sessions among clients (PgBouncer with `pool_mode` transaction or statement)
//!   let two hold the same lock. One with `pool_mode = session` can be used if that is said:
//!   [`PostgresConfig::session_pooler`].
//! - **Reservations** ([`at_least`](lock_core::LockRequest::at_least)) are rows, and survive a crash of the server. They end by its clock. A
//!   request costs one round trip more and waits for the server's disk.
//! - **Rights**: [`schema_sql`] has the least that a role needs.
//!
//! The resource's side for data in Postgres is in [`fence`]; a lock that ends with a transaction of yours is
//! [`PostgresLock::in_transaction`].

pub mod fence;

mod address;
mod backend_key;
mod carried;
mod choice;
mod commands;
mod config;
mod connect;
mod counter;
mod failure;
mod holdings;
mod inquiry;
mod inspect;
mod keys;
mod notifications;
mod open;
mod password;
mod pool;
mod proof;
mod record;
mod requests;
mod reserve;
mod rows;
mod safety;
mod schema;
mod session;
mod sessions;
mod settings;
#[cfg(feature = "tls")]
mod tls;
mod tokens;
mod transaction;
mod ttl_class;
mod wait;
mod wire;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use lock_core::{
    Attempt, Capabilities, Claim, DistributedLock, Holder, Lease, LockError, LockName, Released, Renewal, Scope,
    ServerInfo, Wait,
};
use tokio_util::sync::CancellationToken;

pub use config::{PostgresConfig, Tls};
pub use schema::schema_sql;
/// The version of the client library that [`fence`] and [`PostgresConfig::new`] work with.
pub use tokio_postgres;
pub use transaction::TransactionSql;

use sessions::Sessions;
use settings::Settings;

/// Locks in a Postgres database.
///
/// A client has one connection for each class of ttls and each thousand locks, one for each lock that is not to be renewed, and at
/// most two that are not in use; clones share them. Dropping the last clone closes them, and with them whatever it held;
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

    /// The key of the advisory lock that a name stands for, for those who lock by SQL of their own. That does not respect
    /// [reservations](lock_core::LockRequest::at_least), unless it asks for them: [`TransactionSql::reserved`].
    #[must_use]
    pub fn key(&self, name: &LockName) -> i64 {
        self.sessions.settings.keys.of(name)
    }
}

/// One call that is worked to its end.
macro_rules! run {
    ($self:ident, $operation:literal, $call:ident($($argument:ident),*)) => {{
        let sessions = Arc::clone(&$self.sessions);
        $(let $argument = $argument.to_owned();)*
        $self
            .sessions
            .run($operation, async move { sessions.$call($(&$argument),*).await })
            .await
    }};
}

#[async_trait]
impl DistributedLock for PostgresLock {
    fn capabilities(&self) -> Capabilities {
        Capabilities::new(Scope::Server)
            .with_op_timeout(self.sessions.settings.config.op_timeout)
            // Whoever waits elsewhere is woken, and let go first.
            .with_give_way(Duration::ZERO)
            .with_shared_leases()
            .with_inspection()
            .with_reservations()
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, LockError> {
        self.sessions.may_write()?;
        let unwanted = CancellationToken::new();
        let (_wanted, unwanted) = (unwanted.clone().drop_guard(), &unwanted);
        run!(self, "acquire", try_acquire(claim, unwanted))
    }

    async fn renew(&self, lease: &Lease) -> Result<Renewal, LockError> {
        self.sessions.may_write()?;
        run!(self, "renew", renew(lease))
    }

    /// A reservation stays as it was made: the server counts it from its statement, and `keep` counts from the answer to that.
    async fn release(&self, claim: &Claim, keep: Option<Duration>) -> Result<Released, LockError> {
        self.sessions.may_write()?;
        match keep {
            Some(_) => run!(self, "release", release_reserved(claim)),
            None => run!(self, "release", release(claim)),
        }
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Attempt, LockError> {
        self.sessions.may_write()?;
        let unwanted = CancellationToken::new();
        let _wanted = unwanted.clone().drop_guard();
        let (sessions, claim) = (Arc::clone(&self.sessions), claim.clone());
        let waiting = self
            .sessions
            .unlimited("acquire", async move { sessions.wait(&claim, wait, &unwanted).await });
        tokio::select! {
            biased;
            attempt = waiting => attempt,
            () = self.sessions.closed() => Err(LockError::closed()),
        }
    }

    async fn reserve(&self, claim: &Claim, length: Duration) -> Result<Renewal, LockError> {
        self.sessions.may_write()?;
        let length = &length;
        run!(self, "reservation", reserve(claim, length))
    }

    async fn holders(&self, name: &LockName) -> Result<Vec<Holder>, LockError> {
        let holder: Result<_, LockError> = run!(self, "asking who holds a lock", holder(name));
        Ok(holder?.into_iter().collect())
    }

    async fn list(&self, prefix: &str) -> Result<Vec<Holder>, LockError> {
        run!(self, "listing locks", list(prefix))
    }

    async fn force_release(&self, name: &LockName) -> Result<Vec<Holder>, LockError> {
        self.sessions.may_write()?;
        let forced: Result<_, LockError> = run!(self, "forced release", force_release(name));
        Ok(forced?.into_iter().collect())
    }

    async fn server_info(&self) -> Result<ServerInfo, LockError> {
        run!(self, "asking for the version", version())
    }

    async fn close(&self) -> Result<(), LockError> {
        self.sessions.close();
        Ok(())
    }
}
