//! Locks on several independent servers: fenced Redlock.
//!
//! The classical algorithm (<https://redis.io/docs/latest/develop/clients/patterns/distributed-locks/>) has no fencing tokens. Here each
//! node counts tokens per name, and an acquisition is finished only when a majority of all nodes has a counter at or above its
//! token, so that every later majority knows a counter that is at least as high.

mod attempt;
mod node;
mod quorum;
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
use tokio::time::{Instant, sleep};

use crate::client::Client;
use crate::server_check::several;
use crate::settings::Settings;

use attempt::LAST_POLL;
use node::{Born, Node};
use quorum::{Quorum, by_owner, most_agree};

/// How long connecting waits for nodes that are slower than the majority.
const STRAGGLERS: Duration = Duration::from_secs(1);

/// Nodes that all begin without data within this time, or within `max_ttl` if that is less, are new together.
const TOGETHER: Duration = Duration::from_secs(10);

/// How exactly the start of a process is known.
const SECOND: Duration = Duration::from_secs(1);

/// Locks on a majority of the nodes, exclusive or shared.
#[derive(Debug)]
pub(crate) struct Redlock(Quorum<Client>);

impl Redlock {
    pub(crate) fn new(settings: &Settings) -> Result<Self, LockError> {
        let nodes = settings.nodes()?.into_iter().map(|node| Arc::new(Client::new(node)));
        let (op_timeout, max_ttl) = (settings.config.op_timeout, settings.config.max_ttl);
        let (executor, held) = (settings.executor.clone(), settings.subscriptions.clone());
        Ok(Self(Quorum::new(nodes.collect(), executor, op_timeout, max_ttl, held)))
    }

    /// Connects to as many nodes as answer soon, and at least to a majority.
    pub(crate) async fn connect(&self) -> Result<(), LockError> {
        let quorum = &self.0;
        let mut round = quorum.ask("connecting", &(), |_, node, ()| async move { node.connect().await });
        let (mut connected, mut errors) = (0, Vec::new());
        let mut late = std::pin::pin!(sleep(quorum.op_timeout));
        loop {
            let answer = tokio::select! {
                biased;
                answer = round.next() => answer,
                () = &mut late => None,
            };
            match answer {
                None => break,
                Some((_, Ok(()))) => {
                    connected += 1;
                    if connected == quorum.majority() {
                        late.as_mut().reset(Instant::now() + STRAGGLERS.min(quorum.op_timeout));
                    }
                }
                // No retry mends it: that it is but one node now does not make it right.
                Some((node, Err(error))) if !error.is_retryable() => {
                    return Err(quorum.no_majority("connecting", vec![(node, error)]));
                }
                Some((node, Err(error))) => errors.push((node, error)),
            }
        }
        if connected < quorum.majority() {
            return Err(quorum.no_majority("connecting", errors));
        }
        for (node, error) in &errors {
            let place = quorum.nodes[*node].place();
            tracing::warn!(target: "fencelock", "locks do without node {place}, which cannot be reached: {error}");
        }
        if connected < quorum.len() {
            return Ok(());
        }
        match quorum.open_new().await {
            Err(error) if error.is_retryable() => {
                tracing::debug!(target: "fencelock", "it is not known since when the nodes have their data: {error}");
                Ok(())
            }
            done => done.map(drop),
        }
    }
}

impl<N: Node> Quorum<N> {
    /// Lets the nodes grant locks at once if all of them began without data at about the same time: none of them can have forgotten
    /// what another one knows. Returns whether a majority grants.
    ///
    /// A node that alone lacks data may have granted leases that it has lost, and waits for their end.
    async fn open_new(&self) -> Result<bool, LockError> {
        let all = self.born(vec![String::new(); self.len()]).await?;
        let is_open = |born: &[Born]| born.iter().filter(|born| !born.is_new).count() >= self.majority();
        let together = TOGETHER.min(self.max_ttl);
        let began_together = spread(all.iter().map(|born| born.age)) <= together
            && spread(all.iter().map(|born| born.process_age)) <= together.saturating_sub(SECOND).max(SECOND);
        if all.len() < self.len() || !began_together || all.iter().any(|born| !born.is_new) {
            // Another client may have let them.
            return Ok(is_open(&all));
        }
        let since = all.into_iter().map(|born| born.since).collect();
        Ok(is_open(&self.born(since).await?))
    }

    /// What each node says of its data, in the order of the nodes. None if the user may not let a node grant locks.
    async fn born(&self, open: Vec<String>) -> Result<Vec<Born>, LockError> {
        let mut round = self.ask("connecting", &open, |number, node, open| async move {
            node.born(&open[number]).await
        });
        let mut all = BTreeMap::new();
        while let Some((node, born)) = round.next().await {
            match born.map_err(|error| self.no_majority("connecting", vec![(node, error)]))? {
                Some(born) => all.insert(node, born),
                None => return Ok(Vec::new()),
            };
        }
        Ok(all.into_values().collect())
    }
}

/// Between the least and the most of them.
fn spread(ages: impl Iterator<Item = Duration> + Clone) -> Duration {
    let (least, most) = (ages.clone().min(), ages.max());
    most.unwrap_or_default().saturating_sub(least.unwrap_or_default())
}

#[async_trait]
impl DistributedLock for Redlock {
    fn capabilities(&self) -> Capabilities {
        let shortest = Capabilities::new(Scope::Server).min_ttl;
        Capabilities::new(Scope::Server)
            .with_ttl_range(shortest, self.0.max_ttl)
            .with_op_timeout(self.0.op_timeout)
            // A waiter asks about that often.
            .with_give_way(LAST_POLL)
            .with_inspection()
            .with_reservations()
            .with_shared()
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, LockError> {
        self.acquire(claim, Wait::until(Some(self.0.now()))).await
    }

    async fn renew(&self, lease: &Lease) -> Result<Renewal, LockError> {
        match lease.claim() {
            Some(claim) => Ok(renewal(self.0.renew(claim).await?)),
            // It is not one of ours.
            None => Ok(Renewal::NotHeld),
        }
    }

    async fn release(&self, claim: &Claim, keep: Option<Duration>) -> Result<Released, LockError> {
        let released = match keep {
            Some(_) => {
                self.0.held.forget(claim.owner());
                let round = self.0.ask("release", claim, move |_, node, claim| async move {
                    let released = DistributedLock::release(&*node, &claim, keep).await?;
                    Ok(Some(released == Released::Released))
                });
                self.0.released(round).await?
            }
            None => self.0.release(claim).await?,
        };
        Ok(match released {
            true => Released::Released,
            false => Released::NotHeld,
        })
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Attempt, LockError> {
        // Majorities guarantee only that of two claims that exclude each other one does not hold: of n permits, almost 2 n could be granted.
        match claim.mode() {
            Mode::Exclusive | Mode::Shared => self.0.acquire(claim, wait).await,
            _ => Err(LockError::not_supported("a semaphore on Redlock")),
        }
    }

    async fn reserve(&self, claim: &Claim, length: Duration) -> Result<Renewal, LockError> {
        let round = self.0.ask("reservation", claim, move |_, node, claim| async move {
            Ok(Some(node.reserve(&claim, length).await? == Renewal::Renewed))
        });
        let renewal = renewal(self.0.decide(round, false).await?);
        self.0.held.reserved(claim.owner(), renewal, self.0.now() + length);
        Ok(renewal)
    }

    async fn holders(&self, name: &LockName) -> Result<Vec<Holder>, LockError> {
        let round = self.0.ask("asking who holds a lock", name, |_, node, name| async move {
            node.holders(&name).await
        });
        let answers = self.0.collect(round).await?;
        let answered = answers.len();
        Ok(self.0.holders(answers.into_iter().flatten(), answered))
    }

    async fn list(&self, prefix: &str) -> Result<Vec<Holder>, LockError> {
        let about = prefix.to_owned();
        let round = self.0.ask("listing locks", &about, |_, node, prefix| async move {
            node.list(&prefix).await
        });
        let answers = self.0.collect(round).await?;
        let answered = answers.len();
        let mut names = BTreeMap::<_, Vec<Holder>>::new();
        for holder in answers.into_iter().flatten() {
            names.entry(holder.name.clone()).or_default().push(holder);
        }
        let holders = names.into_values();
        Ok(holders.flat_map(|holders| self.0.holders(holders, answered)).collect())
    }

    async fn force_release(&self, name: &LockName) -> Result<Vec<Holder>, LockError> {
        let round = self.0.ask("forced release", name, |_, node, name| async move {
            node.force_release(&name).await
        });
        let mut owners = by_owner(self.0.collect(round).await?.into_iter().flatten());
        // What only a minority has, another claim has asked for at the same time. Of the first, the holder may have been told by one node and
        // have released the others since.
        owners.sort_by_key(|holders| std::cmp::Reverse(holders.len()));
        let majority = owners.iter().take_while(|holders| holders.len() >= self.0.majority());
        let ended = majority.count().max(1);
        Ok(owners
            .iter()
            .take(ended)
            .filter_map(|holders| most_agree(holders).cloned())
            .collect())
    }

    async fn server_info(&self) -> Result<ServerInfo, LockError> {
        const OPERATION: &str = "asking for the settings of the servers";
        let mut round = self
            .0
            .ask(OPERATION, &(), |_, node, ()| async move { node.server_info().await });
        let (mut servers, mut warnings, mut errors) = (Vec::new(), Vec::new(), Vec::new());
        while let Some((node, answer)) = round.next().await {
            let place = self.0.nodes[node].place();
            match answer {
                Ok(server) => servers.push((place, server)),
                Err(error) if !error.is_retryable() => {
                    return Err(self.0.no_majority("check", vec![(node, error)]));
                }
                Err(error) => {
                    warnings.push(format!("node {place} does not take part: {error}"));
                    errors.push((node, error));
                }
            }
        }
        if errors.len() > self.0.len() - self.0.majority() {
            return Err(self.0.no_majority(OPERATION, errors));
        }
        let product = format!("Redlock on {} nodes:", self.0.len());
        Ok(several(product, servers, warnings))
    }

    async fn close(&self) -> Result<(), LockError> {
        self.0.settle().await;
        let held = self.0.held.holding(self.0.now()).into_iter();
        let releasing = held.map(|(claim, keep)| async move { self.release(&claim, keep).await });
        let released = join_all(releasing).await;
        self.0.settle().await;
        self.0.nodes.iter().for_each(|node| node.router.close());
        released.into_iter().try_for_each(|released| released.map(drop))
    }
}

fn renewal(is_renewed: bool) -> Renewal {
    match is_renewed {
        true => Renewal::Renewed,
        false => Renewal::NotHeld,
    }
}
