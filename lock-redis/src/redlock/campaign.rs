//! One acquisition under way: what each node has answered, and what is asked next.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use lock_core::{Attempt, Busy, Claim, FencingToken, Grant, LockError, OwnerId, Stamp, Wait};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::quorum::{PAUSE, Quorum, Round, twice};
use crate::requests::OnBusy;
use crate::session::Session;

/// How long a waiter keeps nodes that are too few: the releases of a holder arrive at the nodes one after the other.
const PATIENCE: Duration = Duration::from_millis(40);

/// Before a node that failed is asked again.
const RETRY: Duration = Duration::from_millis(250);

/// What a node has answered.
enum Seat {
    Asked,
    Busy(Option<OwnerId>),
    Granted(Grant),
    Failed(LockError),
}

/// One acquisition under way.
pub(super) struct Campaign<'a> {
    quorum: &'a Quorum,
    claim: &'a Claim,
    seats: Vec<Seat>,
    round: Round<Result<Attempt, LockError>>,
    tell: mpsc::UnboundedSender<(usize, Busy)>,
    told: mpsc::UnboundedReceiver<(usize, Busy)>,
    busy: Busy,
    /// Ends the waits in queues.
    over: CancellationToken,
}

impl<'a> Campaign<'a> {
    pub(super) fn new(quorum: &'a Quorum, claim: &'a Claim) -> Self {
        let (tell, told) = mpsc::unbounded_channel();
        Self {
            quorum,
            claim,
            seats: (0..quorum.len()).map(|_| Seat::Asked).collect(),
            round: Round::new(),
            tell,
            told,
            busy: Busy::default(),
            over: CancellationToken::new(),
        }
    }

    /// Asks a node. What it answered before does not count any more.
    pub(super) fn ask(&mut self, node: usize, on_busy: OnBusy) {
        self.seats[node] = Seat::Asked;
        self.ask_after(node, on_busy, Duration::ZERO);
    }

    /// The node has failed. It is asked again after a pause.
    fn retry(&mut self, node: usize, error: LockError) {
        self.seats[node] = Seat::Failed(error);
        self.ask_after(node, OnBusy::Queue, RETRY);
    }

    /// Asks a node after a pause, and when it cannot get a request any more that frees it.
    fn ask_after(&mut self, node: usize, on_busy: OnBusy, pause: Duration) {
        let session = self.quorum.sessions[node].clone();
        let (claim, tell, over) = (self.claim.clone(), self.tell.clone(), self.over.clone());
        let claims = Arc::clone(&self.quorum.claims);
        self.round.push(Box::pin(async move {
            // A sleep of no length takes a tick of the timer, which is a millisecond.
            if !pause.is_zero() {
                sleep(pause).await;
            }
            let limit = session.settings().op_timeout / 4;
            let now = session.clock().now();
            if !claims.counts(claim.owner(), node, now, limit).await {
                let why = "an earlier release of this claim may be under way to the node";
                return (node, Err(LockError::unavailable("acquire", why)));
            }
            if on_busy == OnBusy::Fail {
                return (node, try_once(&session, &claim).await);
            }
            let yielded = on_busy == OnBusy::Yield;
            if yielded {
                let now = session.clock().now();
                claims.free(claim.owner(), [node], now, now + claim.ttl());
            }
            let queued = CancellationToken::new();
            let waiting = wait_at(&session, &claim, on_busy, || {
                let (tell, queued, claims, owner) = (tell.clone(), queued.clone(), claims.clone(), claim.owner());
                Wait::until(None).on_busy(move |busy| {
                    if yielded {
                        claims.confirm(owner, node);
                    }
                    let _ = tell.send((node, busy));
                    queued.cancel();
                })
            });
            let answer = tokio::select! {
                biased;
                answer = waiting => answer,
                () = async { queued.cancelled().await; over.cancelled().await } => Ok(Attempt::busy()),
            };
            if yielded && answer.is_ok() {
                claims.confirm(claim.owner(), node);
            }
            (node, answer)
        }));
    }

    /// Waits until there is a grant, or the wait is over. If `once`, only until another claim has a majority.
    pub(super) async fn wait(mut self, mut wait: Wait, once: bool) -> Result<Attempt, LockError> {
        if once {
            self.yield_all();
            for node in 0..self.seats.len() {
                if matches!(self.seats[node], Seat::Busy(_)) {
                    self.ask(node, OnBusy::Queue);
                }
            }
        }
        let mut give_way: Option<Stamp> = None;
        let mut settled = once;
        loop {
            if let Some(grant) = self.granted().await? {
                return Ok(self.finish(grant));
            }
            let (held, failed) = (self.holds(), self.failed());
            let spare = self.quorum.len() - self.quorum.majority();
            if failed > spare {
                self.settle().await;
                return Err(self.failure());
            }
            let others = self.seats.iter().filter(|seat| matches!(seat, Seat::Busy(_))).count();
            if others + failed > spare {
                wait.busy(&self.busy);
                if once && self.other_holder() {
                    return self.give_up().await;
                }
                // Several claims have asked at the same time, and none has a majority: no need to wait for a release.
                if !settled && held > 0 && !self.other_holder() && held + others + failed == self.seats.len() {
                    self.yield_all();
                    give_way = None;
                }
                settled = true;
            }
            if self.holds() == 0 {
                give_way = None;
            } else if give_way.is_none() {
                give_way = Some(self.quorum.now() + PATIENCE.mul_f64(0.75 + self.claim_jitter()));
            }
            let now = self.quorum.now();
            if wait.is_over(now) {
                return self.give_up().await;
            }
            if give_way.is_some_and(|stamp| stamp <= now) {
                self.yield_all();
                give_way = None;
            }
            let next = [wait.deadline(), give_way].into_iter().flatten().min();
            let pause = next.map(|stamp| stamp.since(now));
            tokio::select! {
                biased;
                () = self.hear() => {}
                () = async { sleep(pause.unwrap_or_default()).await }, if pause.is_some() => {}
            }
        }
    }

    /// Waits a little for the nodes that are being yielded: until they have answered, they do not count for this claim.
    async fn settle(&mut self) {
        let owner = self.claim.owner();
        let yielding = async {
            while self.quorum.claims.any_unconfirmed(owner, self.quorum.now()) {
                self.hear().await;
            }
        };
        let _ = timeout(PAUSE, yielding).await;
    }

    /// Something between 0 and 0.5 that differs between claims.
    fn claim_jitter(&self) -> f64 {
        let owner = self.claim.owner().to_string();
        f64::from(owner.bytes().fold(0u8, u8::wrapping_add)) / 512.0
    }

    /// The next answer of a node.
    pub(super) async fn hear(&mut self) {
        tokio::select! {
            biased;
            Some((node, busy)) = self.told.recv() => {
                let seat = self.found_busy(busy);
                if !matches!(self.seats[node], Seat::Granted(_)) {
                    self.seats[node] = seat;
                }
            }
            Some((node, answer)) = self.round.next() => match answer {
                Ok(Attempt::Granted(grant)) => self.seats[node] = Seat::Granted(grant),
                Ok(Attempt::Busy(busy)) => self.seats[node] = self.found_busy(busy),
                Ok(_) => {}
                Err(error) => self.retry(node, error),
            },
            else => std::future::pending().await,
        }
    }

    fn found_busy(&mut self, busy: Busy) -> Seat {
        let owner = busy.holder.as_ref().and_then(|holder| holder.owner);
        if owner.is_some() {
            self.busy = busy;
        }
        Seat::Busy(owner)
    }

    pub(super) fn holds(&self) -> usize {
        self.seats
            .iter()
            .filter(|seat| matches!(seat, Seat::Granted(_)))
            .count()
    }

    /// How many nodes have not answered yet.
    pub(super) fn open(&self) -> usize {
        self.seats.iter().filter(|seat| matches!(seat, Seat::Asked)).count()
    }

    pub(super) fn failed(&self) -> usize {
        self.seats.iter().filter(|seat| matches!(seat, Seat::Failed(_))).count()
    }

    /// Whether another claim has a majority.
    pub(super) fn other_holder(&self) -> bool {
        let owner = |seat: &Seat| match seat {
            Seat::Busy(owner) => *owner,
            _ => None,
        };
        let owners: Vec<_> = self.seats.iter().filter_map(owner).collect();
        let votes = |owner| owners.iter().filter(|other| *other == owner).count();
        owners.iter().any(|owner| votes(owner) >= self.quorum.majority())
    }

    /// Gives the nodes that are held to the earliest waiter, which may be this one.
    fn yield_all(&mut self) {
        for node in 0..self.seats.len() {
            if matches!(self.seats[node], Seat::Granted(_)) {
                self.ask(node, OnBusy::Yield);
            }
        }
    }

    /// The grant, once a majority of all nodes has granted the claim and has the token.
    pub(super) async fn granted(&mut self) -> Result<Option<Grant>, LockError> {
        let majority = self.quorum.majority();
        if self.holds() < majority {
            return Ok(None);
        }
        let token = |seat: &Seat| match seat {
            Seat::Granted(grant) => Some(grant.token),
            _ => None,
        };
        let agree = |seats: &[Seat], top| seats.iter().filter(|seat| token(seat) == Some(top)).count();
        // Asked for again, the claim has the token that a majority has, although others have granted it with a higher one.
        let has_majority = |&top: &FencingToken| agree(&self.seats, top) >= majority;
        let tokens = || self.seats.iter().filter_map(token);
        if let Some(known) = self.quorum.claims.token(self.claim.owner())
            && agree(&self.seats, known) < majority
            && self.open() > 0
        {
            return Ok(None);
        }
        let Some(top) = tokens().find(has_majority).or_else(|| tokens().max()) else {
            return Ok(None);
        };
        if agree(&self.seats, top) < majority {
            self.confirm(top).await;
            if agree(&self.seats, top) < majority {
                return Ok(None);
            }
        }
        // The lease that ends first is the one that is kept.
        let agreed = self.seats.iter().filter_map(|seat| match seat {
            Seat::Granted(grant) if grant.token == top => Some(grant.lease.clone()),
            _ => None,
        });
        let Some(lease) = agreed.min_by_key(|lease| lease.deadline()) else {
            return Ok(None);
        };
        let now = self.quorum.now();
        if !lease.is_valid(now) || lease.deadline().since(now) < self.claim.ttl() / 4 {
            // Too old to be of use.
            self.yield_all();
            return Ok(None);
        }
        let grant = Grant::new(self.claim.clone(), top, lease);
        self.quorum.claims.hold(self.claim.owner(), top, now);
        for session in &self.quorum.sessions {
            session.granted(&grant);
        }
        Ok(Some(grant))
    }

    /// Raises the nodes that have granted a lower token to that one. A node that does not confirm it counts no more, and is asked anew.
    async fn confirm(&mut self, top: FencingToken) {
        let mut round = Round::new();
        for (node, seat) in self.seats.iter().enumerate() {
            if let Seat::Granted(grant) = seat
                && grant.token != top
            {
                let confirming = confirm(self.quorum.sessions[node].clone(), self.claim.clone(), grant.token, top);
                round.push(Box::pin(async move { (node, confirming.await) }) as _);
            }
        }
        while let Some((node, confirmed)) = round.next().await {
            match (&mut self.seats[node], confirmed) {
                (Seat::Granted(grant), Ok(true)) => grant.token = top,
                (_, Ok(false)) => self.ask(node, OnBusy::Queue),
                (_, Err(error)) => self.retry(node, error),
                _ => {}
            }
            let agree = |seat: &&Seat| matches!(seat, Seat::Granted(grant) if grant.token == top);
            if self.seats.iter().filter(agree).count() >= self.quorum.majority() {
                break;
            }
        }
        self.quorum.stragglers.go_on(&self.quorum.executor, round, None);
    }

    /// Releases what there is, everywhere.
    pub(super) async fn give_up(self) -> Result<Attempt, LockError> {
        let (quorum, claim, busy) = (self.quorum, self.claim.clone(), self.busy.clone());
        drop(self);
        quorum.release(&claim).await?;
        Ok(busy.into())
    }

    /// Lets the nodes that have not answered yet get the request too, and all nodes the token.
    pub(super) fn finish(self, grant: Grant) -> Attempt {
        let owner = self.claim.owner();
        self.over.cancel();
        let rest = Round::new();
        let token = grant.token;
        for (node, seat) in self.seats.iter().enumerate() {
            if let Seat::Granted(other) = seat
                && other.token != token
            {
                let confirming = confirm(
                    self.quorum.sessions[node].clone(),
                    self.claim.clone(),
                    other.token,
                    token,
                );
                rest.push(Box::pin(async move {
                    let _ = confirming.await;
                    (node, ())
                }) as _);
            }
        }
        for answering in self.round {
            let (sessions, claim) = (self.quorum.sessions.clone(), self.claim.clone());
            rest.push(Box::pin(async move {
                let (node, answer) = answering.await;
                if let Ok(Attempt::Granted(other)) = answer
                    && other.token != token
                {
                    let _ = confirm(sessions[node].clone(), claim, other.token, token).await;
                }
                (node, ())
            }));
        }
        self.quorum.stragglers.go_on(&self.quorum.executor, rest, Some(owner));
        Attempt::Granted(grant)
    }

    /// Why there can be no majority. What there is stays: the core releases the claim, or asks again.
    pub(super) fn failure(self) -> LockError {
        let failed = |(node, seat): (usize, &Seat)| match seat {
            Seat::Failed(error) => Some((node, error.clone())),
            _ => None,
        };
        let errors = self.seats.iter().enumerate().filter_map(failed).collect();
        self.quorum.no_majority("acquire", errors)
    }
}

/// Asks a node for the lock without waiting for it; once more if that fails.
async fn try_once(session: &Arc<Session>, claim: &Claim) -> Result<Attempt, LockError> {
    let ask = || {
        let (session, claim) = (Arc::clone(session), claim.clone());
        async move {
            let asking = async {
                let answer = session.try_for(&claim).await?;
                session.attempt(answer).await
            };
            session.limited("acquire", asking).await
        }
    };
    twice(session.settings().op_timeout, ask).await
}

/// Waits in the queue of a node; once more if that fails soon, unless the failed request may still free the node.
async fn wait_at(
    session: &Session,
    claim: &Claim,
    on_busy: OnBusy,
    wait: impl Fn() -> Wait,
) -> Result<Attempt, LockError> {
    let began = Instant::now();
    match session.wait(claim, wait(), on_busy).await {
        Err(error)
            if error.is_retryable()
                && on_busy != OnBusy::Yield
                && !session.is_young()
                && began.elapsed() < session.settings().op_timeout / 4 =>
        {
            sleep(PAUSE).await;
            session.wait(claim, wait(), on_busy).await
        }
        answer => answer,
    }
}

/// Raises the node to the token, if it still has the grant with the token `presented`.
async fn confirm(
    session: Arc<Session>,
    claim: Claim,
    presented: FencingToken,
    token: FencingToken,
) -> Result<bool, LockError> {
    let asking = async {
        session
            .confirm_on(&session.link().await?, &claim, presented, token)
            .await
    };
    session.limited("acquire", asking).await
}
