//! Acquiring a name on a majority of the nodes.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use lock_core::{Attempt as Attempted, Busy, Claim, FencingToken, Grant, Lease, LockError, Mode, Wait};
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};
use tokio_util::sync::CancellationToken;

use super::node::{Answer, Confirmed, Node};
use super::quorum::{Quorum, Round, twice};
use crate::subscriptions::Subscriptions;

/// The longest pause after an attempt in which no claim got a majority. The first one is much shorter.
const LONGEST_PAUSE: Duration = Duration::from_millis(100);
const FIRST_PAUSE: Duration = Duration::from_millis(4);

/// The mean pause between two questions of a waiter, the first and the longest.
const FIRST_POLL: Duration = Duration::from_millis(10);
pub(super) const LAST_POLL: Duration = Duration::from_millis(100);

/// For how long an exclusive claim that finds shared ones at a node keeps others out there that come after it: longer than between two of its
/// questions to all nodes.
const ANNOUNCED: Duration = Duration::from_secs(2);

/// How far above the last token of a node another one is chosen at most, as other claims draw tokens at the same time.
const AHEAD: u64 = 256;

/// One attempt to get a claim granted by a majority.
///
/// Attempts of a client are numbered, so that a release which the network holds back does not end what a later attempt is granted.
pub(crate) struct Attempt {
    pub(super) number: u64,
    /// The proposed token, the same for all nodes.
    pub(super) proposal: u64,
    /// The token with which the claim holds the name.
    pub(super) known: Option<FencingToken>,
    /// For how long the claim keeps shared ones out at nodes that shared ones have.
    pub(super) announced: Duration,
    pub(super) over: CancellationToken,
    /// The token of the grant that this attempt came to.
    pub(super) given: OnceLock<FencingToken>,
    pub(super) held: Subscriptions,
}

impl Attempt {
    /// Whether a request of this attempt is still to be sent: until the attempt is given up, or its grant is released.
    pub(super) fn is_wanted(&self, claim: &Claim) -> bool {
        let given = self.given.get().copied();
        !self.over.is_cancelled() || given.is_some() && self.held.token(claim.owner()) == given
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

impl Tally {
    fn count(&mut self, node: usize, answer: Result<Answer, LockError>) {
        match answer {
            Ok(Answer::Granted(token, lease)) => self.votes.push(Vote { node, token, lease }),
            Ok(Answer::Busy(busy)) => self.busy.push(busy),
            Ok(Answer::Young(left)) => {
                self.young += 1;
                let message =
                    format!("this node is new, was restarted or has lost its data, and grants locks in {left:.1?}");
                self.errors.push((node, LockError::unavailable("acquire", message)));
            }
            Err(error) => self.errors.push((node, error)),
        }
    }

    fn at(&self, token: FencingToken) -> usize {
        self.votes.iter().filter(|vote| vote.token == token).count()
    }

    /// The holder on most of the nodes that are busy, and on how many. All that share the name count as one, and so does an exclusive claim that
    /// waits for them.
    fn other(&self) -> (Option<&Busy>, usize) {
        let owner = |busy: &Busy| {
            let alone = busy.holder.as_ref().filter(|holder| holder.mode == Mode::Exclusive);
            alone.and_then(|holder| holder.owner)
        };
        let count = |busy: &&Busy| self.busy.iter().filter(|other| owner(other) == owner(busy)).count();
        let most = self.busy.iter().max_by_key(count);
        (most, most.as_ref().map_or(0, count))
    }
}

impl<N: Node> Quorum<N> {
    /// A reading that the clocks of a majority of the nodes have reached, in microseconds, or 0 if it is not known: what is proposed as
    /// the next token. Every client computes nearly the same, however its own clock is set.
    fn server_micros(&self) -> u64 {
        let mut clocks: Vec<_> = self.nodes.iter().filter_map(|node| node.server_micros()).collect();
        clocks.sort_unstable_by(|a, b| b.cmp(a));
        clocks.get(self.majority() - 1).copied().unwrap_or_default()
    }

    /// Makes attempts until a claim has a majority. While another one holds the name, and the `wait` is not over, asks again and again, with
    /// jitter.
    pub(crate) async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Attempted, LockError> {
        let mut wait = Some(wait).filter(|wait| !wait.is_over(self.now()));
        let deadline = wait.as_ref().and_then(Wait::deadline);
        let left = |longest: Duration| deadline.map_or(longest, |deadline| deadline.since(self.now()).min(longest));
        let announced = match (&wait, claim.mode()) {
            (Some(_), Mode::Exclusive) => ANNOUNCED,
            _ => Duration::ZERO,
        };
        let (mut poll, mut polls, mut may_open) = (FIRST_POLL, 0_u32, true);
        let (mut pause, mut one_first, mut began) = (FIRST_PAUSE, false, Instant::now());
        loop {
            let until = began + self.op_timeout;
            let outcome = self.attempt(claim, self.new_attempt(claim, announced), one_first, 10 * pause, until);
            let (busy, is_split) = match outcome.await {
                Outcome::Granted(grant) => return Ok(Attempted::Granted(grant)),
                Outcome::Young(_) if may_open && self.open_new().await.unwrap_or(false) => {
                    may_open = false;
                    continue;
                }
                // One node after the other, each had little time.
                Outcome::Young(_) | Outcome::Failed(_) if one_first => {
                    one_first = false;
                    continue;
                }
                Outcome::Young(error) | Outcome::Failed(error) => return Err(error),
                // What one node has may be a leftover. A waiter asks all of them now and then.
                Outcome::Busy(busy) | Outcome::Split(Some(busy)) if one_first => (Some(busy), wait.is_none()),
                Outcome::Busy(busy) => (Some(busy), false),
                Outcome::Split(busy) => (busy, true),
            };
            let limit = wait.as_ref().map_or(self.op_timeout / 2, |_| left(LONGEST_PAUSE));
            if is_split && began.elapsed() < limit {
                // Contenders that ask again at the same time would split the nodes again.
                sleep(pause.mul_f64(fastrand::f64())).await;
                pause = (2 * pause).min(LONGEST_PAUSE);
                one_first = !one_first;
                continue;
            }
            let late = "too few nodes granted the lock at the same time; raise the ttl if this goes on";
            let busy = busy.ok_or_else(|| LockError::unavailable("acquire", late))?;
            let Some(wait) = &mut wait else {
                return Ok(busy.into());
            };
            let next = left(poll.mul_f64(0.5 + fastrand::f64()));
            wait.busy(&busy);
            if next.is_zero() {
                if !announced.is_zero() {
                    let number = self.last.load(Ordering::Relaxed);
                    self.give_up(claim, number, self.order(claim), Vec::new(), false).await;
                }
                return Ok(busy.into());
            }
            sleep(next).await;
            (poll, polls) = ((poll * 3 / 2).min(LAST_POLL), polls + 1);
            // Most often, one request tells that the lock is busy.
            one_first = polls % 4 > 0;
            (pause, began) = (FIRST_PAUSE, Instant::now());
        }
    }

    fn new_attempt(&self, claim: &Claim, announced: Duration) -> Arc<Attempt> {
        Arc::new(Attempt {
            number: self.last.fetch_add(1, Ordering::Relaxed) + 1,
            proposal: self.server_micros(),
            known: self.held.token(claim.owner()),
            announced,
            over: CancellationToken::new(),
            given: OnceLock::new(),
            held: self.held.clone(),
        })
    }

    /// Asks all nodes once, in one round trip; or if `one_first`, the others once one has granted the claim: contenders do not split the nodes
    /// then, as all ask the same one first. Without a grant, what some of them have granted is given back.
    ///
    /// While some nodes have granted the claim and others are busy, waits no longer than `patience` for one more answer: other claims
    /// may need the nodes that this one has.
    async fn attempt(
        &self,
        claim: &Claim,
        attempt: Arc<Attempt>,
        one_first: bool,
        patience: Duration,
        until: Instant,
    ) -> Outcome {
        let over = attempt.over.clone().drop_guard();
        let mut tally = Tally::default();
        let mut nodes = self.order(claim);
        while one_first && tally.votes.is_empty() && tally.busy.is_empty() && !nodes.is_empty() {
            let node = nodes.remove(0);
            let mut round = self.ask_acquire(claim, &attempt, vec![node]);
            let answer = timeout(LONGEST_PAUSE.min(self.op_timeout), round.next()).await;
            let silent = || (node, Err(LockError::no_answer("acquire", LONGEST_PAUSE)));
            let (node, answer) = answer.ok().flatten().unwrap_or_else(silent);
            tally.count(node, answer);
        }
        if one_first && tally.votes.is_empty() {
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
            self.give_up(claim, attempt.number, granted, others, true).await;
        }
        outcome
    }

    /// The nodes in the order in which every client asks them for that name.
    fn order(&self, claim: &Claim) -> Vec<usize> {
        let mut nodes: Vec<_> = (0..self.len()).collect();
        nodes.sort_by_key(|node| self.nodes[*node].place());
        let sum: usize = claim.name().as_str().bytes().map(usize::from).sum();
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
                    node.confirm(&claim, *token, *given, true).await?;
                }
                Ok(answer)
            }
        })
    }

    /// Releases what an attempt has been granted by these nodes, and may be granted by others. `goes_on` says whether the claim may still wait.
    async fn give_up(&self, claim: &Claim, number: u64, granted: Vec<usize>, others: Vec<usize>, goes_on: bool) {
        let release = |_: usize, node: Arc<N>| {
            let claim = claim.clone();
            async move { node.release(&claim, number, goes_on).await }
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
        let mut top = tokens().find(|token| tally.at(*token) >= majority).or(tokens().max())?;
        if tally.at(top) < majority {
            // Nodes that have not answered yet may be faster than one that falls silent now.
            let soon = Instant::now() + 10 * FIRST_PAUSE;
            let until = if is_open { until.min(soon) } else { until };
            top = self.confirm(claim, tally, top, until).await;
        }
        if tally.at(top) < majority {
            return None;
        }
        // The lease that ends first is the one that is kept.
        let leases = tally
            .votes
            .iter()
            .filter(|vote| vote.token == top)
            .map(|vote| &vote.lease);
        let lease = leases.min_by_key(|lease| lease.deadline())?.clone();
        let now = self.now();
        tally.is_stale = !lease.is_valid(now) || lease.deadline().since(now) < claim.ttl() / 4;
        (!tally.is_stale).then_some((top, lease))
    }

    /// Raises the nodes that have granted a lower token to that one, until a majority has it, or to a higher one that the majority has not drawn
    /// yet. Returns the token. A node that does not confirm it does not count.
    ///
    /// No other claim comes to the same token: on each node of a majority this one has drawn it, or has raised the counter to it. Two majorities
    /// have a node in common, whose counter comes to a number once.
    async fn confirm(&self, claim: &Claim, tally: &mut Tally, mut top: FencingToken, until: Instant) -> FencingToken {
        loop {
            // The last token of nodes that have drawn this one already.
            let mut passed = None;
            let mut round = self.ask_confirm(claim, &tally.votes, top, false);
            while tally.at(top) < self.majority() && tally.at(top) + round.open.len() >= self.majority() {
                let Ok(Some((node, confirmed))) = timeout_at(until, round.next()).await else {
                    break;
                };
                let Some(at) = tally.votes.iter().position(|vote| vote.node == node) else {
                    continue;
                };
                match confirmed {
                    Ok(Confirmed::Yes) => tally.votes[at].token = top,
                    Ok(Confirmed::Passed(last)) => passed = passed.max(Some(last)),
                    Ok(Confirmed::Lost) => tally.lost.push(tally.votes.remove(at).node),
                    Err(error) => tally.errors.push((tally.votes.remove(at).node, error)),
                }
            }
            let is_over = tally.at(top) >= self.majority() || tally.votes.len() < self.majority();
            let next = passed.filter(|_| !is_over && Instant::now() < until);
            let next = next.map(|last| FencingToken::new(last + 1 + fastrand::u64(..AHEAD)));
            let Some(Ok(next)) = next else { return top };
            top = next;
        }
    }

    fn ask_confirm(&self, claim: &Claim, votes: &[Vote], top: FencingToken, is_agreed: bool) -> Round<Confirmed> {
        let lower = votes.iter().filter(|vote| vote.token != top);
        let lower: BTreeMap<_, _> = lower.map(|vote| (vote.node, vote.token)).collect();
        self.ask_some("acquire", lower.keys().copied().collect(), |number, node| {
            let (claim, presented) = (claim.clone(), lower[&number]);
            async move { node.confirm(&claim, presented, top, is_agreed).await }
        })
    }

    /// Lets the nodes that are not needed for a majority have the token as well.
    fn confirm_rest(&self, claim: &Claim, token: FencingToken, mut tally: Tally, round: Round<Answer>) {
        for (node, answer) in round.into_answers() {
            tally.count(node, answer);
        }
        drop(self.ask_confirm(claim, &tally.votes, token, true));
    }
}
