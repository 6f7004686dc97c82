//! The Redis backend of fencelock: locks among everyone who reaches a server, with waiters served in order by a push.
//!
//! ```no_run
//! # async fn example() -> Result<(), lock_core::LockError> {
//! use lock_core::Locks;
//! use lock_redis::RedisLock;
//!
//! let locks = Locks::new(RedisLock::connect("redis://localhost").await?);
//! let guard = locks.lock("stock/10000").await?;
//! println!("token {}", guard.token());
//! guard.release().await?;
//! # Ok(()) }
//! ```
//!
//! # What is promised
//!
//! One holder at a time among all who use the same server, database number and namespace. A lock is freed one ttl after the
//! last sign of life of its holder. Whoever waits is served in the order of arrival, one claim per process at a time, by
//! a push: a release costs no more however many wait, and nobody polls. A waiter that was killed is passed over.
//!
//! Tokens rise across everything: release, expiry, `FLUSHALL`, a restart without data, the promotion of a replica that
//! lacks the last writes. They are taken from a counter that never falls below the server's clock, so only a clock that
//! was set back in the same outage that lost the counter can make them fall.
//!
//! # What to know
//!
//! - **The server can forget locks**: with `FLUSHALL`, in a restart without persistence, in a failover. Their holders learn it
//!   at their next renewal, a third of a ttl later at the latest. Until then two may believe in the same lock, and only the
//!   fencing token protects the resource.
//! - **Two primaries**: if a replica is promoted while the old primary stays up, holders on the old one are never told, and its
//!   later tokens may be higher than those of the new one. [`RedisConfig::min_replicas`] makes such a primary renew nothing.
//! - **Sentinels** tell the address of the primary: `redis+sentinel://HOST,HOST/SERVICE`. Clients move over as soon as they name another one.
//! - **A Redis Cluster** is used by [`ClusterLock`], at `redis+cluster://HOST,HOST`. While the slot of a name is moved to another node, its
//!   lock can be renewed, and nothing else.
//! - **The server's clock** measures leases, as it does for all keys of Redis. Set forward by minutes, it ends leases early.
//! - **Replication** is asynchronous. [`RedisConfig::min_replicas`] makes a lost lock in a failover less likely; with the number of
//!   all replicas none is lost.
//! - **Eviction** would take locks and counters away: a server with a memory limit and an eviction policy is refused.
//! - **A stopped waiter** (SIGSTOP, or a connection that the network forgot) still counts as a receiver for two thirds of its
//!   ttl. If the lock is granted to it in that time it stays so until one ttl after its last sign of life.
//! - **A full server** grants nothing new; what is held can be renewed, released and handed on.
//! - **Reservations** (`at_least`) are the time to live of the lock's key: they survive what the key survives, and end by the server's
//!   clock.
//! - **Rights**: `docs/redis.md` of the project lists the least that a user of the server needs, and the protocol with all
//!   that can go wrong in it.
//!
//! The resource's side for data in Redis is in [`fence`].

pub mod fence;

mod address;
mod cluster;
mod config;
mod discovery;
mod failure;
mod feed;
mod fields;
mod keys;
mod line;
mod link;
mod list;
mod listeners;
mod login;
mod push;
mod record;
mod redlock;
mod replication;
mod requests;
mod reserve;
mod safety;
mod scripts;
mod sentinel;
mod server_time;
mod session;
mod transport;
mod wait;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use lock_core::{
    Attempt, Capabilities, Claim, DistributedLock, Holder, Lease, LockError, LockName, Released, Renewal, Scope,
    ServerInfo, Wait,
};

pub use cluster::{ClusterConfig, ClusterLock};
pub use config::RedisConfig;
/// The version of the client library that [`fence`] and [`RedisConfig::from_client`] work with.
pub use redis;
pub use redlock::{RedlockConfig, RedlockLock};

use requests::OnBusy;
use session::Session;

/// Locks on a Redis server.
///
/// Every client has one connection, which is made again when it breaks; clones share it. Dropping the last clone
/// closes it and leaves what it held to expire; [`close`](DistributedLock::close) lets go of it.
#[derive(Clone, Debug)]
pub struct RedisLock {
    session: Arc<Session>,
}

impl RedisLock {
    /// Connects to the server at an address such as `redis://user:password@host:6379/0`; see [`RedisConfig::from_url`].
    ///
    /// # Errors
    ///
    /// As [`RedisConfig::from_url`] and [`RedisConfig::connect`].
    pub async fn connect(url: impl AsRef<str>) -> Result<Self, LockError> {
        RedisConfig::from_url(url.as_ref())?.connect().await
    }

    pub(crate) fn new(session: Session) -> Self {
        Self {
            session: Arc::new(session),
        }
    }

    pub(crate) fn session(&self) -> &Arc<Session> {
        &self.session
    }
}

#[async_trait]
impl DistributedLock for RedisLock {
    fn capabilities(&self) -> Capabilities {
        Capabilities::new(Scope::Server)
            .with_op_timeout(self.session.settings().op_timeout)
            .with_fairness()
            .with_inspection()
            .with_reservations()
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, LockError> {
        let asking = async {
            let answer = self.session.try_for(claim).await?;
            self.session.attempt(answer).await
        };
        self.session.limited("acquire", asking).await
    }

    async fn renew(&self, lease: &Lease) -> Result<Renewal, LockError> {
        // A lease without a claim is not one of ours.
        let Some(claim) = lease.claim() else {
            return Ok(Renewal::NotHeld);
        };
        self.session.limited("renew", self.session.renew(claim)).await
    }

    async fn release(&self, claim: &Claim, keep: Option<Duration>) -> Result<Released, LockError> {
        let token = self.session.listeners().token(claim.owner());
        let asking = self.session.twice(|link, lost| async move {
            let released = self.session.release_on(&link, claim, keep).await?;
            self.session.settle(&link, claim, token, released, lost).await
        });
        self.session.limited("release", asking).await
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Attempt, LockError> {
        if wait.is_over(self.session.clock().now()) {
            return self.try_acquire(claim).await;
        }
        self.session.wait(claim, wait, OnBusy::Queue).await
    }

    async fn reserve(&self, claim: &Claim, length: Duration) -> Result<Renewal, LockError> {
        let asking = self.session.reserve(claim, length);
        self.session.limited("reservation", asking).await
    }

    async fn holders(&self, name: &LockName) -> Result<Vec<Holder>, LockError> {
        let asking = async {
            let link = self.session.link().await?;
            let holders = self.session.holders_on(&link, std::slice::from_ref(name)).await?;
            holders.into_iter().next().unwrap_or(Ok(None))
        };
        let holder = self.session.limited("asking who holds a lock", asking).await?;
        Ok(holder.into_iter().collect())
    }

    async fn list(&self, prefix: &str) -> Result<Vec<Holder>, LockError> {
        self.session.list(prefix).await
    }

    async fn force_release(&self, name: &LockName) -> Result<Vec<Holder>, LockError> {
        let asking = async { self.session.force_release_on(&self.session.link().await?, name).await };
        let forced = self.session.limited("forced release", asking).await?;
        Ok(forced.into_iter().collect())
    }

    async fn server_info(&self) -> Result<ServerInfo, LockError> {
        let min_replicas = self.session.settings().min_replicas;
        let asking = async {
            let link = self.session.link().await?;
            link.use_rare_commands(&self.session.settings().keys).await?;
            let warnings = link.look().await?.warnings(min_replicas);
            Ok(link.version().clone().with_warnings(warnings))
        };
        self.session
            .limited("asking for the settings of the server", asking)
            .await
    }

    async fn close(&self) -> Result<(), LockError> {
        self.session.close().await
    }
}
