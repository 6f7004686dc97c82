//! The etcd backend of fencelock: locks among everyone who reaches a cluster, on leases and transactions.
//!
//! ```no_run
//! # async fn example() -> Result<(), lock_core::LockError> {
//! use lock_core::Locks;
//! use lock_etcd::EtcdLock;
//!
//! let locks = Locks::new(EtcdLock::connect("etcd://etcd-1:2379,etcd-2:2379,etcd-3:2379").await?);
//! let guard = locks.lock("stock/10000").await?;
//! println!("token {}", guard.token());
//! guard.release().await?;
//! # Ok(()) }
//! ```
//!
//! # To build it
//!
//! The crate `etcd-client` runs `protoc`, the compiler of Protocol Buffers, when it is built. Install it (Debian:
//! `apt-get install protobuf-compiler`; macOS: `brew install protobuf`), or set the environment variable `PROTOC` to where it
//! is. On Linux and macOS this crate brings one along; to use that, copy `tools/protoc` from fencelock's repository into
//! yours, and say so in `.cargo/config.toml`:
//!
//! ```toml
//! [env]
//! PROTOC = { value = "tools/protoc", relative = true }
//! ```
//!
//! # What is promised
//!
//! One holder at a time among all who use the same cluster and namespace. A lock is freed one ttl after the last sign of life of
//! its holder, and about half a second later at the most; each change of the leader gives it another ttl. Whoever waits is served in the order of arrival, one claim per
//! process at a time, and told by a push: a release wakes one waiter, however many there are, and nobody polls.
//!
//! Tokens rise across release, expiry, elections, restarts, compaction, the replacement of members, the restore of an old
//! snapshot, a new cluster in the place of the old one, and a base that was lowered or deleted by hand. While the cluster keeps its state
//! and its base, no clock matters. If the state or the base is lost, then tokens can fall only if a clock was set back: if the base is ahead
//! of the clocks of those who connect next.
//!
//! # What to know
//!
//! - **A majority of members** must be there: without it nothing is granted, and what is held is lost at its deadline.
//! - **Leases are shared**: all locks of one client with the same ttl are kept by one lease. If somebody revokes it, all of them are
//!   lost, and told so at once.
//! - **A restore** brings back the locks of the snapshot. Whoever got a lock after it was taken learns the loss at the next
//!   renewal, a third of a ttl later at the latest. Until then two may believe in the same lock, and only the fencing token
//!   protects the resource.
//! - **ttls** are rounded up to whole seconds, and are two seconds at the least, or one and a half times the `election-timeout` of
//!   etcd.
//! - **Reservations** ([`LockRequest::at_least`](lock_core::LockRequest::at_least)) outlive the holder and its client. Each change of the
//!   leader begins their time anew.
//! - **Proxies** for HTTP/2 or gRPC between a client and the members do not work; `etcd grpc-proxy` is refused. Proxies for TCP do.
//! - **A killed or stopped waiter** holds up those behind it until its lease ends, one ttl at the most.
//! - **Compaction** should be on (`--auto-compaction-retention` of etcd, which is off by default): the history grows with every
//!   write, and taking a name costs about a microsecond more for each client that took it since the last one, not for each time.
//! - **A full cluster** (NOSPACE) grants a lock only to who is in its queue already; what is held can be renewed and released.
//! - **Rights**: `docs/etcd.md` of the project lists the least that a role needs, and the protocol with all that can go
//!   wrong in it.
//!
//! The resource's side for data in etcd is in [`fence`].

pub mod fence;

mod address;
mod care;
mod config;
mod failure;
mod inspect;
mod keys;
mod leases;
mod line;
mod link;
mod patience;
mod queue;
mod record;
mod requests;
mod reservations;
mod safety;
mod session;
mod slots;
mod state;
mod table;
mod tokens;
mod transport;
mod wait;
mod watches;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use etcd_client::Compare;
use lock_core::{
    Attempt, Capabilities, Claim, DistributedLock, Holder, Lease, LockError, LockGuard, LockName, Released, Renewal,
    Scope, ServerInfo, Wait,
};

pub use config::EtcdConfig;
/// The version of the client library that [`fence`] works with.
pub use etcd_client;

use link::Link;
use requests::After;
use session::Session;

/// Locks in an etcd cluster.
///
/// Every client has one connection at a time, which is made again when it breaks; clones share it. [`close`](DistributedLock::close)
/// revokes its leases and closes it, so that nothing of the client is left on the server. Dropping the last clone does the same in
/// the background, if the process lives on for long enough; what could not be revoked ends with its ttl.
#[derive(Clone, Debug)]
pub struct EtcdLock {
    session: Arc<Session>,
}

/// The shortest ttl that etcd grants with its default settings.
const MIN_TTL: Duration = Duration::from_secs(2);
/// The longest ttl that etcd grants.
const MAX_TTL: Duration = Duration::from_secs(9_000_000_000);

impl EtcdLock {
    /// Connects to the cluster at an address such as `etcd://user:password@host1:2379,host2:2379`; see
    /// [`EtcdConfig::from_url`].
    ///
    /// # Errors
    ///
    /// As [`EtcdConfig::from_url`] and [`EtcdConfig::connect`].
    pub async fn connect(url: impl AsRef<str>) -> Result<Self, LockError> {
        EtcdConfig::from_url(url.as_ref())?.connect().await
    }

    /// What must be true in a transaction of yours, in the cluster of the lock, for the lock to be held at that moment; `None`
    /// if the guard is not held by this client.
    ///
    /// Such a transaction is refused as soon as the server has let go of the lock, whoever may have it next. It needs the
    /// right to read the lock's key. A lock whose guard was asked for it goes back to the server when it is released, instead of to the next
    /// holder of this client. For data elsewhere, and for locks of another backend, see [`fence`].
    ///
    /// ```no_run
    /// use lock_core::{LockError, Locks};
    /// use lock_etcd::EtcdLock;
    /// use lock_etcd::etcd_client::{Client, Txn, TxnOp};
    ///
    /// # async fn example(mut etcd: Client) -> Result<(), Box<dyn std::error::Error>> {
    /// let lock = EtcdLock::connect("etcd://localhost").await?;
    /// let guard = Locks::new(lock.clone()).lock("stock/10000").await?;
    /// let held = lock.compares(&guard).ok_or("the lock is lost")?;
    /// let txn = Txn::new().when(held).and_then([TxnOp::put("stock/10000", "99", None)]);
    /// if !etcd.txn(txn).await?.succeeded() {
    ///     return Err("the lock is lost".into());
    /// }
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn compares(&self, guard: &LockGuard) -> Option<Vec<Compare>> {
        self.session.compares(guard)
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
impl DistributedLock for EtcdLock {
    fn capabilities(&self) -> Capabilities {
        Capabilities::new(Scope::Server)
            .with_ttl_range(MIN_TTL, MAX_TTL)
            .with_ttl_granularity(Duration::from_secs(1))
            .with_op_timeout(self.session.settings().op_timeout)
            .with_fairness()
            .with_shared_leases()
            .with_inspection()
            .with_reservations()
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, LockError> {
        let session = self.session();
        let asking = |link: Arc<Link>| async move { session.try_on(&link, claim).await };
        session.on_link("acquire", asking).await
    }

    async fn renew(&self, lease: &Lease) -> Result<Renewal, LockError> {
        let session = self.session();
        let asking = |link: Arc<Link>| async move { session.renew_on(&link, lease).await };
        session.on_link("renew", asking).await
    }

    async fn release(&self, claim: &Claim, keep: Option<Duration>) -> Result<Released, LockError> {
        let after = keep.map_or(After::Free, |rest| After::Reserved(self.session.clock().now() + rest));
        self.session.abandon(claim, after);
        self.session.release(claim, after).await
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Attempt, LockError> {
        if wait.is_over(self.session.clock().now()) {
            return self.try_acquire(claim).await;
        }
        self.session().wait(claim, wait).await
    }

    async fn reserve(&self, claim: &Claim, length: Duration) -> Result<Renewal, LockError> {
        let session = self.session();
        let asking = |link: Arc<Link>| async move { session.reserve_on(&link, claim, length).await };
        session.on_link("reservation", asking).await
    }

    async fn holders(&self, name: &LockName) -> Result<Vec<Holder>, LockError> {
        let session = self.session();
        let asking = |link: Arc<Link>| async move { session.holder_on(&link, name).await };
        let holder = session.on_link("asking who holds a lock", asking).await?;
        Ok(holder.into_iter().collect())
    }

    async fn list(&self, prefix: &str) -> Result<Vec<Holder>, LockError> {
        self.session.list(prefix).await
    }

    async fn force_release(&self, name: &LockName) -> Result<Vec<Holder>, LockError> {
        let session = self.session();
        let begun = Mutex::default();
        let asking = |link: Arc<Link>| {
            let begun = &begun;
            async move { session.force_release_on(&link, name, begun).await }
        };
        Ok(session.on_link("forced release", asking).await?.into_iter().collect())
    }

    async fn server_info(&self) -> Result<ServerInfo, LockError> {
        let session = self.session();
        let asking = |link: Arc<Link>| async move {
            let warnings = session.warnings_on(&link).await?;
            Ok(link.version().clone().with_warnings(warnings))
        };
        session.on_link("looking at the settings of etcd", asking).await
    }

    async fn close(&self) -> Result<(), LockError> {
        self.session.close().await
    }
}
