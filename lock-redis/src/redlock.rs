//! Locks on several independent servers: fenced Redlock.
//!
//! The classical algorithm (<https://redis.io/docs/latest/develop/clients/patterns/distributed-locks/>) has no fencing tokens. Here each
//! node counts tokens per name, and an acquisition is finished only when a majority of all nodes has a counter at or above its
//! token, so that every later majority knows a counter that is at least as high.

mod attempt;
mod config;
mod membership;
mod node;
mod quorum;
mod restart;
#[cfg(test)]
#[path = "../tests/simulation/redlock.rs"]
mod simulation;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;
use lock_core::{
    Attempt, Capabilities, Claim, DistributedLock, Holder, Lease, LockError, LockName, Mode, Released, Renewal, Scope,
    ServerInfo, Wait,
};

use crate::client::Client;

pub use config::RedlockConfig;
pub(crate) use membership::Membership;

use attempt::LAST_POLL;
use quorum::{Quorum, by_owner, most_agree};

/// Locks on a majority of several independent Redis servers, exclusive or shared. Semaphores are [`LockError::NotSupported`].
///
/// Clones share the connections, one to each node. Dropping the last clone closes them and leaves what it held to expire;
/// [`close`](DistributedLock::close) releases it.
#[derive(Clone, Debug)]
pub struct RedlockLock {
    quorum: Arc<Quorum<Client>>,
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
}

#[async_trait]
impl DistributedLock for RedlockLock {
    fn capabilities(&self) -> Capabilities {
        let shortest = Capabilities::new(Scope::Server).min_ttl;
        Capabilities::new(Scope::Server)
            .with_ttl_range(shortest, self.quorum.max_ttl)
            .with_op_timeout(self.quorum.op_timeout)
            // A waiter asks about that often.
            .with_give_way(LAST_POLL)
            .with_inspection()
            .with_reservations()
            .with_shared()
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, LockError> {
        check_mode(claim)?;
        self.quorum.try_acquire(claim).await
    }

    async fn renew(&self, lease: &Lease) -> Result<Renewal, LockError> {
        // A lease without a claim is not one of ours.
        let Some(claim) = lease.claim() else {
            return Ok(Renewal::NotHeld);
        };
        Ok(renewal(self.quorum.renew(claim).await?))
    }

    async fn release(&self, claim: &Claim, keep: Option<Duration>) -> Result<Released, LockError> {
        let released = match keep {
            Some(rest) => {
                self.quorum.held.forget(claim.owner());
                let round = self.quorum.ask("release", claim, move |_, node, claim| async move {
                    let released = node.release("release", &claim, Some(rest)).await?;
                    Ok(Some(released == Released::Released))
                });
                self.quorum.released(round).await?
            }
            None => self.quorum.release(claim).await?,
        };
        Ok(match released {
            true => Released::Released,
            false => Released::NotHeld,
        })
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Attempt, LockError> {
        check_mode(claim)?;
        self.quorum.acquire(claim, wait).await
    }

    async fn reserve(&self, claim: &Claim, length: Duration) -> Result<Renewal, LockError> {
        let Some(token) = self.quorum.held.token(claim.owner()) else {
            return Ok(Renewal::NotHeld);
        };
        let round = self.quorum.ask("reservation", claim, move |_, node, claim| async move {
            let (node, claim) = (&*node, &claim);
            let asking = |connection, _| async move { node.reserve_on(&connection, claim, token, length).await };
            let renewal = node.call("reservation", claim.name(), asking).await?;
            Ok(Some(renewal == Renewal::Renewed))
        });
        let reserved = self.quorum.decide(round, |_, _| None).await?;
        match reserved {
            true => self.quorum.held.reserved(claim.owner(), self.quorum.now() + length),
            false => self.quorum.held.forget(claim.owner()),
        }
        Ok(renewal(reserved))
    }

    async fn holders(&self, name: &LockName) -> Result<Vec<Holder>, LockError> {
        const OPERATION: &str = "asking who holds a lock";
        let round = self.quorum.ask(
            OPERATION,
            name,
            |_, node, name| async move { node.holders(&name).await },
        );
        let answers = self.quorum.collect(round).await?;
        let answered = answers.len();
        Ok(self.quorum.holders(answers.into_iter().flatten(), answered))
    }

    async fn list(&self, prefix: &str) -> Result<Vec<Holder>, LockError> {
        let about = prefix.to_owned();
        let round = self.quorum.ask("listing locks", &about, |_, node, prefix| async move {
            node.list(&prefix).await
        });
        let answers = self.quorum.collect(round).await?;
        let answered = answers.len();
        let mut names = BTreeMap::<LockName, Vec<Holder>>::new();
        for holder in answers.into_iter().flatten() {
            if let Some(name) = &holder.name {
                names.entry(name.clone()).or_default().push(holder);
            }
        }
        let holders = names.into_values();
        Ok(holders
            .flat_map(|holders| self.quorum.holders(holders, answered))
            .collect())
    }

    async fn force_release(&self, name: &LockName) -> Result<Vec<Holder>, LockError> {
        const OPERATION: &str = "forced release";
        let round = self.quorum.ask(OPERATION, name, |_, node, name| async move {
            let asking = async { node.force_release_on(&node.router().any().await?, &name).await };
            node.limited(OPERATION, asking).await
        });
        let mut owners = by_owner(self.quorum.collect(round).await?.into_iter().flatten());
        // What only a minority has, another claim has asked for at the same time.
        owners.sort_by_key(|holders| std::cmp::Reverse(holders.len()));
        let majority = self.quorum.majority();
        let is_held = |(at, holders): &(usize, Vec<Holder>)| {
            // The holder may have been told by one node and have released the others since.
            *at == 0 || holders.len() >= majority
        };
        let ended = owners.into_iter().enumerate().filter(is_held);
        Ok(ended.filter_map(|(_, holders)| most_agree(&holders).cloned()).collect())
    }

    async fn server_info(&self) -> Result<ServerInfo, LockError> {
        const OPERATION: &str = "asking for the settings of the servers";
        let mut round = self.quorum.ask(OPERATION, &(), |_, node, ()| async move {
            let asking = async {
                let connection = node.router().any().await?;
                connection.use_rare_commands(&node.settings().keys.unused()).await?;
                let warnings = connection.look().await?.warnings();
                Ok(connection.version().clone().with_warnings(warnings))
            };
            node.limited(OPERATION, asking).await
        });
        let (mut versions, mut warnings, mut errors) = (Vec::new(), Vec::new(), Vec::new());
        while let Some((node, answer)) = round.next().await {
            let place = &self.quorum.nodes[node].settings().target;
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
            return Err(self.quorum.no_majority(OPERATION, errors));
        }
        versions.sort_unstable();
        versions.dedup();
        let product = format!("Redlock on {} nodes:", self.quorum.len());
        Ok(ServerInfo::new(product, versions.join(", ")).with_warnings(warnings))
    }

    async fn close(&self) -> Result<(), LockError> {
        self.quorum.settle().await;
        let now = self.quorum.now();
        let held = self.quorum.held.holding().into_iter();
        let releasing = held.map(|(claim, reserved_until)| async move {
            let rest = reserved_until.map(|until| until.since(now));
            self.release(&claim, rest.filter(|rest| !rest.is_zero())).await
        });
        let released = join_all(releasing).await;
        self.quorum.settle().await;
        self.quorum.nodes.iter().for_each(|node| node.router().close());
        released.into_iter().try_for_each(|released| released.map(drop))
    }
}

/// Majorities guarantee only that of two claims that exclude each other one does not hold: of n permits, almost 2 n could be granted.
fn check_mode(claim: &Claim) -> Result<(), LockError> {
    match claim.mode() {
        Mode::Exclusive | Mode::Shared => Ok(()),
        _ => Err(LockError::not_supported("a semaphore on Redlock")),
    }
}

fn renewal(is_renewed: bool) -> Renewal {
    match is_renewed {
        true => Renewal::Renewed,
        false => Renewal::NotHeld,
    }
}
