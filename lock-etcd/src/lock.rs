//! The backend.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use etcd_client::Compare;
use lock_core::{
    Attempt, Capabilities, Claim, DistributedLock, Holder, Lease, LockError, LockGuard, LockName, Released, Renewal,
    Scope, ServerInfo, Wait,
};

use crate::client::Client;
use crate::config::EtcdConfig;
use crate::connection::Connection;
use crate::registry::After;

/// Locks in an etcd cluster.
///
/// Every client has one connection at a time, which is made again when it breaks; clones share it. [`close`](DistributedLock::close)
/// revokes its leases and closes it, so that nothing of the client is left on the server. Dropping the last clone does the same in
/// the background, if the process lives on for long enough; what could not be revoked ends with its ttl.
#[derive(Clone, Debug)]
pub struct EtcdLock {
    client: Arc<Client>,
}

/// The shortest ttl that etcd grants with its default settings.
pub(crate) const MIN_TTL: Duration = Duration::from_secs(2);
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
    /// Such a transaction is refused as soon as the server has freed the lock, whether another client holds it or not. It needs the
    /// right to read the lock's key. A lock whose guard was asked for it goes back to the server when it is released, instead of to the next
    /// holder of this client. For data elsewhere, and for locks of another backend, see [`fence`](crate::fence).
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
        self.client.compares(guard)
    }

    pub(crate) fn new(client: Client) -> Self {
        Self {
            client: Arc::new(client),
        }
    }

    pub(crate) fn client(&self) -> &Arc<Client> {
        &self.client
    }
}

#[async_trait]
impl DistributedLock for EtcdLock {
    fn capabilities(&self) -> Capabilities {
        Capabilities::new(Scope::Server)
            .with_ttl_range(MIN_TTL, MAX_TTL)
            .with_ttl_granularity(Duration::from_secs(1))
            .with_op_timeout(self.client.settings().op_timeout)
            .with_fairness()
            .with_shared_leases()
            .with_inspection()
            .with_reservations()
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, LockError> {
        let client = &*self.client;
        let asking = |connection: Arc<Connection>, _| async move { client.try_on(&connection, claim).await };
        client.call("acquire", asking).await
    }

    async fn renew(&self, lease: &Lease) -> Result<Renewal, LockError> {
        let client = &self.client;
        let asking = |connection: Arc<Connection>, _| async move { client.renew_on(&connection, lease).await };
        client.call("renew", asking).await
    }

    async fn release(&self, claim: &Claim, keep: Option<Duration>) -> Result<Released, LockError> {
        let after = keep.map_or(After::Free, |rest| After::Reserved(self.client.clock().now() + rest));
        self.client.release(claim, after).await
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Attempt, LockError> {
        if wait.is_over(self.client.clock().now()) {
            return self.try_acquire(claim).await;
        }
        self.client.wait(claim, wait).await
    }

    async fn reserve(&self, claim: &Claim, length: Duration) -> Result<Renewal, LockError> {
        let client = &*self.client;
        let asking =
            |connection: Arc<Connection>, _| async move { client.reserve_on(&connection, claim, length).await };
        client.call("reservation", asking).await
    }

    async fn holders(&self, name: &LockName) -> Result<Vec<Holder>, LockError> {
        let client = &*self.client;
        let asking = |connection: Arc<Connection>, _| async move { client.holder_on(&connection, name).await };
        let holder = client.call("asking who holds a lock", asking).await?;
        Ok(holder.into_iter().collect())
    }

    async fn list(&self, prefix: &str) -> Result<Vec<Holder>, LockError> {
        self.client.list(prefix).await
    }

    async fn force_release(&self, name: &LockName) -> Result<Vec<Holder>, LockError> {
        let client = &*self.client;
        let begun = Mutex::default();
        let asking = |connection: Arc<Connection>, _| {
            let begun = &begun;
            async move { client.force_release_on(&connection, name, begun).await }
        };
        Ok(client.call("forced release", asking).await?.into_iter().collect())
    }

    async fn server_info(&self) -> Result<ServerInfo, LockError> {
        let client = &*self.client;
        let asking = |connection: Arc<Connection>, _| async move {
            let warnings = client.warnings_on(&connection).await?;
            Ok(connection.version().clone().with_warnings(warnings))
        };
        client.call("looking at the settings of etcd", asking).await
    }

    async fn close(&self) -> Result<(), LockError> {
        self.client.close().await
    }
}
