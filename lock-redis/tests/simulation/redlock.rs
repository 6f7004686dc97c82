//! The coordinator over nodes in memory, on paused time: requests that are lost, late or out of order, nodes that pause, restart and lose
//! their data, clocks that differ by seconds. Everything follows from a seed.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use fastrand::Rng;
use lock_core::{
    Attempt as Attempted, Busy, Claim, Clock, Executor, FencingToken, Grant, Holder, Lease, LockError, ManualClock,
    Mode, OwnerId, Stamp, Wait,
};
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};

use super::attempt::Attempt;
use super::node::{Answer, Born, Confirmed, Node};
use super::quorum::Quorum;
use crate::subscriptions::Subscriptions;

const CLIENTS: u64 = 4;
const OP_TIMEOUT: Duration = Duration::from_millis(400);
const MAX_TTL: Duration = Duration::from_secs(5);
/// The clocks of two nodes differ by less than twice that, which is less than the silence after a restart.
const CLOCKS: u64 = 2_000_000;
const LENGTH: Duration = Duration::from_secs(60);
const TICK: Duration = Duration::from_millis(1);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bug {
    /// The confirmation round changes nothing.
    ConfirmsNothing,
    /// A node grants as soon as it is back.
    NoSilence,
    /// A release ends what a later attempt was granted.
    ReleaseIgnoresAttempt,
    /// A node grants a shared claim beside an exclusive one.
    SharesWhatIsExclusive,
    /// A node grants an exclusive claim beside shared ones.
    ExcludesNoShared,
    /// What an attempt has left of a shared claim keeps its token.
    LeftoverKeepsToken,
    /// The confirmation round gives a token that the node has drawn for another claim.
    ConfirmsWhatIsDrawn,
}

impl Bug {
    /// Whether it is one of shared claims.
    fn shares(self) -> bool {
        !matches!(
            self,
            Self::ConfirmsNothing | Self::NoSilence | Self::ReleaseIgnoresAttempt
        )
    }
}

/// What a node stores.
struct Stored {
    /// One, or several that are shared.
    locks: Vec<Lock>,
    /// The exclusive claims that wait, and until when they keep shared ones out.
    announced: HashMap<OwnerId, Stamp>,
    counter: Option<u64>,
    silent_until: Stamp,
    down_until: Stamp,
    /// In microseconds.
    clock_ahead: u64,
}

struct Lock {
    owner: OwnerId,
    mode: Mode,
    client: u64,
    attempt: u64,
    token: u64,
    until: Stamp,
}

impl Stored {
    fn of(&mut self, owner: OwnerId) -> Option<&mut Lock> {
        self.locks.iter_mut().find(|lock| lock.owner == owner)
    }

    /// The owner that keeps a claim in that mode out, if it is known.
    fn blocks(&self, mode: Mode, now: Stamp, bug: Option<Bug>) -> Option<Option<OwnerId>> {
        let excludes = |lock: &&Lock| match (lock.mode, mode) {
            (Mode::Exclusive, Mode::Shared) => bug != Some(Bug::SharesWhatIsExclusive),
            (Mode::Shared, Mode::Exclusive) => bug != Some(Bug::ExcludesNoShared),
            (Mode::Shared, Mode::Shared) => false,
            _ => true,
        };
        let holds = self.locks.iter().find(excludes).map(|lock| Some(lock.owner));
        let waits = mode == Mode::Shared && self.announced.values().any(|until| *until > now);
        holds.or_else(|| waits.then_some(None))
    }

    fn draw(&mut self, proposal: u64, clock: u64) -> u64 {
        let usable = self.counter.is_some() && proposal <= clock && clock - proposal < 500_000;
        let token = (self.counter.unwrap_or(0) + 1).max(if usable { proposal } else { clock });
        self.counter = Some(token);
        token
    }
}

/// What clients believe.
#[derive(Default)]
struct Believed {
    holders: HashMap<OwnerId, (Mode, Lease)>,
    /// To which claim each token was given.
    tokens: HashMap<FencingToken, OwnerId>,
    /// The highest token, and the claim that it was given to.
    highest: Option<(FencingToken, OwnerId)>,
    grants: usize,
    wrong: Option<String>,
}

struct World {
    clock: Clock,
    began: Stamp,
    random: Mutex<Rng>,
    nodes: Vec<Mutex<Stored>>,
    believed: Mutex<Believed>,
    bug: Option<Bug>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl World {
    fn new(nodes: usize, seed: u64, bug: Option<Bug>) -> (Arc<Self>, ManualClock) {
        let (clock, hand) = Clock::manual();
        let mut random = Rng::with_seed(seed);
        let began = clock.now();
        let node = |clock_ahead| Stored {
            locks: Vec::new(),
            announced: HashMap::new(),
            counter: None,
            silent_until: began,
            down_until: began,
            clock_ahead,
        };
        let nodes = (0..nodes).map(|_| Mutex::new(node(random.u64(..2 * CLOCKS)))).collect();
        let world = Self {
            began,
            clock,
            random: Mutex::new(random),
            nodes,
            believed: Mutex::default(),
            bug,
        };
        (Arc::new(world), hand)
    }

    fn below(&self, limit: u64) -> u64 {
        lock(&self.random).u64(..limit)
    }

    fn micros(&self, stored: &Stored) -> u64 {
        let elapsed = self.clock.now().since(self.began).as_micros();
        1_000_000_000 + stored.clock_ahead + u64::try_from(elapsed).unwrap_or_default()
    }

    /// A minority fails, and again when it has been silent for long enough.
    async fn disturb(self: Arc<Self>) {
        loop {
            sleep(Duration::from_millis(self.below(1500))).await;
            let (count, first, fault) = (self.nodes.len(), self.below(64), self.below(3));
            for at in 0..(count.div_ceil(2) - 1) {
                let mut node = lock(&self.nodes[(usize::try_from(first).unwrap_or_default() + at) % count]);
                let back = self.clock.now() + Duration::from_millis(self.below(800));
                node.down_until = back;
                if fault > 0 && self.bug != Some(Bug::NoSilence) {
                    node.silent_until = back + MAX_TTL;
                }
                if fault == 2 {
                    (node.locks, node.announced, node.counter) = Default::default();
                }
            }
            if fault > 0 {
                sleep(MAX_TTL + Duration::from_millis(800)).await;
            }
        }
    }

    fn wrong(&self, what: String) {
        lock(&self.believed).wrong.get_or_insert(what);
    }

    fn granted(&self, grant: &Grant, before: Option<(FencingToken, OwnerId)>) {
        let now = self.clock.now();
        let (owner, mode) = (grant.claim.owner(), grant.claim.mode());
        let mut believed = lock(&self.believed);
        believed.grants += 1;
        believed.holders.insert(owner, (mode, grant.lease.clone()));
        let excluded = believed.holders.iter().any(|(other, (held, lease))| {
            *other != owner && (*held, mode) != (Mode::Shared, Mode::Shared) && lease.is_valid(now)
        });
        let given = (grant.token, owner);
        // A claim whose release has failed is granted again with the token that it has.
        let fell = before.is_some_and(|before| grant.token <= before.0 && given != before);
        if believed.highest.is_none_or(|highest| highest.0 < grant.token) {
            believed.highest = Some(given);
        }
        let other = believed
            .tokens
            .insert(grant.token, owner)
            .filter(|other| *other != owner);
        drop(believed);
        if excluded {
            self.wrong(format!("two holders at {:?}", now.since(self.began)));
        }
        if fell {
            self.wrong(format!("the token {} came after {before:?}", grant.token));
        }
        if let Some(other) = other {
            self.wrong(format!("the token {} was given to {owner} after {other}", grant.token));
        }
    }

    fn ended(&self, owner: OwnerId) {
        lock(&self.believed).holders.remove(&owner);
    }
}

/// A client's way to a node.
struct Way {
    world: Arc<World>,
    number: usize,
    client: u64,
}

impl Way {
    /// Carries out a request at the node, however late, also if the caller has gone.
    async fn call<T: Send + 'static>(
        &self,
        operation: &'static str,
        work: impl FnOnce(&World, &mut Stored, Stamp) -> T + Send + 'static,
    ) -> Result<T, LockError> {
        let (world, number) = (Arc::clone(&self.world), self.number);
        let longest = |chance: u64| match chance {
            0 => 1500,
            1..4 => 100,
            _ => 3,
        };
        let [there, back] = [(); 2].map(|()| Duration::from_millis(world.below(longest(world.below(40)))));
        let is_lost = world.below(40) == 0;
        let (tell, told) = oneshot::channel();
        tokio::spawn(async move {
            sleep(there).await;
            let now = world.clock.now();
            let answer = {
                let mut stored = lock(&world.nodes[number]);
                if is_lost || now < stored.down_until {
                    return;
                }
                stored.locks.retain(|lock| lock.until > now);
                work(&world, &mut stored, now)
            };
            sleep(back).await;
            drop(tell.send(answer));
        });
        let answer = timeout(OP_TIMEOUT, told).await.ok().and_then(Result::ok);
        answer.ok_or_else(|| LockError::no_answer(operation, OP_TIMEOUT))
    }
}

#[async_trait]
impl Node for Way {
    fn place(&self) -> String {
        self.number.to_string()
    }

    fn now(&self) -> Stamp {
        self.world.clock.now()
    }

    fn server_micros(&self) -> Option<u64> {
        Some(self.world.micros(&lock(&self.world.nodes[self.number])))
    }

    async fn acquire(&self, claim: &Claim, attempt: &Attempt) -> Result<Answer, LockError> {
        if !attempt.is_wanted(claim) {
            return Err(LockError::unavailable("acquire", "given up"));
        }
        let (sent, ttl, owner, mode) = (self.now(), claim.ttl(), claim.owner(), claim.mode());
        let (client, number, proposal) = (self.client, attempt.number, attempt.proposal);
        let (known, announced) = (attempt.known.map(FencingToken::get), attempt.announced);
        let asked = self.call("acquire", move |world, stored, now| {
            if now < stored.silent_until {
                return Ok(Err(stored.silent_until.since(now)));
            }
            let life = ttl.min((sent + ttl).since(now));
            if life * 2 < ttl {
                return Err(());
            }
            let (until, clock) = (now + life, world.micros(stored));
            if let Some(held) = stored.of(owner) {
                let (is_later, token) = (number > held.attempt, held.token);
                held.until = held.until.max(until);
                held.attempt = held.attempt.max(number);
                let keeps = Some(token) == known || world.bug == Some(Bug::LeftoverKeepsToken);
                if mode == Mode::Exclusive || !is_later || keeps {
                    return Ok(Ok(Ok((token, life))));
                }
                let token = stored.draw(proposal, clock);
                stored.of(owner).into_iter().for_each(|held| held.token = token);
                return Ok(Ok(Ok((token, life))));
            }
            if let Some(other) = stored.blocks(mode, now, world.bug) {
                if !announced.is_zero() && stored.locks.iter().any(|lock| lock.mode == Mode::Shared) {
                    stored.announced.insert(owner, now + announced.min(life));
                }
                return Ok(Ok(Err(other)));
            }
            let token = stored.draw(proposal, clock);
            stored.locks.push(Lock {
                owner,
                mode,
                client,
                attempt: number,
                token,
                until,
            });
            Ok(Ok(Ok((token, life))))
        });
        Ok(
            match asked.await?.map_err(|()| LockError::unavailable("acquire", "late"))? {
                Err(left) => Answer::Young(left),
                Ok(Err(other)) => {
                    let mut holder = Holder::new();
                    holder.owner = other;
                    Answer::Busy(Busy::default().with_holder(holder))
                }
                Ok(Ok((token, life))) => {
                    let token = FencingToken::new(token).map_err(|_| LockError::unavailable("acquire", "no token"))?;
                    Answer::Granted(token, Lease::for_claim(claim, sent - ttl.saturating_sub(life)))
                }
            },
        )
    }

    async fn confirm(
        &self,
        claim: &Claim,
        presented: FencingToken,
        token: FencingToken,
        is_agreed: bool,
    ) -> Result<Confirmed, LockError> {
        let (owner, presented, token) = (claim.owner(), presented.get(), token.get());
        self.call("acquire", move |world, stored, _| {
            let counter = stored.counter;
            let granted = |lock: &&mut Lock| [presented, token].contains(&lock.token);
            let Some(lock) = stored.of(owner).filter(granted) else {
                return Confirmed::Lost;
            };
            let is_drawn = lock.token != token && counter >= Some(token);
            if is_drawn && !is_agreed && world.bug != Some(Bug::ConfirmsWhatIsDrawn) {
                return Confirmed::Passed(counter.unwrap_or_default());
            }
            if world.bug != Some(Bug::ConfirmsNothing) {
                lock.token = token;
                stored.counter = counter.max(Some(token));
            }
            Confirmed::Yes
        })
        .await
    }

    async fn renew(&self, claim: &Claim) -> Result<bool, LockError> {
        let (owner, ttl, sent) = (claim.owner(), claim.ttl(), self.now());
        self.call("renew", move |_, stored, now| {
            let held = stored.of(owner).filter(|_| now < sent + ttl / 2);
            held.map(|lock| lock.until = now + ttl).is_some()
        })
        .await
    }

    async fn release(&self, claim: &Claim, last: u64, goes_on: bool) -> Result<Option<bool>, LockError> {
        let (owner, client) = (claim.owner(), self.client);
        self.call("release", move |world, stored, _| {
            let compares = world.bug != Some(Bug::ReleaseIgnoresAttempt);
            let before = stored.locks.len();
            stored.locks.retain(|lock| {
                let is_later = compares && lock.client == client && lock.attempt > last;
                lock.owner != owner || is_later
            });
            if !goes_on {
                stored.announced.remove(&owner);
            }
            Some(stored.locks.len() < before)
        })
        .await
    }

    async fn born(&self, _: &str) -> Result<Option<Born>, LockError> {
        Ok(None)
    }
}

/// A client that takes the lock again and again, alone or with others if it `shares`.
async fn client(world: Arc<World>, number: u64, shares: bool) {
    let way = |node| {
        Arc::new(Way {
            world: Arc::clone(&world),
            number: node,
            client: number,
        })
    };
    let nodes = (0..world.nodes.len()).map(way).collect();
    let executor = Executor::new(Some(Handle::current()));
    let quorum = Quorum::new(nodes, executor, OP_TIMEOUT, MAX_TTL, Subscriptions::default());
    let Ok(name) = "n".parse::<lock_core::LockName>() else {
        return;
    };
    loop {
        let mode = if shares && world.below(3) > 0 {
            Mode::Shared
        } else {
            Mode::Exclusive
        };
        let claim = Claim::new(name.clone(), Duration::from_millis(300 + world.below(1200))).with_mode(mode);
        // A claim that has failed, was busy or was released can be asked for again.
        for _ in 0..=world.below(3) {
            let before = lock(&world.believed).highest;
            let wait = Wait::until(Some(quorum.now() + Duration::from_millis(world.below(2000))));
            if let Ok(Attempted::Granted(grant)) = quorum.acquire(&claim, wait).await {
                world.granted(&grant, before);
                for _ in 0..world.below(4) {
                    sleep(claim.ttl() / 3).await;
                    let sent = quorum.now();
                    if let Ok(true) = quorum.renew(&claim).await {
                        grant.lease.refreshed(sent, quorum.now());
                    }
                }
                sleep(Duration::from_millis(world.below(20))).await;
                if world.below(8) == 0 {
                    // The holder ends without a release.
                    break;
                }
            }
            world.ended(claim.owner());
            let _ = quorum.release(&claim).await;
        }
    }
}

/// What was wrong with a run, and how many grants there were.
fn run(nodes: usize, seed: u64, shares: bool, bug: Option<Bug>) -> (Option<String>, usize) {
    // The coordinator's jitter.
    fastrand::seed(seed);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build();
    let Ok(runtime) = runtime else {
        return (Some("there is no runtime".to_owned()), 0);
    };
    runtime.block_on(async {
        let (world, hand) = World::new(nodes, seed, bug);
        tokio::spawn(Arc::clone(&world).disturb());
        for number in 0..CLIENTS {
            tokio::spawn(client(Arc::clone(&world), number, shares));
        }
        while world.clock.now().since(world.began) < LENGTH && lock(&world.believed).wrong.is_none() {
            sleep(TICK).await;
            hand.advance(TICK);
        }
        let mut believed = lock(&world.believed);
        (believed.wrong.take(), believed.grants)
    })
}

#[test]
fn holders_exclude_each_other_unless_all_share_and_tokens_rise() {
    for shares in [false, true] {
        let mut grants = 0;
        for seed in 0..10 {
            for nodes in [3, 5] {
                let (wrong, granted) = run(nodes, seed, shares, None);
                assert_eq!(wrong, None, "seed {seed}, {nodes} nodes, shares: {shares}");
                grants += granted;
            }
        }
        println!("{grants} grants, shares: {shares}");
        assert!(grants > 500, "{grants}");
    }
}

#[test]
fn each_planted_bug_is_found() {
    for (bug, what) in [
        (Bug::ConfirmsNothing, "came after"),
        (Bug::NoSilence, "two holders"),
        (Bug::ReleaseIgnoresAttempt, "two holders"),
        (Bug::SharesWhatIsExclusive, "two holders"),
        (Bug::ExcludesNoShared, "two holders"),
        (Bug::LeftoverKeepsToken, "came after"),
        (Bug::ConfirmsWhatIsDrawn, "was given to"),
    ] {
        let found = (0..40).find_map(|seed| {
            let (wrong, _) = run(3, seed, bug.shares(), Some(bug));
            wrong.filter(|wrong| wrong.contains(what)).map(|wrong| (seed, wrong))
        });
        println!("{bug:?}: {found:?}");
        assert!(found.is_some(), "{bug:?} was not found");
    }
}
