//! A server that does what the test tells it to: fail, hang, answer late, lose its reply, or work on a request long
//! after its sender went away.

use std::collections::{HashMap, VecDeque};
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use lock_core::{
    Attempt, Busy, Capabilities, Claim, Clock, DistributedLock, FencingToken, Grant, Holder, Lease, LeaseId, LockError,
    LockName, Locks, ManualClock, OwnerId, Released, Renewal, Scope, Stamp, Wait,
};

use crate::paused;

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
struct Server {
    held: HashMap<String, (Claim, FencingToken, Stamp)>,
    reserved: HashMap<String, (OwnerId, Stamp)>,
    token: u64,
    fates: HashMap<Op, VecDeque<Fate>>,
    log: Vec<(Op, Stamp)>,
    asked: Vec<OwnerId>,
    /// How many requests the client counted as waiting when each of them began.
    waiting: Vec<u64>,
    shared: Option<Lease>,
    shared_until: Option<Stamp>,
    crossed: usize,
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
        let until = self.server.clock.now() + time;
        while self.server.clock.now() < until {
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
            .into_iter()
            .map(|op| self.server.count(op))
            .sum()
    }

    pub(crate) fn now(&self) -> Stamp {
        self.server.clock.now()
    }
}

impl Scripted {
    /// How many tokens a claim is granted.
    fn wanted(&self, claim: &Claim) -> NonZeroU32 {
        if self.blocks || !self.linger.is_zero() {
            claim.tokens_wanted()
        } else {
            NonZeroU32::MIN
        }
    }

    /// The next requests of that kind end so, one after the other.
    pub(crate) fn next(&self, op: Op, fates: impl IntoIterator<Item = Fate>) {
        self.server.lock().unwrap().fates.entry(op).or_default().extend(fates);
    }

    /// No more surprises.
    pub(crate) fn heal(&self) {
        self.server.lock().unwrap().fates.clear();
    }

    pub(crate) fn count(&self, op: Op) -> usize {
        self.times(op).len()
    }

    pub(crate) fn times(&self, op: Op) -> Vec<Stamp> {
        self.server
            .lock()
            .unwrap()
            .log
            .iter()
            .filter(|(o, _)| *o == op)
            .map(|(_, at)| *at)
            .collect()
    }

    /// The owners for whom names were asked for, in order.
    pub(crate) fn asked(&self) -> Vec<OwnerId> {
        self.server.lock().unwrap().asked.clone()
    }

    /// Whether the server keeps that name now.
    pub(crate) fn keeps(&self, name: &str) -> bool {
        let now = self.clock.now();
        self.server.lock().unwrap().keeps(name, now)
    }

    /// Somebody of another process takes the name for `ttl`.
    pub(crate) fn occupy(&self, name: &str, ttl: Duration) -> Claim {
        let claim = Claim::new(name.parse().unwrap(), ttl).with_label(ELSEWHERE);
        let attempt = self
            .server
            .lock()
            .unwrap()
            .try_acquire(&claim, self.clock.now(), None, NonZeroU32::MIN);
        assert!(matches!(attempt, Attempt::Granted(_)));
        claim
    }

    /// How often the client asked for a name that an earlier claim of its own held.
    pub(crate) fn crossed(&self) -> usize {
        self.server.lock().unwrap().crossed
    }

    /// How many requests the client counted as waiting when each request to acquire began.
    pub(crate) fn waiting(&self) -> Vec<u64> {
        self.server.lock().unwrap().waiting.clone()
    }

    pub(crate) fn take_away(&self, name: &str) {
        self.server.lock().unwrap().held.remove(name);
    }

    /// Ends the lease that all locks share.
    pub(crate) fn end_shared_lease(&self) {
        self.server.lock().unwrap().shared_until = None;
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
    fn keeps(&self, name: &str, now: Stamp) -> bool {
        self.held.get(name).is_some_and(|(_, _, until)| *until > now) || self.is_reserved(name, now)
    }

    fn is_reserved(&self, name: &str, now: Stamp) -> bool {
        self.reserved.get(name).is_some_and(|(_, until)| *until > now)
    }

    fn is_held_by(&self, claim: &Claim, now: Stamp) -> bool {
        let held = self.held.get(claim.name().as_str());
        held.is_some_and(|(holder, _, until)| holder.owner() == claim.owner() && *until > now)
    }

    fn try_acquire(&mut self, claim: &Claim, now: Stamp, shared: Option<Lease>, wanted: NonZeroU32) -> Attempt {
        let name = claim.name().as_str();
        if let Some((holder, token, until)) = self.held.get_mut(name)
            && *until > now
        {
            if holder.owner() == claim.owner() {
                *until = now + claim.ttl();
                return Attempt::Granted(Grant::new(claim.clone(), *token, Lease::for_claim(claim, now)));
            }
            if holder.label() != Some(ELSEWHERE) {
                self.crossed += 1;
            }
            return Busy::default()
                .with_retry_after(until.since(now))
                .with_holder(Holder::of(holder))
                .into();
        }
        if self.is_reserved(name, now) {
            return Attempt::busy();
        }
        let first = FencingToken::new(self.token + 1).unwrap();
        self.token += u64::from(wanted.get());
        let token = FencingToken::new(self.token).unwrap();
        self.held
            .insert(name.to_owned(), (claim.clone(), token, now + claim.ttl()));
        let lease = shared.unwrap_or_else(|| Lease::for_claim(claim, now));
        Attempt::Granted(Grant::new(claim.clone(), token, lease).with_first_token(first))
    }

    fn reserve(&mut self, claim: &Claim, length: Duration, now: Stamp) -> Renewal {
        if !self.is_held_by(claim, now) {
            return Renewal::NotHeld;
        }
        self.reserved
            .insert(claim.name().to_string(), (claim.owner(), now + length));
        Renewal::Renewed
    }

    fn release(&mut self, claim: &Claim, keep: Option<Duration>, now: Stamp) -> Released {
        let name = claim.name().as_str();
        if keep.is_none()
            && self
                .reserved
                .get(name)
                .is_some_and(|(owner, _)| *owner == claim.owner())
        {
            self.reserved.remove(name);
        }
        if !self.is_held_by(claim, now) {
            return Released::NotHeld;
        }
        if let Some(rest) = keep {
            self.reserve(claim, rest, now);
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
        let (claim, sent, shares) = (claim.clone(), self.clock.now(), self.shares);
        let wanted = self.wanted(&claim);
        {
            let waiting = self.client.get().map(|client| client.stats().waiting);
            let mut server = self.server.lock().unwrap();
            server.asked.push(claim.owner());
            server.waiting.extend(waiting);
        }
        let granted = match self.grants_another_claim {
            true => Claim::new(claim.name().clone(), claim.ttl()),
            false => claim.clone(),
        };
        self.request(Op::Try, move |server, now| {
            let shared = shares.then(|| {
                server.shared_until.get_or_insert(now + claim.ttl());
                server
                    .shared
                    .get_or_insert_with(|| Lease::shared("s", claim.ttl(), sent))
                    .clone()
            });
            match (server.try_acquire(&claim, now, shared, wanted), shares) {
                // The lease counts from the send, as a backend must see to.
                (Attempt::Granted(g), false) => {
                    let grant = Grant::new(granted, g.token, Lease::for_claim(&claim, sent));
                    Attempt::Granted(grant.with_first_token(g.first_token()))
                }
                (attempt, _) => attempt,
            }
        })
        .await
    }

    async fn renew(&self, lease: &Lease) -> Result<Renewal, LockError> {
        let lease = lease.clone();
        self.request(Op::Renew, move |server, now| match lease.id() {
            LeaseId::Claim(claim) => match server.held.get_mut(claim.name().as_str()) {
                Some((holder, _, until)) if holder.owner() == claim.owner() && *until > now => {
                    *until = now + claim.ttl();
                    Renewal::Renewed
                }
                _ => Renewal::NotHeld,
            },
            _ => match &mut server.shared_until {
                Some(until) if *until > now => {
                    *until = now + lease.ttl();
                    Renewal::Renewed
                }
                _ => Renewal::NotHeld,
            },
        })
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
            let (asked, wanted) = (claim.clone(), self.wanted(claim));
            let attempt = self
                .request(Op::Acquire, move |s, now| s.try_acquire(&asked, now, None, wanted))
                .await?;
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
