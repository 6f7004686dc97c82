//! Locks on a Redis Cluster.
//!
//! Each name is served by the primary of its slot, by the same scripts as on a server of its own. What differs: requests follow the slot
//! where it goes, and messages to waiters go over sharded channels in that slot, which only its node and the replicas of that hear of.

mod address;
mod call;
mod config;
mod member;
mod redirect;
mod slots;
mod subscriptions;
mod topology;
mod wait;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::try_join_all;
use lock_core::{
    Attempt, Capabilities, Claim, DistributedLock, FencingToken, Holder, Lease, LockError, LockName, Released, Renewal,
    Scope, ServerInfo, Wait,
};

pub(crate) use address::{needs_cluster_address, not_a_cluster};
pub use config::ClusterConfig;
pub(crate) use member::Member;
pub(crate) use subscriptions::Subscriptions;

use crate::failure::Failure;
use crate::requests::{Answer, OnBusy};
use crate::session::Session;
use call::Try;
use slots::slot;
use topology::Topology;

/// How many holders a list asks for at a time.
const ASKED: usize = 64;

/// Locks on a Redis Cluster.
///
/// Clones share the connections: one to each primary that serves a name in use, and one more for messages if a name there is waited
/// for. Dropping the last clone closes them and leaves what it held to expire; [`close`](DistributedLock::close) releases it.
#[derive(Clone, Debug)]
pub struct ClusterLock {
    topology: Arc<Topology>,
}

impl ClusterLock {
    /// Connects to the cluster at an address such as `redis+cluster://host1,host2`; see [`ClusterConfig::from_url`].
    ///
    /// # Errors
    ///
    /// As [`ClusterConfig::from_url`] and [`ClusterConfig::connect`].
    pub async fn connect(url: impl AsRef<str>) -> Result<Self, LockError> {
        ClusterConfig::from_url(url.as_ref())?.connect().await
    }

    fn new(topology: Topology) -> Self {
        Self {
            topology: Arc::new(topology),
        }
    }

    fn topology(&self) -> &Arc<Topology> {
        &self.topology
    }

    /// Sends a request about a name, again and again until its node has answered.
    async fn call<T, F>(
        &self,
        operation: &'static str,
        name: &LockName,
        work: impl Fn(Try) -> F,
    ) -> Result<T, LockError>
    where
        F: Future<Output = Result<T, Failure>>,
    {
        let topology = self.topology();
        topology.call(operation, topology.slot(name), true, work).await
    }

    /// The token of the grant that the claim holds, as far as this client knows.
    fn token(&self, claim: &Claim) -> Option<FencingToken> {
        self.topology.identity().listeners.token(claim.owner())
    }

    /// Asks every primary; once more if one of them has left the cluster meanwhile.
    async fn ask_all<T, F>(&self, ask: impl Fn(Arc<Session>) -> F) -> Result<Vec<T>, LockError>
    where
        F: Future<Output = Result<T, LockError>>,
    {
        match self.ask_known(&ask).await {
            Err(LockError::Closed { .. }) if !self.topology.is_closed() => self.ask_known(&ask).await,
            done => done,
        }
    }

    async fn ask_known<T, F>(&self, ask: &impl Fn(Arc<Session>) -> F) -> Result<Vec<T>, LockError>
    where
        F: Future<Output = Result<T, LockError>>,
    {
        let topology = self.topology();
        topology.refresh(topology.refreshes()).await?;
        let sessions = topology.primaries();
        let sessions = sessions.iter().map(|primary| topology.session(primary, false));
        let sessions: Vec<_> = sessions.collect::<Result<_, _>>()?;
        try_join_all(sessions.into_iter().map(ask)).await
    }

    /// Who holds the name; none also if its key is of another type.
    async fn listed(&self, name: &LockName) -> Result<Vec<Holder>, LockError> {
        match self.holders(name).await {
            Err(error @ LockError::Configuration { .. }) => {
                tracing::warn!(target: "fencelock", "left out of the list: {error}");
                Ok(Vec::new())
            }
            holders => holders,
        }
    }
}

#[async_trait]
impl DistributedLock for ClusterLock {
    fn capabilities(&self) -> Capabilities {
        Capabilities::new(Scope::Server)
            .with_op_timeout(self.topology.op_timeout())
            .with_fairness()
            .with_inspection()
            .with_reservations()
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, LockError> {
        let asking = |Try { session, lost }: Try| async move {
            let link = session.link().await?;
            let (answer, _) = session.ask_for(&link, claim, OnBusy::Fail).await?;
            if lost && matches!(answer, Answer::Busy(_)) {
                // An earlier request may be carried out yet.
                session.release_on(&link, claim, None).await?;
            }
            session.attempt(answer).await
        };
        self.call("acquire", claim.name(), asking).await
    }

    async fn renew(&self, lease: &Lease) -> Result<Renewal, LockError> {
        // A lease without a claim is not one of ours.
        let Some(claim) = lease.claim() else {
            return Ok(Renewal::NotHeld);
        };
        let asking = |Try { session, .. }: Try| async move { session.renew(claim).await };
        self.call("renew", claim.name(), asking).await
    }

    async fn release(&self, claim: &Claim, keep: Option<Duration>) -> Result<Released, LockError> {
        let token = self.token(claim);
        let asking = |Try { session, lost }: Try| async move {
            let link = session.link().await?;
            let released = session.release_on(&link, claim, keep).await?;
            session.settle(&link, claim, token, released, lost).await
        };
        self.call("release", claim.name(), asking).await
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Attempt, LockError> {
        if wait.is_over(self.topology.identity().clock.now()) {
            return self.try_acquire(claim).await;
        }
        self.topology().wait(claim, wait).await
    }

    async fn reserve(&self, claim: &Claim, length: Duration) -> Result<Renewal, LockError> {
        let asking = |Try { session, .. }: Try| async move { session.reserve(claim, length).await };
        self.call("reservation", claim.name(), asking).await
    }

    async fn holders(&self, name: &LockName) -> Result<Vec<Holder>, LockError> {
        let asking = |Try { session, .. }: Try| async move {
            let link = session.link().await?;
            let holders = session.holders_on(&link, std::slice::from_ref(name)).await?;
            holders.into_iter().next().unwrap_or(Ok(None))
        };
        let holder = self.call("asking who holds a lock", name, asking).await?;
        Ok(holder.into_iter().collect())
    }

    async fn list(&self, prefix: &str) -> Result<Vec<Holder>, LockError> {
        let names = self.ask_all(|session| async move { session.names(prefix).await });
        let mut names = names.await?.concat();
        let unserved = self.topology.unserved();
        if unserved > 0 {
            let message = format!(
                "the list would not be complete: {unserved} of {} slots have no node. Look at CLUSTER SHARDS, and assign them",
                slots::SLOTS
            );
            return Err(LockError::unavailable("listing locks", message));
        }
        names.sort_unstable();
        // A scan may come by a name twice, and while a slot is moved, two nodes have names in it.
        names.dedup();
        let mut holders = Vec::new();
        for names in names.chunks(ASKED) {
            let asking = names.iter().map(|name| self.listed(name));
            holders.extend(try_join_all(asking).await?.into_iter().flatten());
        }
        Ok(holders)
    }

    async fn force_release(&self, name: &LockName) -> Result<Vec<Holder>, LockError> {
        let topology = self.topology();
        let asking =
            |Try { session, .. }: Try| async move { session.force_release_on(&session.link().await?, name).await };
        // A second one would end the hold of the next.
        let forced = topology.call("forced release", topology.slot(name), false, asking);
        Ok(forced.await?.into_iter().collect())
    }

    async fn server_info(&self) -> Result<ServerInfo, LockError> {
        const OPERATION: &str = "asking for the settings of the servers";
        let topology = self.topology();
        let nodes = self.ask_all(|session| async move {
            let asking = async {
                let link = session.link().await?;
                link.ask_moving(&redis::cmd("PING")).await?;
                let warnings = link.look().await?.warnings(session.settings().min_replicas);
                Ok((link.version().to_string(), warnings))
            };
            let (version, warnings) = session.limited(OPERATION, asking).await?;
            let of_node = |warning| format!("node {}: {warning}", session.settings().server);
            Ok((version, warnings.into_iter().map(of_node).collect::<Vec<_>>()))
        });
        let (mut versions, warnings): (Vec<_>, Vec<_>) = nodes.await?.into_iter().unzip();
        let (primaries, mut warnings) = (versions.len(), warnings.concat());
        versions.sort_unstable();
        versions.dedup();
        let unserved = topology.unserved();
        if unserved > 0 {
            warnings.push(format!(
                "{unserved} of {} slots have no node, and no name in them can be locked",
                slots::SLOTS
            ));
        }
        let keys = topology.keys();
        let asking = |Try { session, .. }: Try| async move {
            session.link().await?.use_rare_commands(&session.settings().keys).await
        };
        topology.call(OPERATION, slot(&keys.unused()), true, asking).await?;
        let product = format!("Redis Cluster of {primaries} primaries:");
        Ok(ServerInfo::new(product, versions.join(", ")).with_warnings(warnings))
    }

    async fn close(&self) -> Result<(), LockError> {
        self.topology().release_all().await
    }
}
