//! The coordinator: requests to all nodes, and what their answers amount to.

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use lock_core::{Claim, Executor, Holder, LockError, OwnerId, Stamp};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tokio_util::task::TaskTracker;

use super::node::Node;
use crate::subscriptions::Subscriptions;

/// How long a request for information waits for nodes that are slower than the majority.
const STRAGGLERS: Duration = Duration::from_millis(500);

/// How many requests can be under way to nodes without which the outcome is known: to a silent node there are more and more.
const MOST: usize = 5000;

/// Before a node that failed is asked once more.
const AGAIN: Duration = Duration::from_millis(100);

/// All nodes.
pub(crate) struct Quorum<N> {
    pub(super) nodes: Vec<Arc<N>>,
    pub(super) executor: Executor,
    pub(super) op_timeout: Duration,
    pub(super) max_ttl: Duration,
    /// The claims that hold.
    pub(super) held: Subscriptions,
    /// The number of the last attempt.
    pub(super) last: AtomicU64,
    under_way: TaskTracker,
}

/// Requests to several nodes, each in a task of its own. The tasks go on if this is dropped.
pub(super) struct Round<T> {
    operation: &'static str,
    executor: Executor,
    answers: mpsc::UnboundedReceiver<(usize, Result<T, LockError>)>,
    /// The nodes that have not answered.
    pub(super) open: Vec<usize>,
}

impl<T> Round<T> {
    /// The next answer and the number of its node. `None` after the last one. Dropping the future loses nothing.
    pub(super) async fn next(&mut self) -> Option<(usize, Result<T, LockError>)> {
        let last = *self.open.last()?;
        // The tasks are dropped if their runtime ends.
        let dropped = || (last, Err(self.executor.dropped(self.operation)));
        let answer = self.answers.recv().await.unwrap_or_else(dropped);
        self.open.retain(|node| *node != answer.0);
        Some(answer)
    }

    /// The answers that are there already. Later ones are not read.
    pub(super) fn into_answers(mut self) -> impl Iterator<Item = (usize, Result<T, LockError>)> {
        self.answers.close();
        std::iter::from_fn(move || self.answers.try_recv().ok())
    }
}

impl<N: Node> Quorum<N> {
    pub(super) fn new(
        nodes: Vec<Arc<N>>,
        executor: Executor,
        op_timeout: Duration,
        max_ttl: Duration,
        held: Subscriptions,
    ) -> Self {
        Self {
            nodes,
            executor,
            op_timeout,
            max_ttl,
            held,
            last: AtomicU64::new(0),
            under_way: TaskTracker::new(),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.nodes.len()
    }

    /// How many nodes are more than half.
    pub(super) fn majority(&self) -> usize {
        self.len() / 2 + 1
    }

    pub(super) fn now(&self) -> Stamp {
        self.nodes[0].now()
    }

    /// Sends a request about `about`, such as a claim, to every node.
    pub(super) fn ask<A: Clone, T: Send + 'static, F>(
        &self,
        operation: &'static str,
        about: &A,
        request: impl Fn(usize, Arc<N>, A) -> F,
    ) -> Round<T>
    where
        F: Future<Output = Result<T, LockError>> + Send + 'static,
    {
        let request = |number, node| request(number, node, about.clone());
        self.ask_some(operation, (0..self.len()).collect(), request)
    }

    /// Sends a request to these nodes.
    pub(super) fn ask_some<T: Send + 'static, F>(
        &self,
        operation: &'static str,
        open: Vec<usize>,
        request: impl Fn(usize, Arc<N>) -> F,
    ) -> Round<T>
    where
        F: Future<Output = Result<T, LockError>> + Send + 'static,
    {
        let (tell, answers) = mpsc::unbounded_channel();
        for node in open.iter().copied() {
            let (answered, failed) = (tell.clone(), tell.clone());
            let (request, under_way) = (request(node, Arc::clone(&self.nodes[node])), self.under_way.clone());
            let task = self.under_way.track_future(Box::pin(async move {
                let mut request = std::pin::pin!(request);
                tokio::select! {
                    biased;
                    answer = &mut request => drop(answered.send((node, answer))),
                    // The outcome is known. The node gets the request all the same.
                    () = answered.closed() => if under_way.len() <= MOST {
                        drop(request.await);
                    },
                }
            }));
            if let Err(error) = self.executor.spawn(task) {
                drop(failed.send((node, Err(error))));
            }
        }
        Round {
            operation,
            executor: self.executor.clone(),
            answers,
            open,
        }
    }

    /// Renews the claim. False if a majority does not have it.
    pub(crate) async fn renew(&self, claim: &Claim) -> Result<bool, LockError> {
        let limit = self.op_timeout;
        let round = self.ask("renew", claim, move |_, node, claim| async move {
            twice(limit, |_| node.renew(&claim)).await.map(Some)
        });
        let renewed = self.decide(round, false).await?;
        if !renewed {
            self.held.forget(claim.owner());
        }
        Ok(renewed)
    }

    /// Releases the claim. Every node gets the request, also those that answer after the majority.
    pub(crate) async fn release(&self, claim: &Claim) -> Result<bool, LockError> {
        self.held.forget(claim.owner());
        let last = self.last.load(Ordering::Relaxed);
        let limit = self.op_timeout;
        let round = self.ask("release", claim, move |_, node, claim| async move {
            let (node, claim) = (&node, &claim);
            let release = |again: bool| async move {
                let released = node.release(claim, last, false).await?;
                // The first request may have released it.
                Ok(released.filter(|released| *released || !again))
            };
            twice(limit, release).await
        });
        self.released(round).await
    }

    /// Whether the claim held the name on a majority, by the answers to its release. Nodes that failed, or do not know, may have been among
    /// those; alone the ones that failed hold nothing.
    pub(super) async fn released(&self, round: Round<Option<bool>>) -> Result<bool, LockError> {
        self.decide(round, true).await
    }

    /// What a majority of all nodes answers: yes, or that yes can have no majority any more. If it is neither, although a majority has
    /// answered, that is an error, unless those that failed or do not know `may_count` as yes.
    pub(super) async fn decide(&self, mut round: Round<Option<bool>>, may_count: bool) -> Result<bool, LockError> {
        let (mut yes, mut no, mut unknown, mut errors) = (0, 0, 0, Vec::new());
        loop {
            if yes >= self.majority() {
                return Ok(true);
            }
            if no > self.len() - self.majority() {
                return Ok(false);
            }
            if errors.len() > self.len() - self.majority() {
                return Err(self.no_majority(round.operation, errors));
            }
            match round.next().await {
                Some((_, Ok(Some(true)))) => yes += 1,
                Some((_, Ok(Some(false)))) => no += 1,
                Some((_, Ok(None))) => unknown += 1,
                Some((node, Err(error))) => errors.push((node, error)),
                None if may_count => return Ok(yes + unknown + errors.len() >= self.majority()),
                None => return Err(self.no_majority(round.operation, errors)),
            }
        }
    }

    /// The answers of at least a majority, and of slower nodes as far as they come in time.
    pub(super) async fn collect<T>(&self, mut round: Round<T>) -> Result<Vec<T>, LockError> {
        let (mut answers, mut errors) = (Vec::new(), Vec::new());
        let mut until = None;
        loop {
            if answers.len() >= self.majority() {
                until.get_or_insert(Instant::now() + STRAGGLERS);
            }
            let next = match until {
                Some(until) => timeout_at(until, round.next()).await.unwrap_or_default(),
                None => round.next().await,
            };
            match next {
                Some((_, Ok(answer))) => answers.push(answer),
                Some((node, Err(error))) => errors.push((node, error)),
                None if answers.len() >= self.majority() => return Ok(answers),
                None => return Err(self.no_majority(round.operation, errors)),
            }
        }
    }

    /// Waits a little for the nodes that have not answered requests whose outcome is known.
    pub(super) async fn settle(&self) {
        self.under_way.close();
        let _ = timeout(self.op_timeout.min(STRAGGLERS), self.under_way.wait()).await;
    }

    /// The holders on a majority, as far as the nodes that answered can tell, by their tokens: each with the token that the majority has, and what
    /// is left of the lease there.
    pub(super) fn holders(&self, holders: impl IntoIterator<Item = Holder>, answered: usize) -> Vec<Holder> {
        let holders = by_owner(holders).into_iter();
        let mut found: Vec<_> = holders.filter_map(|of_one| self.holder(of_one, answered)).collect();
        found.sort_by_key(|holder| holder.token);
        found
    }

    /// The same of one owner.
    fn holder(&self, mut holders: Vec<Holder>, answered: usize) -> Option<Holder> {
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

    /// Why there is no majority: each node that failed, and its reason.
    pub(super) fn no_majority(&self, operation: &'static str, mut errors: Vec<(usize, LockError)>) -> LockError {
        errors.sort_by_key(|(node, _)| *node);
        let closed = |(_, error): &&(usize, LockError)| matches!(error, LockError::Closed { .. });
        if let Some((_, error)) = errors.iter().find(closed) {
            return error.clone();
        }
        if errors.is_empty() {
            return LockError::no_answer(operation, self.op_timeout);
        }
        let told = |(node, error): &(usize, LockError)| {
            let (place, reason) = (self.nodes[*node].place(), reason(error));
            match reason.contains(&place) {
                true => reason,
                false => format!("node {place}: {reason}"),
            }
        };
        let reasons: Vec<_> = errors.iter().map(told).collect();
        let (failed, nodes, mut what) = (errors.len(), self.len(), reasons.join("; "));
        if failed > nodes - self.majority() {
            what = format!("{failed} of {nodes} nodes failed, and a majority is needed; {what}");
        }
        // What no retry mends decides.
        match errors.iter().find(|(_, error)| !error.is_retryable()) {
            Some((_, LockError::UnsafeConfiguration { .. })) => LockError::unsafe_configuration(what),
            Some((_, LockError::Configuration { .. })) => LockError::configuration(what),
            _ => LockError::unavailable(operation, what),
        }
    }
}

impl<N: fmt::Debug> fmt::Debug for Quorum<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Quorum")
            .field("nodes", &self.nodes)
            .finish_non_exhaustive()
    }
}

/// Asks a node once more if it fails soon: one that was restarted a moment ago is not found at once.
pub(super) async fn twice<T, F>(limit: Duration, ask: impl Fn(bool) -> F) -> Result<T, LockError>
where
    F: Future<Output = Result<T, LockError>>,
{
    let began = Instant::now();
    match ask(false).await {
        Err(error) if error.is_retryable() && began.elapsed() < limit / 4 => {
            sleep(AGAIN).await;
            ask(true).await
        }
        done => done,
    }
}

/// The error with its causes, without the operation, which is said once for all nodes.
fn reason(error: &LockError) -> String {
    let text = format!("{error:#}");
    match error {
        LockError::Unavailable(info) => {
            let rest = text
                .strip_prefix(info.operation)
                .and_then(|rest| rest.strip_prefix(" failed: "));
            rest.unwrap_or(&text).to_owned()
        }
        _ => text,
    }
}

/// What several nodes tell of each owner.
pub(super) fn by_owner(holders: impl IntoIterator<Item = Holder>) -> Vec<Vec<Holder>> {
    let mut owners = HashMap::<(Option<OwnerId>, bool), Vec<Holder>>::new();
    for holder in holders {
        let owner = (holder.owner, holder.is_reserved);
        owners.entry(owner).or_default().push(holder);
    }
    owners.into_values().collect()
}

/// What most nodes tell of an owner: a node that answered after the majority may have granted the name with another token, until that is
/// confirmed there too, and one that did not answer may have it in another mode.
pub(super) fn most_agree(holders: &[Holder]) -> Option<&Holder> {
    let is_same = |one: &Holder, other: &Holder| (one.token, one.mode) == (other.token, other.mode);
    holders
        .iter()
        .max_by_key(|holder| holders.iter().filter(|other| is_same(holder, other)).count())
}
