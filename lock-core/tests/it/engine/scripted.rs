//! A server that does what the test tells it to: fail, hang, answer late, lose its reply, or work on a request long
//! after its sender went away.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use lock_core::{
    Attempt, Busy, Capabilities, Claim, Clock, DistributedLock, FencingToken, Grant, Holder, Lease, LeaseId, LockError,
    LockName, Locks, ManualClock, OwnerId, Released, Renewal, Scope, Stamp, Wait,
};

use crate::paused;

pub(crate) const SECOND: Duration = Duration::from_secs(1);
pub(crate) const TTL: Duration = Duration::from_secs(30);
pub(crate) const OP_TIMEOUT: Duration = Duration::from_secs(5);

/// The label of claims that are not those of the client.
const ELSEWHERE: &str = "elsewhere";

/// Releases of names that start with it are never answered.
pub(crate) const HANGING: &str = "hanging/";

/// What happens to one request.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fate {
    /// Refused before anything was done.
    Fail,
    /// Not sent: there is no connection.
    Refuse,
    /// Not sent: the server refuses the credentials.
    Deny,
    /// The same, after a while.
    FailAfter(Duration),
    /// Never answered, nothing done.
    Hang,
    /// Done at once, never answered.
    LoseReply,
    /// Done at once, answered after a while.
    AnswerAfter(Duration),
    /// Done after a while, even if the sender is gone by then.
    DeliverAfter(Duration),
    /// The client library panics.
    Panic,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Op {
    Try,
    Acquire,
    Renew,
    Reserve,
    Release,
    Holders,
    List,
    Close,
}

/// A client of the server.
#[derive(Clone, Debug, Default)]
pub(crate) struct Scripted {
    server: Arc<Mutex<Server>>,
    clock: Clock,
    pub(crate) fair: bool,
    pub(crate) shares: bool,
    /// Grants as many tokens as a claim wants.
    pub(crate) blocks: bool,
    pub(crate) reserves: bool,
    /// Ends each wait at once.
    pub(crate) gives_up_early: bool,
    /// Answers with a grant of a claim of its own.
    pub(crate) grants_another_claim: bool,
    /// How long the client keeps its locks.
    pub(crate) linger: Duration,
    /// The client whose statistics are read when a request to acquire begins.
    pub(crate) client: Arc<OnceLock<Locks>>,
}

#[derive(Debug, Default)]
pub(crate) struct Server {
    held: HashMap<String, (Claim, FencingToken, Stamp)>,
    reserved: HashMap<String, (OwnerId, Stamp)>,
    token: u64,
    fates: HashMap<Op, VecDeque<Fate>>,
    log: Vec<(Op, Stamp)>,
    /// The owners for whom names were asked for, in order.
    pub(crate) asked: Vec<OwnerId>,
    /// How many requests the client counted as waiting when each of them began.
    pub(crate) waiting: Vec<u64>,
    /// The lease that all locks share, and until when the server keeps it.
    shared: Option<(Lease, Stamp)>,
    /// How often the client asked for a name that an earlier claim of its own held.
    pub(crate) crossed: usize,
}

/// The scripted server, a client of it, and the hand of its clock. Time is tokio's paused time; the clock follows it to
/// the millisecond, and can be advanced beyond it, which is what a suspended machine looks like.
pub(crate) struct World {
    pub(crate) server: Scripted,
    pub(crate) locks: Locks,
    pub(crate) hand: ManualClock,
}

impl World {
    pub(crate) fn new() -> Self {
        Self::with(|_| {})
    }

    pub(crate) fn with(change: impl FnOnce(&mut Scripted)) -> Self {
        let (clock, hand) = paused::clock();
        let mut server = Scripted {
            clock,
            fair: true,
            ..Scripted::default()
        };
        change(&mut server);
        let options = paused::options().ttl(TTL).linger(server.linger);
        let locks = Locks::with_options(server.clone(), options);
        Self { server, locks, hand }
    }

    /// Lets time pass.
    pub(crate) async fn pass(&self, time: Duration) {
        let until = self.now() + time;
        while self.now() < until {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Lets everything run that can run without time passing.
    pub(crate) async fn settle(&self) {
        for _ in 0..50 {
            tokio::task::yield_now().await;
        }
    }

    /// How many requests to acquire and to release there were.
    pub(crate) fn requests(&self) -> usize {
        [Op::Try, Op::Acquire, Op::Release]
            .map(|op| self.server.count(op))
            .iter()
            .sum()
    }

    pub(crate) fn now(&self) -> Stamp {
        self.server.clock.now()
    }
}

impl Scripted {
    pub(crate) fn state(&self) -> MutexGuard<'_, Server> {
        self.server.lock().unwrap()
    }

    /// The next requests of that kind end so, one after the other.
    pub(crate) fn next(&self, op: Op, fates: impl IntoIterator<Item = Fate>) {
        self.state().fates.entry(op).or_default().extend(fates);
    }

    /// No more surprises.
    pub(crate) fn heal(&self) {
        self.state().fates.clear();
    }

    pub(crate) fn count(&self, op: Op) -> usize {
        self.times(op).len()
    }

    pub(crate) fn times(&self, op: Op) -> Vec<Stamp> {
        let state = self.state();
        let times = state.log.iter().filter(|(other, _)| *other == op);
        times.map(|(_, at)| *at).collect()
    }

    /// Whether the server keeps that name now.
    pub(crate) fn keeps(&self, name: &str) -> bool {
        let (state, now) = (self.state(), self.clock.now());
        state.held.get(name).is_some_and(|(_, _, until)| *until > now) || state.is_reserved(name, now)
    }

    /// A client of another process takes the name for `ttl`.
    pub(crate) fn occupy(&self, name: &str, ttl: Duration) {
        assert!(!self.keeps(name));
        let claim = Claim::new(name.parse().unwrap(), ttl).with_label(ELSEWHERE);
        let (mut state, until) = (self.state(), self.clock.now() + ttl);
        state.token += 1;
        let token = FencingToken::new(state.token).unwrap();
        state.held.insert(name.to_owned(), (claim, token, until));
    }

    pub(crate) fn take_away(&self, name: &str) {
        self.state().held.remove(name);
    }

    /// Ends the lease that all locks share.
    pub(crate) fn end_shared_lease(&self) {
        let now = self.clock.now();
        self.state().shared.as_mut().unwrap().1 = now;
    }

    /// What the server answers to a claim whose request was sent at `sent`.
    fn attempt(self, server: &mut Server, claim: &Claim, sent: Stamp, now: Stamp) -> Attempt {
        let name = claim.name().as_str();
        let (first, last) = match server.held.get(name) {
            Some((holder, token, until)) if *until > now => {
                if holder.owner() != claim.owner() {
                    server.crossed += usize::from(holder.label() != Some(ELSEWHERE));
                    let busy = Busy::default().with_retry_after(until.since(now));
                    return busy.with_holder(Holder::of(holder)).into();
                }
                (*token, *token)
            }
            _ if server.is_reserved(name, now) => return Attempt::busy(),
            _ => {
                let blocks = self.blocks || !self.linger.is_zero();
                let first = server.token + 1;
                server.token += if blocks { claim.tokens_wanted().get().into() } else { 1 };
                [first, server.token]
                    .map(|token| FencingToken::new(token).unwrap())
                    .into()
            }
        };
        server
            .held
            .insert(name.to_owned(), (claim.clone(), last, now + claim.ttl()));
        // A lease counts from the send, as a backend must see to.
        let lease = if self.shares {
            let new = || (Lease::shared("s", claim.ttl(), sent), now + claim.ttl());
            server.shared.get_or_insert_with(new).0.clone()
        } else {
            Lease::for_claim(claim, sent)
        };
        let granted = match self.grants_another_claim {
            true => Claim::new(claim.name().clone(), claim.ttl()),
            false => claim.clone(),
        };
        Attempt::Granted(Grant::new(granted, last, lease).with_first_token(first))
    }

    async fn ask(&self, op: Op, claim: &Claim) -> Result<Attempt, LockError> {
        let (script, claim, sent) = (self.clone(), claim.clone(), self.clock.now());
        self.request(op, move |server, now| script.attempt(server, &claim, sent, now))
            .await
    }

    async fn request<T: Send + 'static>(
        &self,
        op: Op,
        work: impl FnOnce(&mut Server, Stamp) -> T + Send + 'static,
    ) -> Result<T, LockError> {
        let now = self.clock.now();
        let fate = {
            let mut server = self.server.lock().unwrap();
            server.log.push((op, now));
            server.fates.get_mut(&op).and_then(VecDeque::pop_front)
        };
        let server = Arc::clone(&self.server);
        match fate {
            None => Ok(work(&mut server.lock().unwrap(), now)),
            Some(Fate::Fail) => Err(LockError::failed("the script", "refused")),
            Some(Fate::Refuse) => Err(LockError::failed("the script", "connection refused").unsent()),
            Some(Fate::Deny) => Err(LockError::configuration("the password is wrong").unsent()),
            Some(Fate::FailAfter(time)) => {
                tokio::time::sleep(time).await;
                Err(LockError::failed("the script", "refused"))
            }
            Some(Fate::Hang) => std::future::pending().await,
            Some(Fate::LoseReply) => {
                work(&mut server.lock().unwrap(), now);
                std::future::pending().await
            }
            Some(Fate::AnswerAfter(time)) => {
                let answer = work(&mut server.lock().unwrap(), now);
                tokio::time::sleep(time).await;
                Ok(answer)
            }
            Some(Fate::DeliverAfter(time)) => {
                let clock = self.clock.clone();
                let late = tokio::spawn(async move {
                    tokio::time::sleep(time).await;
                    work(&mut server.lock().unwrap(), clock.now())
                });
                late.await.map_err(|e| LockError::failed("the script", e))
            }
            Some(Fate::Panic) => panic!("told to panic"),
        }
    }
}

impl Server {
    fn is_reserved(&self, name: &str, now: Stamp) -> bool {
        self.reserved.get(name).is_some_and(|(_, until)| *until > now)
    }

    /// Until when the server keeps the lock of that claim, if it does.
    fn hold_of(&mut self, claim: &Claim, now: Stamp) -> Option<&mut Stamp> {
        let (holder, _, until) = self.held.get_mut(claim.name().as_str())?;
        (holder.owner() == claim.owner() && *until > now).then_some(until)
    }

    fn renew(&mut self, lease: &Lease, now: Stamp) -> Renewal {
        let until = match lease.id() {
            LeaseId::Claim(claim) => self.hold_of(claim, now),
            _ => self
                .shared
                .as_mut()
                .map(|(_, until)| until)
                .filter(|until| **until > now),
        };
        match until {
            Some(until) => {
                *until = now + lease.ttl();
                Renewal::Renewed
            }
            None => Renewal::NotHeld,
        }
    }

    fn reserve(&mut self, claim: &Claim, length: Duration, now: Stamp) -> Renewal {
        if self.hold_of(claim, now).is_none() {
            return Renewal::NotHeld;
        }
        self.reserved
            .insert(claim.name().to_string(), (claim.owner(), now + length));
        Renewal::Renewed
    }

    fn release(&mut self, claim: &Claim, keep: Option<Duration>, now: Stamp) -> Released {
        let name = claim.name().as_str();
        let is_held = self.hold_of(claim, now).is_some();
        match keep {
            Some(rest) => drop(self.reserve(claim, rest, now)),
            None => self.reserved.retain(|_, (owner, _)| *owner != claim.owner()),
        }
        if !is_held {
            return Released::NotHeld;
        }
        self.held.remove(name);
        Released::Released
    }
}

#[async_trait]
impl DistributedLock for Scripted {
    fn capabilities(&self) -> Capabilities {
        let mut capabilities = Capabilities::new(Scope::Server).with_op_timeout(OP_TIMEOUT);
        capabilities.reservations = self.reserves;
        if self.fair {
            capabilities.with_fairness()
        } else {
            capabilities
        }
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, LockError> {
        let waiting = self.client.get().map(|client| client.stats().waiting);
        self.state().asked.push(claim.owner());
        self.state().waiting.extend(waiting);
        self.ask(Op::Try, claim).await
    }

    async fn renew(&self, lease: &Lease) -> Result<Renewal, LockError> {
        let lease = lease.clone();
        self.request(Op::Renew, move |server, now| server.renew(&lease, now))
            .await
    }

    async fn release(&self, claim: &Claim, keep: Option<Duration>) -> Result<Released, LockError> {
        if claim.name().as_str().starts_with(HANGING) {
            return std::future::pending().await;
        }
        let claim = claim.clone();
        self.request(Op::Release, move |server, now| server.release(&claim, keep, now))
            .await
    }

    async fn reserve(&self, claim: &Claim, length: Duration) -> Result<Renewal, LockError> {
        let claim = claim.clone();
        self.request(Op::Reserve, move |server, now| server.reserve(&claim, length, now))
            .await
    }

    async fn acquire(&self, claim: &Claim, mut wait: Wait) -> Result<Attempt, LockError> {
        match self.try_acquire(claim).await? {
            Attempt::Busy(found) if self.gives_up_early => return Ok(found.into()),
            Attempt::Busy(found) => wait.busy(&found),
            granted => return Ok(granted),
        }
        loop {
            let attempt = self.ask(Op::Acquire, claim).await?;
            if matches!(attempt, Attempt::Granted(_)) || wait.is_over(self.clock.now()) {
                return Ok(attempt);
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    async fn holders(&self, _: &LockName) -> Result<Vec<Holder>, LockError> {
        self.request(Op::Holders, |_, _| Vec::new()).await
    }

    async fn list(&self, _: &str) -> Result<Vec<Holder>, LockError> {
        let holders = |server: &mut Server, _| server.held.values().map(|(claim, ..)| Holder::of(claim)).collect();
        self.request(Op::List, holders).await
    }

    async fn close(&self) -> Result<(), LockError> {
        self.request(Op::Close, |_, _| ()).await
    }

    fn clock(&self) -> Clock {
        self.clock.clone()
    }
}
