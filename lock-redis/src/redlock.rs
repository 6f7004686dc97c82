//! Locks on several independent servers: fenced Redlock.
//!
//! The classical algorithm (<https://redis.io/docs/latest/develop/clients/patterns/distributed-locks/>) has no fencing tokens. Here each
//! node counts tokens per name, and an acquisition is finished only when a majority of all nodes has a counter at or above its
//! token, so that every later majority knows a counter that is at least as high.

mod acquire;
mod address;
mod born;
mod campaign;
mod claims;
mod config;
mod node;
mod quorum;
mod stragglers;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::StreamExt;
use lock_core::{
    Attempt, Capabilities, Claim, DistributedLock, Holder, Lease, LockError, LockName, Released, Renewal, Scope,
    ServerInfo, Wait,
};

pub use config::RedlockConfig;
pub(crate) use node::Node;

use quorum::Quorum;

/// Locks on a majority of several independent Redis servers.
///
/// Clones share the connections, one to each node. Dropping the last clone closes them and leaves what it held to expire;
/// [`close`](DistributedLock::close) releases it.
#[derive(Clone, Debug)]
pub struct RedlockLock {
    quorum: Arc<Quorum>,
}

impl RedlockLock {
    /// Connects to the nodes at an address such as `redlock://host1,host2,host3`; see [`RedlockConfig::from_url`].
    ///
    /// # Errors
    ///
    /// As [`RedlockConfig::from_url`] and [`RedlockConfig::connect`].
    pub async fn connect(url: impl AsRef<str>) -> Result<Self, LockError> {
        RedlockConfig::from_url(url.as_ref())?.connect().await
    }

    fn new(quorum: Quorum) -> Self {
        Self {
            quorum: Arc::new(quorum),
        }
    }

    fn quorum(&self) -> &Arc<Quorum> {
        &self.quorum
    }
}

#[async_trait]
impl DistributedLock for RedlockLock {
    fn capabilities(&self) -> Capabilities {
        let shortest = Capabilities::new(Scope::Server).min_ttl;
        Capabilities::new(Scope::Server)
            .with_ttl_range(shortest, self.quorum.max_ttl)
            .with_op_timeout(self.quorum.op_timeout)
            .with_fairness()
            .with_inspection()
            .with_reservations()
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, LockError> {
        match self.quorum.try_acquire(claim).await {
            Err(_) if self.quorum.young_are_let().await => self.quorum.try_acquire(claim).await,
            done => done,
        }
    }

    async fn renew(&self, lease: &Lease) -> Result<Renewal, LockError> {
        // A lease without a claim is not one of ours.
        let Some(claim) = lease.claim() else {
            return Ok(Renewal::NotHeld);
        };
        self.quorum.renew(claim).await
    }

    async fn release(&self, claim: &Claim, keep: Option<Duration>) -> Result<Released, LockError> {
        match keep {
            Some(rest) => self.quorum.release_reserved(claim, rest).await,
            None => self.quorum.release(claim).await,
        }
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Attempt, LockError> {
        if wait.is_over(self.quorum.now()) {
            return self.try_acquire(claim).await;
        }
        let deadline = wait.deadline();
        match self.quorum.wait(claim, wait).await {
            Err(_) if self.quorum.young_are_let().await => self.quorum.wait(claim, Wait::until(deadline)).await,
            done => done,
        }
    }

    async fn reserve(&self, claim: &Claim, length: Duration) -> Result<Renewal, LockError> {
        self.quorum.reserve(claim, length).await
    }

    async fn holder(&self, name: &LockName) -> Result<Option<Holder>, LockError> {
        self.quorum.holder(name).await
    }

    async fn list(&self, prefix: &str) -> Result<Vec<Holder>, LockError> {
        self.quorum.list(prefix).await
    }

    async fn force_release(&self, name: &LockName) -> Result<Option<Holder>, LockError> {
        self.quorum.force_release(name).await
    }

    async fn server_info(&self) -> Result<ServerInfo, LockError> {
        let mut round = self.quorum.ask(|session| async move {
            let asking = async {
                let link = session.link().await?;
                link.use_rare_commands(&session.settings().keys).await?;
                let warnings = link.look().await?.warnings(0);
                Ok(link.version().clone().with_warnings(warnings))
            };
            session.limited("asking for the settings of the server", asking).await
        });
        let (mut versions, mut warnings, mut errors) = (Vec::new(), Vec::new(), Vec::new());
        while let Some((node, answer)) = round.next().await {
            let place = &self.quorum.sessions[node].settings().server;
            match answer {
                Ok(server) => {
                    versions.push(server.to_string());
                    warnings.extend(
                        server
                            .warnings
                            .into_iter()
                            .map(|warning| format!("node {place}: {warning}")),
                    );
                }
                Err(error) if !error.is_retryable() => {
                    return Err(self.quorum.no_majority("check", vec![(node, error)]));
                }
                Err(error) => {
                    warnings.push(format!("node {place} does not take part: {error}"));
                    errors.push((node, error));
                }
            }
        }
        if errors.len() > self.quorum.len() - self.quorum.majority() {
            return Err(self
                .quorum
                .no_majority("asking for the settings of the servers", errors));
        }
        versions.sort_unstable();
        versions.dedup();
        let product = format!("Redlock on {} nodes:", self.quorum.len());
        Ok(ServerInfo::new(product, versions.join(", ")).with_warnings(warnings))
    }

    async fn close(&self) -> Result<(), LockError> {
        self.quorum.close().await
    }
}
