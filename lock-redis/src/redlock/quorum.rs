//! Requests to all nodes at once, and what their answers amount to.

use std::collections::HashMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use lock_core::{Claim, Executor, Holder, LockError, LockName, OwnerId, Released, Renewal, Stamp};
use tokio::time::{Instant, sleep, timeout};

use super::claims::Claims;
use super::node::Proposals;
use super::stragglers::Stragglers;
use crate::session::Session;

/// How long a request for information waits for nodes that are slower than the majority.
const STRAGGLERS: Duration = Duration::from_millis(500);

type Answering<T> = Pin<Box<dyn Future<Output = (usize, T)> + Send>>;

/// A request that is under way to all nodes; each answer comes with the number of its node.
pub(crate) type Round<T> = FuturesUnordered<Answering<T>>;

/// All nodes.
#[derive(Debug)]
pub(crate) struct Quorum {
    pub(super) sessions: Vec<Arc<Session>>,
    pub(super) claims: Arc<Claims>,
    pub(super) proposals: Proposals,
    pub(super) stragglers: Stragglers,
    pub(super) executor: Executor,
    pub(super) op_timeout: Duration,
    pub(super) max_ttl: Duration,
}

impl Quorum {
    pub(crate) fn len(&self) -> usize {
        self.sessions.len()
    }

    /// How many nodes are more than half.
    pub(crate) fn majority(&self) -> usize {
        self.len() / 2 + 1
    }

    pub(crate) fn now(&self) -> Stamp {
        self.sessions[0].clock().now()
    }

    /// A reading that the clocks of a majority of the nodes have reached, in microseconds, or 0 if it is not known: what is proposed as
    /// the next token. Every client computes nearly the same, however its own clock is set.
    pub(crate) fn server_micros(&self) -> u64 {
        let now = self.now();
        let links = self.sessions.iter().filter_map(|session| session.current_link());
        let mut clocks: Vec<_> = links.map(|link| link.earliest_server_micros(now)).collect();
        clocks.sort_unstable_by(|a, b| b.cmp(a));
        clocks.get(self.majority() - 1).copied().unwrap_or_default()
    }

    /// Sends a request to every node.
    pub(crate) fn ask<T, F>(&self, request: impl Fn(Arc<Session>) -> F) -> Round<Result<T, LockError>>
    where
        F: Future<Output = Result<T, LockError>> + Send + 'static,
    {
        self.ask_each(|_, session| request(session))
    }

    /// Sends a request to every node, each its own.
    pub(super) fn ask_each<T, F>(&self, request: impl Fn(usize, Arc<Session>) -> F) -> Round<Result<T, LockError>>
    where
        F: Future<Output = Result<T, LockError>> + Send + 'static,
    {
        let ask = |(node, session): (usize, &Arc<Session>)| -> Answering<Result<T, LockError>> {
            let answer = request(node, Arc::clone(session));
            Box::pin(async move { (node, answer.await) })
        };
        self.sessions.iter().enumerate().map(ask).collect()
    }

    /// Whether the claim held the name on a majority. Every node gets the request, also those that answer after the majority.
    pub(crate) async fn release(&self, claim: &Claim) -> Result<Released, LockError> {
        self.stragglers.take_back(claim.owner());
        let proposal = self.proposals.propose(claim.owner(), self.server_micros());
        let now = self.now();
        self.claims.free(claim.owner(), 0..self.len(), now, now + claim.ttl());
        let round = self.ask_each(|node, session| {
            let (claim, proposal) = (claim.clone(), Arc::clone(&proposal));
            let claims = Arc::clone(&self.claims);
            async move {
                let sent = AtomicUsize::new(0);
                let releasing = || release_at(Arc::clone(&session), claim.clone(), &sent);
                let released = twice(session.settings().op_timeout, releasing).await;
                // If there were two requests, the first one may still be under way; if there was none, one of before may be.
                let sent = sent.into_inner();
                if sent == 1 && released.is_ok() {
                    claims.confirm(claim.owner(), node);
                }
                drop(proposal);
                Ok(match released? {
                    Released::Released => Some(true),
                    // The first request may have released it.
                    _ if sent > 1 => None,
                    _ => Some(false),
                })
            }
        });
        self.released(round).await
    }

    pub(crate) async fn release_reserved(&self, claim: &Claim, rest: Duration) -> Result<Released, LockError> {
        self.stragglers.take_back(claim.owner());
        self.claims.forget(claim.owner());
        let round = self.ask(|session| {
            let claim = claim.clone();
            async move {
                let asking = async {
                    let link = session.link().await?;
                    session.release_reserved_on(&link, &claim, rest).await
                };
                Ok(Some(session.limited("release", asking).await? == Released::Released))
            }
        });
        self.released(round).await
    }

    pub(crate) async fn renew(&self, claim: &Claim) -> Result<Renewal, LockError> {
        let round = self.ask(|session| {
            let claim = claim.clone();
            async move {
                let renewing = || {
                    let (session, claim) = (Arc::clone(&session), claim.clone());
                    async move { session.limited("renew", session.renew(&claim)).await }
                };
                let renewed = twice(session.settings().op_timeout, renewing).await?;
                Ok(Some(renewed == Renewal::Renewed))
            }
        });
        let renewal = self.renewed("renew", round).await?;
        if renewal == Renewal::NotHeld {
            self.claims.forget(claim.owner());
        }
        Ok(renewal)
    }

    pub(crate) async fn reserve(&self, claim: &Claim, length: Duration) -> Result<Renewal, LockError> {
        let round = self.ask(|session| {
            let claim = claim.clone();
            async move {
                let asking = session.reserve(&claim, length);
                Ok(Some(session.limited("reservation", asking).await? == Renewal::Renewed))
            }
        });
        self.renewed("reservation", round).await
    }

    /// Whether the claim held the name on a majority, by the answers to its release. Nodes that failed, or do not know, may have been among
    /// those; alone the ones that failed hold nothing.
    async fn released(&self, round: Round<Result<Option<bool>, LockError>>) -> Result<Released, LockError> {
        let released = self.decide("release", round, |yes, failed| Some(yes + failed >= self.majority()));
        Ok(match released.await? {
            true => Released::Released,
            false => Released::NotHeld,
        })
    }

    /// Whether a majority of all nodes has renewed something.
    async fn renewed(
        &self,
        operation: &'static str,
        round: Round<Result<Option<bool>, LockError>>,
    ) -> Result<Renewal, LockError> {
        Ok(match self.decide(operation, round, |_, _| None).await? {
            true => Renewal::Renewed,
            false => Renewal::NotHeld,
        })
    }

    /// What a majority of all nodes answers: yes, or that yes can have no majority any more. If it is neither, although a majority has
    /// answered, `undecided` says what it is, by how many said yes, and how many failed or do not know.
    async fn decide(
        &self,
        operation: &'static str,
        mut round: Round<Result<Option<bool>, LockError>>,
        undecided: impl Fn(usize, usize) -> Option<bool>,
    ) -> Result<bool, LockError> {
        let (mut yes, mut no, mut unknown, mut errors) = (0, 0, 0, Vec::new());
        let decided = loop {
            if yes >= self.majority() {
                break true;
            }
            if no > self.len() - self.majority() {
                break false;
            }
            match round.next().await {
                Some((_, Ok(Some(true)))) => yes += 1,
                Some((_, Ok(Some(false)))) => no += 1,
                Some((_, Ok(None))) => unknown += 1,
                Some((node, Err(error))) => errors.push((node, error)),
                None => {
                    let decided = undecided(yes, unknown + errors.len());
                    return decided.ok_or_else(|| self.no_majority(operation, errors));
                }
            }
            if errors.len() > self.len() - self.majority() {
                self.stragglers.go_on(&self.executor, round, None);
                return Err(self.no_majority(operation, errors));
            }
        };
        self.stragglers.go_on(&self.executor, round, None);
        Ok(decided)
    }

    /// The answers of at least a majority, and of slower nodes as far as they come in time.
    pub(super) async fn collect<T>(
        &self,
        operation: &'static str,
        mut round: Round<Result<T, LockError>>,
    ) -> Result<Vec<(usize, T)>, LockError> {
        let (mut answers, mut errors) = (Vec::new(), Vec::new());
        let mut note = |(node, answer): (usize, Result<T, LockError>), answers: &mut Vec<_>| match answer {
            Ok(answer) => answers.push((node, answer)),
            Err(error) => errors.push((node, error)),
        };
        while answers.len() < self.majority() {
            match round.next().await {
                Some(answer) => note(answer, &mut answers),
                None => return Err(self.no_majority(operation, errors)),
            }
        }
        let late = sleep(STRAGGLERS);
        tokio::pin!(late);
        loop {
            tokio::select! {
                biased;
                answer = round.next() => match answer {
                    Some(answer) => note(answer, &mut answers),
                    None => break,
                },
                () = &mut late => break,
            }
        }
        Ok(answers)
    }

    pub(crate) async fn holder(&self, name: &LockName) -> Result<Option<Holder>, LockError> {
        const OPERATION: &str = "asking who holds a lock";
        let round = self.ask(|session| {
            let name = name.clone();
            async move {
                let asking = async {
                    let link = session.link().await?;
                    let holders = session.holders_on(&link, std::slice::from_ref(&name)).await?;
                    holders.into_iter().next().unwrap_or(Ok(None))
                };
                session.limited(OPERATION, asking).await
            }
        });
        let answers = self.collect(OPERATION, round).await?;
        let answered = answers.len();
        Ok(self.agreed(answers.into_iter().filter_map(|(_, holder)| holder), answered))
    }

    pub(crate) async fn list(&self, prefix: &str) -> Result<Vec<Holder>, LockError> {
        let round = self.ask(|session| {
            let prefix = prefix.to_owned();
            async move { session.list(&prefix).await }
        });
        let answers = self.collect("listing locks", round).await?;
        let answered = answers.len();
        let mut names = std::collections::BTreeMap::<LockName, Vec<Holder>>::new();
        for holder in answers.into_iter().flat_map(|(_, holders)| holders) {
            if let Some(name) = &holder.name {
                names.entry(name.clone()).or_default().push(holder);
            }
        }
        Ok(names
            .into_values()
            .filter_map(|holders| self.agreed(holders, answered))
            .collect())
    }

    pub(crate) async fn force_release(&self, name: &LockName) -> Result<Option<Holder>, LockError> {
        const OPERATION: &str = "forced release";
        let round = self.ask(|session| {
            let name = name.clone();
            async move {
                let asking = async { session.force_release_on(&session.link().await?, &name).await };
                session.limited(OPERATION, asking).await
            }
        });
        let answers = self.collect(OPERATION, round).await?;
        // The holder may have been told by one node and have released the others since.
        let holders: Vec<_> = answers.into_iter().filter_map(|(_, holder)| holder).collect();
        Ok(most_agree(&holders).cloned())
    }

    /// The holder on a majority, as far as the nodes that answered can tell: with the token that the majority has, and what is left of
    /// the lease there.
    fn agreed(&self, holders: impl IntoIterator<Item = Holder>, answered: usize) -> Option<Holder> {
        let mut owners = HashMap::<(Option<OwnerId>, bool), Vec<Holder>>::new();
        for holder in holders {
            owners
                .entry((holder.owner, holder.is_reserved))
                .or_default()
                .push(holder);
        }
        let mut holders = owners.into_values().max_by_key(Vec::len)?;
        // A node that did not answer may have it too.
        let silent = self.len() - answered;
        if holders.len() + silent < self.majority() || holders.len() * 2 <= answered {
            return None;
        }
        holders.sort_by_key(|holder| std::cmp::Reverse(holder.remaining));
        let remaining = holders[self.majority().min(holders.len()) - 1].remaining;
        let mut holder = most_agree(&holders)?.clone();
        holder.remaining = remaining;
        Some(holder)
    }

    pub(crate) async fn close(&self) -> Result<(), LockError> {
        // A node that does not answer gets nothing anyway.
        let _ = timeout(self.op_timeout.min(STRAGGLERS), self.stragglers.ended()).await;
        let mut round = self.ask(|session| async move { session.close().await });
        let mut errors = Vec::new();
        while let Some((node, closed)) = round.next().await {
            if let Err(error) = closed {
                errors.push((node, error));
            }
        }
        if errors.len() > self.len() - self.majority() {
            return Err(self.no_majority("close", errors));
        }
        Ok(())
    }

    /// Why there is no majority, in the words of the nodes.
    pub(super) fn no_majority(&self, operation: &'static str, mut errors: Vec<(usize, LockError)>) -> LockError {
        errors.sort_by_key(|(node, _)| *node);
        if let Some((_, error)) = errors
            .iter()
            .find(|(_, error)| matches!(error, LockError::Closed { .. }))
        {
            return error.clone();
        }
        // What no retry mends comes first.
        let first = errors
            .iter()
            .position(|(_, error)| !error.is_retryable())
            .unwrap_or_default();
        let (failed, nodes) = (errors.len(), self.len());
        if errors.is_empty() {
            return LockError::no_answer(operation, self.op_timeout);
        }
        let (node, error) = errors.swap_remove(first);
        let place = &self.sessions[node].settings().server;
        let what = match failed > nodes - self.majority() {
            true => format!("{failed} of {nodes} nodes failed, and a majority is needed; node {place}: {error}"),
            false => format!("node {place}: {error}"),
        };
        match error {
            LockError::Configuration { .. } => LockError::configuration(what),
            LockError::UnsafeConfiguration { .. } => LockError::unsafe_configuration(what),
            error => LockError::unavailable(operation, what).with_source(error),
        }
    }

    /// Whether a majority refused the last acquire because they have no data, and may grant locks at once now.
    pub(super) async fn young_are_let(&self) -> bool {
        self.sessions.iter().filter(|session| session.is_young()).count() >= self.majority()
            && self.open_new().await.unwrap_or(false)
    }
}

/// Before a node that failed is asked once more.
pub(super) const PAUSE: Duration = Duration::from_millis(100);

/// Frees the node; `sent` counts the times that it is asked to. The request does nothing if it arrives after a ttl.
async fn release_at(session: Arc<Session>, claim: Claim, sent: &AtomicUsize) -> Result<Released, LockError> {
    let asking = async {
        let link = session.link().await?;
        sent.fetch_add(1, Ordering::Relaxed);
        session.release_until(&link, &claim, Some(claim.ttl())).await
    };
    session.limited("release", asking).await
}

/// Asks a node once more if it fails: a node that has been restarted fails the requests on its old connection.
///
/// Not if the failure took a part of `limit` that leaves too little for another one.
pub(super) async fn twice<T, F>(limit: Duration, ask: impl Fn() -> F) -> Result<T, LockError>
where
    F: Future<Output = Result<T, LockError>>,
{
    let began = Instant::now();
    match ask().await {
        Err(error) if error.is_retryable() && began.elapsed() < limit / 4 => {
            sleep(PAUSE).await;
            ask().await
        }
        done => done,
    }
}

/// The holder that most nodes tell of, with the token that most of those have: a node that answered after the majority may have granted
/// it with another one, until that is confirmed there too.
fn most_agree(holders: &[Holder]) -> Option<&Holder> {
    let count = |same: &dyn Fn(&Holder) -> bool| holders.iter().filter(|holder| same(holder)).count();
    holders.iter().max_by_key(|holder| {
        let owners = count(&|other| other.owner == holder.owner);
        let tokens = count(&|other| other.owner == holder.owner && other.token == holder.token);
        (owners, tokens)
    })
}
