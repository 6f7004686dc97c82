//! The coordinator: requests to all nodes, and what their answers amount to.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::future::Future;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use lock_core::{
    Attempt as Attempted, Busy, Claim, Executor, FencingToken, Grant, Holder, Lease, LockError, OwnerId, Stamp, Wait,
};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::node::{Answer, Attempt, Born, Node};
use crate::error::Failure;
use crate::subscriptions::Subscriptions;

/// How long a request for information waits for nodes that are slower than the majority.
const STRAGGLERS: Duration = Duration::from_millis(500);

/// How many requests can be under way to nodes without which the outcome is known: to a silent node there are more and more.
const MOST: usize = 5000;

/// The longest pause after an attempt in which no claim got a majority. The first one is much shorter.
const LONGEST_PAUSE: Duration = Duration::from_millis(100);
const FIRST_PAUSE: Duration = Duration::from_millis(4);

/// The mean pause between two questions of a waiter, the first and the longest.
const FIRST_POLL: Duration = Duration::from_millis(10);
pub(super) const LAST_POLL: Duration = Duration::from_millis(100);

/// Nodes that all begin without data within this time, or within `max_ttl` if that is less, are new together.
const TOGETHER: Duration = Duration::from_secs(10);

/// How exactly the start of a process is known.
const SECOND: Duration = Duration::from_secs(1);

/// All nodes.
pub(crate) struct Quorum<N> {
    pub(super) nodes: Vec<Arc<N>>,
    pub(super) executor: Executor,
    pub(super) op_timeout: Duration,
    pub(super) max_ttl: Duration,
    /// The claims that hold.
    pub(super) held: Subscriptions,
    /// The number of the last attempt.
    last: AtomicU64,
    under_way: TaskTracker,
}

/// Requests to several nodes, each in a task of its own. The tasks go on if this is dropped.
pub(super) struct Round<T> {
    operation: &'static str,
    executor: Executor,
    answers: mpsc::UnboundedReceiver<(usize, Result<T, LockError>)>,
    open: Vec<usize>,
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
}

/// A grant of one node.
struct Vote {
    node: usize,
    token: FencingToken,
    lease: Lease,
}

/// What the nodes have answered to an attempt.
#[derive(Default)]
struct Tally {
    votes: Vec<Vote>,
    busy: Vec<Busy>,
    errors: Vec<(usize, LockError)>,
    young: usize,
    /// Nodes that have granted the claim, and have lost that grant or given it another token.
    lost: Vec<usize>,
    /// A majority has granted the claim, too long ago.
    is_stale: bool,
}

/// What an attempt came to.
enum Outcome {
    Granted(Grant),
    Busy(Busy),
    /// No claim has a majority.
    Split(Option<Busy>),
    /// A majority cannot grant anything now because it has no data.
    Young(LockError),
    Failed(LockError),
}

/// How an attempt asks the nodes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    /// One round trip.
    AllAtOnce,
    /// The others once one has granted the claim. Contenders do not split the nodes, as all ask the same one first.
    OneFirst,
}

impl Way {
    fn other(self) -> Self {
        match self {
            Self::AllAtOnce => Self::OneFirst,
            Self::OneFirst => Self::AllAtOnce,
        }
    }
}

impl Tally {
    fn count(&mut self, node: usize, answer: Result<Answer, LockError>) {
        match answer {
            Ok(Answer::Granted(token, lease)) => self.votes.push(Vote { node, token, lease }),
            Ok(Answer::Busy(busy)) => self.busy.push(busy),
            Ok(Answer::Young(left)) => {
                self.young += 1;
                self.errors.push((node, Failure::Young(left).explain("acquire")));
            }
            Err(error) => self.errors.push((node, error)),
        }
    }

    fn at(&self, token: FencingToken) -> usize {
        self.votes.iter().filter(|vote| vote.token == token).count()
    }

    /// The holder on most of the nodes that are busy, and on how many.
    fn other(&self) -> (Option<&Busy>, usize) {
        let owner = |busy: &Busy| busy.holder.as_ref().and_then(|holder| holder.owner);
        let count = |busy: &&Busy| self.busy.iter().filter(|other| owner(other) == owner(busy)).count();
        let most = self.busy.iter().max_by_key(count);
        (most, most.as_ref().map_or(0, count))
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

    /// A reading that the clocks of a majority of the nodes have reached, in microseconds, or 0 if it is not known: what is proposed as
    /// the next token. Every client computes nearly the same, however its own clock is set.
    fn server_micros(&self) -> u64 {
        let mut clocks: Vec<_> = self.nodes.iter().filter_map(|node| node.server_micros()).collect();
        clocks.sort_unstable_by(|a, b| b.cmp(a));
        clocks.get(self.majority() - 1).copied().unwrap_or_default()
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
    fn ask_some<T: Send + 'static, F>(
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

    pub(crate) async fn try_acquire(&self, claim: &Claim) -> Result<Attempted, LockError> {
        self.try_for(claim, self.op_timeout / 2).await
    }

    /// Makes attempts until one claim has a majority, and no new one after `limit`.
    async fn try_for(&self, claim: &Claim, limit: Duration) -> Result<Attempted, LockError> {
        let began = Instant::now();
        let (mut pause, mut may_open, mut way) = (FIRST_PAUSE, true, Way::AllAtOnce);
        loop {
            let outcome = match self.attempt(claim, way, 10 * pause, began + self.op_timeout).await {
                // What one node has may be a leftover.
                Outcome::Busy(busy) if way == Way::OneFirst => Outcome::Split(Some(busy)),
                outcome => outcome,
            };
            match outcome {
                Outcome::Granted(grant) => return Ok(Attempted::Granted(grant)),
                Outcome::Busy(busy) => return Ok(busy.into()),
                Outcome::Split(busy) if began.elapsed() >= limit => {
                    let late = "too few nodes granted the lock at the same time; raise the ttl if this goes on";
                    let busy = busy.ok_or_else(|| LockError::unavailable("acquire", late))?;
                    return Ok(busy.into());
                }
                Outcome::Split(_) => {
                    // Contenders that ask again at the same time would split the nodes again.
                    sleep(pause.mul_f64(fastrand::f64())).await;
                    pause = (2 * pause).min(LONGEST_PAUSE);
                    way = way.other();
                }
                Outcome::Young(_) if may_open && self.open_new().await.unwrap_or(false) => may_open = false,
                // One node after the other, each had little time.
                Outcome::Young(_) | Outcome::Failed(_) if way == Way::OneFirst => way = Way::AllAtOnce,
                Outcome::Young(error) | Outcome::Failed(error) => return Err(error),
            }
        }
    }

    /// Asks again and again, with jitter, until the claim is granted or the wait is over.
    pub(crate) async fn acquire(&self, claim: &Claim, mut wait: Wait) -> Result<Attempted, LockError> {
        if wait.is_over(self.now()) {
            return self.try_acquire(claim).await;
        }
        let (mut pause, deadline) = (FIRST_POLL, wait.deadline());
        let left = |longest| deadline.map_or(longest, |deadline| deadline.since(self.now()).min(longest));
        for poll in 0_u32.. {
            // Most often, one request tells that the lock is busy. It may be a leftover that only that node has.
            let outcome = match poll % 4 {
                0 => Outcome::Split(None),
                _ => {
                    let until = Instant::now() + self.op_timeout;
                    self.attempt(claim, Way::OneFirst, 10 * FIRST_PAUSE, until).await
                }
            };
            let busy = match outcome {
                Outcome::Granted(grant) => return Ok(Attempted::Granted(grant)),
                Outcome::Busy(busy) | Outcome::Split(Some(busy)) => busy,
                _ => match self.try_for(claim, left(LONGEST_PAUSE)).await? {
                    Attempted::Busy(busy) => busy,
                    done => return Ok(done),
                },
            };
            let next = left(pause.mul_f64(0.5 + fastrand::f64()));
            wait.busy(&busy);
            if next.is_zero() {
                return Ok(busy.into());
            }
            sleep(next).await;
            pause = (pause * 3 / 2).min(LAST_POLL);
        }
        Ok(Attempted::busy())
    }

    /// Asks all nodes once. Without a grant, what some of them have granted is given back.
    ///
    /// While some nodes have granted the claim and others are busy, waits no longer than `patience` for one more answer: other claims
    /// may need the nodes that this one has.
    async fn attempt(&self, claim: &Claim, way: Way, patience: Duration, until: Instant) -> Outcome {
        let attempt = Arc::new(Attempt {
            number: self.last.fetch_add(1, Ordering::Relaxed) + 1,
            proposal: self.server_micros(),
            over: CancellationToken::new(),
            given: OnceLock::new(),
            held: self.held.clone(),
        });
        let over = attempt.over.clone().drop_guard();
        let mut tally = Tally::default();
        let mut nodes = self.order(claim);
        while way == Way::OneFirst && tally.votes.is_empty() && tally.busy.is_empty() && !nodes.is_empty() {
            let node = nodes.remove(0);
            let mut round = self.ask_acquire(claim, &attempt, vec![node]);
            let answer = timeout(LONGEST_PAUSE.min(self.op_timeout), round.next()).await;
            let silent = || (node, Err(LockError::no_answer("acquire", LONGEST_PAUSE)));
            let (node, answer) = answer.ok().flatten().unwrap_or_else(silent);
            tally.count(node, answer);
        }
        if way == Way::OneFirst && tally.votes.is_empty() {
            // The node that all ask first is taken: this claim does not get in the way of the one that has it.
            nodes.clear();
        }
        let mut round = self.ask_acquire(claim, &attempt, nodes);
        let outcome = loop {
            if let Some((token, lease)) = self.agreed(claim, &mut tally, !round.open.is_empty(), until).await {
                let grant = Grant::new(claim.clone(), token, lease);
                self.held.hold(&grant);
                // Set once, before the answers that are not read any more.
                let _ = attempt.given.set(token);
                self.confirm_rest(claim, token, tally, round);
                return Outcome::Granted(grant);
            }
            if let Some(outcome) = self.outcome(&mut tally, round.open.len()) {
                break outcome;
            }
            let is_contended = !tally.busy.is_empty();
            tokio::select! {
                biased;
                Some((node, answer)) = round.next() => tally.count(node, answer),
                () = sleep(patience), if is_contended => break Outcome::Split(tally.other().0.cloned()),
                () = sleep_until(until + FIRST_PAUSE) => {
                    let silent = |node: &usize| (*node, LockError::no_answer("acquire", self.op_timeout));
                    tally.errors.extend(round.open.iter().map(silent));
                    break Outcome::Failed(self.no_majority("acquire", std::mem::take(&mut tally.errors)));
                }
            }
        };
        drop(over);
        // Asked for again, what the claim holds stays.
        let is_held = self.held.token(claim.owner()).is_some();
        if !is_held && let Outcome::Busy(_) | Outcome::Split(_) = outcome {
            let granted: Vec<_> = tally.votes.iter().map(|vote| vote.node).collect();
            let failed = tally.errors.iter().map(|(node, _)| *node);
            let others = failed.chain(round.open.iter().copied()).chain(tally.lost).collect();
            self.give_up(claim, attempt.number, granted, others).await;
        }
        outcome
    }

    /// The nodes in the order in which every client asks them for that name.
    fn order(&self, claim: &Claim) -> Vec<usize> {
        let mut nodes: Vec<_> = (0..self.len()).collect();
        nodes.sort_by_key(|node| self.nodes[*node].place());
        let sum = claim
            .name()
            .as_str()
            .bytes()
            .fold(0, |sum, byte| sum + usize::from(byte));
        nodes.rotate_left(sum % self.len());
        nodes
    }

    fn ask_acquire(&self, claim: &Claim, attempt: &Arc<Attempt>, nodes: Vec<usize>) -> Round<Answer> {
        self.ask_some("acquire", nodes, |_, node| {
            let (claim, attempt, limit) = (claim.clone(), Arc::clone(attempt), self.op_timeout);
            async move {
                let answer = twice(limit, |_| node.acquire(&claim, &attempt)).await?;
                // A node that answers after the majority gets the token, too.
                if let (Answer::Granted(token, _), Some(given)) = (&answer, attempt.given.get())
                    && token != given
                {
                    node.confirm(&claim, *token, *given).await?;
                }
                Ok(answer)
            }
        })
    }

    /// Releases what an attempt has been granted by these nodes, and may be granted by others.
    async fn give_up(&self, claim: &Claim, number: u64, granted: Vec<usize>, others: Vec<usize>) {
        let release = |_: usize, node: Arc<N>| {
            let claim = claim.clone();
            async move { node.release(&claim, number).await }
        };
        drop(self.ask_some("release", others, release));
        let mut round = self.ask_some("release", granted, release);
        let _ = timeout(LONGEST_PAUSE, async { while round.next().await.is_some() {} }).await;
    }

    /// What an attempt without a grant comes to; `None` while the answers of `open` nodes may change that.
    fn outcome(&self, tally: &mut Tally, open: usize) -> Option<Outcome> {
        let (other, votes) = tally.other();
        let other = other.cloned();
        if tally.is_stale {
            return Some(Outcome::Split(other));
        }
        if votes >= self.majority() {
            return other.map(Outcome::Busy);
        }
        if tally.errors.len() > self.len() - self.majority() {
            let error = self.no_majority("acquire", std::mem::take(&mut tally.errors));
            return Some(match tally.young >= self.majority() {
                true => Outcome::Young(error),
                false => Outcome::Failed(error),
            });
        }
        // Of nodes that fail it is not known who holds them: if they are the majority, that is the outcome.
        if tally.votes.len() + open >= self.majority() || open > 0 && !tally.errors.is_empty() {
            return None;
        }
        Some(match other {
            Some(busy) if tally.votes.is_empty() => Outcome::Busy(busy),
            other => Outcome::Split(other),
        })
    }

    /// The token and the lease of the claim, once a majority of all nodes has granted it and has the token.
    async fn agreed(
        &self,
        claim: &Claim,
        tally: &mut Tally,
        is_open: bool,
        until: Instant,
    ) -> Option<(FencingToken, Lease)> {
        let majority = self.majority();
        if tally.votes.len() < majority {
            return None;
        }
        // Asked for again, the claim keeps the token that it has, although others may have granted it with a higher one.
        let known = self.held.token(claim.owner());
        if known.is_some_and(|known| tally.at(known) < majority) && is_open {
            return None;
        }
        let tokens = || tally.votes.iter().map(|vote| vote.token);
        let top = tokens().find(|token| tally.at(*token) >= majority).or(tokens().max())?;
        if tally.at(top) < majority {
            // Nodes that have not answered yet may be faster than one that falls silent now.
            let until = if is_open {
                until.min(Instant::now() + 10 * FIRST_PAUSE)
            } else {
                until
            };
            self.confirm(claim, tally, top, until).await;
        }
        if tally.at(top) < majority {
            return None;
        }
        // The lease that ends first is the one that is kept.
        let agreed = tally.votes.iter().filter(|vote| vote.token == top);
        let lease = agreed
            .map(|vote| &vote.lease)
            .min_by_key(|lease| lease.deadline())?
            .clone();
        let now = self.now();
        tally.is_stale = !lease.is_valid(now) || lease.deadline().since(now) < claim.ttl() / 4;
        (!tally.is_stale).then_some((top, lease))
    }

    /// Raises the nodes that have granted a lower token to that one, until a majority has it. A node that does not confirm it does not
    /// count.
    async fn confirm(&self, claim: &Claim, tally: &mut Tally, top: FencingToken, until: Instant) {
        let mut round = self.ask_confirm(claim, &tally.votes, top);
        while tally.at(top) < self.majority() {
            let Ok(Some((node, confirmed))) = timeout_at(until, round.next()).await else {
                break;
            };
            match confirmed {
                Ok(true) => {
                    let vote = tally.votes.iter_mut().find(|vote| vote.node == node);
                    vote.into_iter().for_each(|vote| vote.token = top);
                }
                Ok(false) => {
                    tally.votes.retain(|vote| vote.node != node);
                    tally.lost.push(node);
                }
                Err(error) => {
                    tally.votes.retain(|vote| vote.node != node);
                    tally.errors.push((node, error));
                }
            }
        }
    }

    fn ask_confirm(&self, claim: &Claim, votes: &[Vote], top: FencingToken) -> Round<bool> {
        let lower: BTreeMap<_, _> = votes
            .iter()
            .filter(|vote| vote.token != top)
            .map(|vote| (vote.node, vote.token))
            .collect();
        self.ask_some("acquire", lower.keys().copied().collect(), |number, node| {
            let (claim, presented) = (claim.clone(), lower[&number]);
            async move { node.confirm(&claim, presented, top).await }
        })
    }

    /// Lets the nodes that are not needed for a majority have the token as well.
    fn confirm_rest(&self, claim: &Claim, token: FencingToken, mut tally: Tally, mut round: Round<Answer>) {
        round.answers.close();
        while let Ok((node, answer)) = round.answers.try_recv() {
            tally.count(node, answer);
        }
        drop(self.ask_confirm(claim, &tally.votes, token));
    }

    /// Renews the claim. False if a majority does not have it.
    pub(crate) async fn renew(&self, claim: &Claim) -> Result<bool, LockError> {
        let limit = self.op_timeout;
        let round = self.ask("renew", claim, move |_, node, claim| async move {
            twice(limit, |_| node.renew(&claim)).await.map(Some)
        });
        let renewed = self.decide(round, |_, _| None).await?;
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
                let released = node.release(claim, last).await?;
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
        self.decide(round, |yes, failed| Some(yes + failed >= self.majority()))
            .await
    }

    /// What a majority of all nodes answers: yes, or that yes can have no majority any more. If it is neither, although a majority has
    /// answered, `undecided` says what it is, by how many said yes, and how many failed or do not know.
    pub(super) async fn decide(
        &self,
        mut round: Round<Option<bool>>,
        undecided: impl Fn(usize, usize) -> Option<bool>,
    ) -> Result<bool, LockError> {
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
                None => {
                    let decided = undecided(yes, unknown + errors.len());
                    return decided.ok_or_else(|| self.no_majority(round.operation, errors));
                }
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

    /// Lets the nodes grant locks at once if all of them began without data at about the same time: none of them can have forgotten
    /// what another one knows. Returns whether a majority grants.
    ///
    /// A node that alone lacks data may have granted leases that it has lost, and waits for their end.
    pub(super) async fn open_new(&self) -> Result<bool, LockError> {
        let all = self.born(vec![String::new(); self.len()]).await?;
        let is_open = |born: &Vec<Born>| born.iter().filter(|born| !born.is_new).count() >= self.majority();
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

    /// Waits a little for the nodes that have not answered requests whose outcome is known.
    pub(super) async fn settle(&self) {
        self.under_way.close();
        let _ = timeout(self.op_timeout.min(STRAGGLERS), self.under_way.wait()).await;
    }

    /// The holder on a majority, as far as the nodes that answered can tell: with the token that the majority has, and what is left of
    /// the lease there.
    pub(super) fn holder(&self, holders: impl IntoIterator<Item = Holder>, answered: usize) -> Option<Holder> {
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
async fn twice<T, F>(limit: Duration, ask: impl Fn(bool) -> F) -> Result<T, LockError>
where
    F: Future<Output = Result<T, LockError>>,
{
    let began = Instant::now();
    match ask(false).await {
        Err(error) if error.is_retryable() && began.elapsed() < limit / 4 => {
            sleep(LONGEST_PAUSE).await;
            ask(true).await
        }
        done => done,
    }
}

/// The error with its causes, without the operation, which is said once for all nodes.
fn reason(error: &LockError) -> String {
    let text = format!("{error:#}");
    match error {
        LockError::Unavailable { operation, .. } => {
            let rest = text
                .strip_prefix(operation)
                .and_then(|rest| rest.strip_prefix(" failed: "));
            rest.unwrap_or(&text).to_owned()
        }
        _ => text,
    }
}

/// Between the least and the most of them.
fn spread(ages: impl Iterator<Item = Duration> + Clone) -> Duration {
    let (least, most) = (ages.clone().min(), ages.max());
    most.unwrap_or_default().saturating_sub(least.unwrap_or_default())
}

/// The holder that most nodes tell of, with the token that most of those have: a node that answered after the majority may have granted
/// it with another one, until that is confirmed there too.
pub(super) fn most_agree(holders: &[Holder]) -> Option<&Holder> {
    let count = |same: &dyn Fn(&Holder) -> bool| holders.iter().filter(|holder| same(holder)).count();
    holders.iter().max_by_key(|holder| {
        let owners = count(&|other| other.owner == holder.owner);
        let tokens = count(&|other| other.owner == holder.owner && other.token == holder.token);
        (owners, tokens)
    })
}
