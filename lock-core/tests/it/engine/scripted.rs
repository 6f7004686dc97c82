//! A server that does what the test tells it to: fail, hang, answer late, lose its reply, or work on a request long
//! after its sender went away.

use std::collections::{HashMap, VecDeque};
use std::future::pending;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::FutureExt;
use lock_core::{
    Attempt, Capabilities, Claim, Clock, DistributedLock, FencingToken, Grant, Holder, Lease, LockError, LockGuard,
    LockName, LockRequest, Locks, ManualClock, MemoryLock, OwnerId, Released, Renewal, Scope, Stamp, Wait,
};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

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
    /// Refused after a while.
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

/// What kind of server it is. By default each lock has a lease and one token.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Kind {
    /// It has no queue.
    pub(crate) unfair: bool,
    /// All locks of a client share one lease.
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
}

/// The backend of a client of the server.
#[derive(Clone, Debug)]
pub(crate) struct Scripted {
    kind: Kind,
    clock: Clock,
    memory: Arc<MemoryLock>,
    script: Arc<Mutex<Script>>,
}

#[derive(Debug, Default)]
pub(crate) struct Script {
    fates: HashMap<Op, VecDeque<Fate>>,
    log: Vec<(Op, Stamp)>,
    /// The owners for whom names were asked for, in order.
    pub(crate) asked: Vec<OwnerId>,
    /// How often the client asked for a name that an earlier claim of its own held.
    pub(crate) crossed: usize,
    token: u64,
    /// The first and last token of each grant, by its token in memory.
    tokens: HashMap<FencingToken, [FencingToken; 2]>,
}

/// The scripted server, a client of it, and the hand of its clock. Time is tokio's paused time; the clock follows it to
/// the millisecond, and can be advanced beyond it, which is what a suspended machine looks like.
pub(crate) struct World {
    pub(crate) server: Scripted,
    pub(crate) locks: Locks,
    pub(crate) hand: ManualClock,
}

/// A request in a task of its own.
pub(crate) type Asked = JoinHandle<Result<LockGuard, LockError>>;

pub(crate) fn ask(request: LockRequest) -> Asked {
    tokio::spawn(request.into_future())
}

/// The same request, with a limit for its wait if there is one.
pub(crate) fn limited(request: LockRequest, limit: Option<Duration>) -> LockRequest {
    match limit {
        Some(limit) => request.wait_for(limit),
        None => request,
    }
}

pub(crate) async fn granted(asked: Asked) -> LockGuard {
    let granted = timeout(100 * TTL, asked).await.expect("it is granted");
    granted.unwrap().unwrap()
}

impl World {
    pub(crate) fn new() -> Self {
        Self::with(|_| {})
    }

    pub(crate) fn with(change: impl FnOnce(&mut Kind)) -> Self {
        let mut kind = Kind::default();
        change(&mut kind);
        let (clock, hand) = paused::clock();
        let memory = MemoryLock::with_clock(clock.clone());
        let server = Scripted {
            kind,
            clock,
            memory: Arc::new(if kind.shares { memory.sharing_leases() } else { memory }),
            script: Arc::default(),
        };
        let options = paused::options().ttl(TTL).linger(kind.linger);
        let locks = Locks::with_options(server.clone(), options);
        Self { server, locks, hand }
    }

    pub(crate) fn lock(&self, name: &str) -> LockRequest {
        self.locks.lock(name)
    }

    pub(crate) async fn held(&self, name: &str) -> LockGuard {
        self.lock(name).await.unwrap()
    }

    pub(crate) async fn held_by_number(&self, count: usize) -> Vec<LockGuard> {
        let mut guards = Vec::with_capacity(count);
        for n in 0..count {
            guards.push(self.held(&n.to_string()).await);
        }
        guards
    }

    /// Lets time pass.
    pub(crate) async fn pass(&self, time: Duration) {
        let until = self.now() + time;
        while self.now() < until {
            sleep(Duration::from_millis(1)).await;
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
    pub(crate) fn script(&self) -> MutexGuard<'_, Script> {
        self.script.lock().unwrap()
    }

    /// The next requests of that kind end so, one after the other.
    pub(crate) fn next(&self, op: Op, fates: impl IntoIterator<Item = Fate>) {
        self.script().fates.entry(op).or_default().extend(fates);
    }

    /// No more surprises.
    pub(crate) fn heal(&self) {
        self.script().fates.clear();
    }

    pub(crate) fn count(&self, op: Op) -> usize {
        self.times(op).len()
    }

    pub(crate) fn times(&self, op: Op) -> Vec<Stamp> {
        let script = self.script();
        let times = script.log.iter().filter(|(other, _)| *other == op);
        times.map(|(_, at)| *at).collect()
    }

    /// Whether the server keeps that name now.
    pub(crate) fn keeps(&self, name: &str) -> bool {
        !at_once(self.memory.holders(&name.parse().unwrap())).is_empty()
    }

    /// A client of another process takes the name for `ttl`.
    pub(crate) fn occupy(&self, name: &str, ttl: Duration) {
        let claim = Claim::new(name.parse().unwrap(), ttl).with_label(ELSEWHERE);
        let attempt = at_once(self.memory.client().try_acquire(&claim));
        assert!(attempt.granted().is_some(), "{name} is held");
    }

    /// Ends the lock at the server, which tells its holder only when that asks.
    pub(crate) fn take_away(&self, name: &str) {
        at_once(self.memory.force_release(&name.parse().unwrap()));
    }

    /// Ends all locks and leases of the client in the same way.
    pub(crate) fn end_leases(&self) {
        at_once(self.memory.close());
    }

    /// What the server answers to a claim. Its grants are made here, so that what memory tells a holder does not reach it.
    async fn attempt(&self, claim: &Claim) -> Result<Attempt, LockError> {
        let asked = match self.kind.shares {
            // One that wants a lease of its own gets none either.
            true => Claim::new(claim.name().clone(), claim.ttl()).with_owner(claim.owner()),
            false => claim.clone(),
        };
        let found = match self.memory.try_acquire(&asked).await? {
            Attempt::Granted(found) => found,
            busy => {
                if let Attempt::Busy(busy) = &busy {
                    let is_own = |holder: &Holder| !holder.is_reserved && holder.label.as_deref() != Some(ELSEWHERE);
                    self.script().crossed += usize::from(busy.holder.as_ref().is_some_and(is_own));
                }
                return Ok(busy);
            }
        };
        let blocks = self.kind.blocks || !self.kind.linger.is_zero();
        let count = if blocks { claim.tokens_wanted().get().into() } else { 1 };
        let Script { token, tokens, .. } = &mut *self.script();
        let [first, last] = *tokens.entry(found.token).or_insert_with(|| {
            *token += count;
            [*token + 1 - count, *token].map(|token| FencingToken::new(token).unwrap())
        });
        let granted = match self.kind.grants_another_claim {
            true => Claim::new(claim.name().clone(), claim.ttl()),
            false => claim.clone(),
        };
        let grant = Grant::new(granted, last, found.lease);
        Ok(Attempt::Granted(grant.with_first_token(first)))
    }

    async fn ask(&self, op: Op, claim: &Claim) -> Result<Attempt, LockError> {
        let (server, claim) = (self.clone(), claim.clone());
        self.request(op, async move { server.attempt(&claim).await }).await
    }

    /// A request with the fate that is its turn. Without one, the server does its `work` and answers at once.
    async fn request<T: Send + 'static>(
        &self,
        op: Op,
        work: impl Future<Output = Result<T, LockError>> + Send + 'static,
    ) -> Result<T, LockError> {
        let fate = {
            let mut script = self.script();
            script.log.push((op, self.clock.now()));
            script.fates.get_mut(&op).and_then(VecDeque::pop_front)
        };
        match fate {
            None => work.await,
            Some(Fate::Fail) => Err(LockError::failed("the script", "refused")),
            Some(Fate::Refuse) => Err(LockError::failed("the script", "connection refused").unsent()),
            Some(Fate::Deny) => Err(LockError::configuration("the password is wrong").unsent()),
            Some(Fate::FailAfter(time)) => {
                sleep(time).await;
                Err(LockError::failed("the script", "refused"))
            }
            Some(Fate::Hang) => pending().await,
            Some(Fate::LoseReply) => {
                drop(work.await);
                pending().await
            }
            Some(Fate::AnswerAfter(time)) => {
                let answer = work.await;
                sleep(time).await;
                answer
            }
            Some(Fate::DeliverAfter(time)) => {
                let late = async move {
                    sleep(time).await;
                    work.await
                };
                tokio::spawn(late).await.unwrap()
            }
            Some(Fate::Panic) => panic!("told to panic"),
        }
    }
}

/// Memory answers at the first poll.
fn at_once<T>(answer: impl Future<Output = Result<T, LockError>>) -> T {
    answer.now_or_never().unwrap().unwrap()
}

#[async_trait]
impl DistributedLock for Scripted {
    fn capabilities(&self) -> Capabilities {
        let mut capabilities = Capabilities::new(Scope::Server).with_op_timeout(OP_TIMEOUT);
        capabilities.reservations = self.kind.reserves;
        if self.kind.unfair {
            return capabilities;
        }
        capabilities.with_fairness()
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, LockError> {
        self.script().asked.push(claim.owner());
        self.ask(Op::Try, claim).await
    }

    async fn renew(&self, lease: &Lease) -> Result<Renewal, LockError> {
        let (memory, lease) = (Arc::clone(&self.memory), lease.clone());
        self.request(Op::Renew, async move { memory.renew(&lease).await }).await
    }

    async fn release(&self, claim: &Claim, keep: Option<Duration>) -> Result<Released, LockError> {
        if claim.name().as_str().starts_with(HANGING) {
            return pending().await;
        }
        let (memory, claim) = (Arc::clone(&self.memory), claim.clone());
        self.request(Op::Release, async move { memory.release(&claim, keep).await })
            .await
    }

    async fn reserve(&self, claim: &Claim, length: Duration) -> Result<Renewal, LockError> {
        let (memory, claim) = (Arc::clone(&self.memory), claim.clone());
        self.request(Op::Reserve, async move { memory.reserve(&claim, length).await })
            .await
    }

    async fn acquire(&self, claim: &Claim, mut wait: Wait) -> Result<Attempt, LockError> {
        match self.try_acquire(claim).await? {
            Attempt::Busy(found) if self.kind.gives_up_early => return Ok(found.into()),
            Attempt::Busy(found) => wait.busy(&found),
            granted => return Ok(granted),
        }
        loop {
            let attempt = self.ask(Op::Acquire, claim).await?;
            if matches!(attempt, Attempt::Granted(_)) || wait.is_over(self.clock.now()) {
                return Ok(attempt);
            }
            sleep(Duration::from_millis(10)).await;
        }
    }

    async fn holders(&self, name: &LockName) -> Result<Vec<Holder>, LockError> {
        let (memory, name) = (Arc::clone(&self.memory), name.clone());
        self.request(Op::Holders, async move { memory.holders(&name).await })
            .await
    }

    async fn list(&self, prefix: &str) -> Result<Vec<Holder>, LockError> {
        let (memory, prefix) = (Arc::clone(&self.memory), prefix.to_owned());
        self.request(Op::List, async move { memory.list(&prefix).await }).await
    }

    async fn close(&self) -> Result<(), LockError> {
        let memory = Arc::clone(&self.memory);
        self.request(Op::Close, async move { memory.close().await }).await
    }

    fn clock(&self) -> Clock {
        self.clock.clone()
    }
}
