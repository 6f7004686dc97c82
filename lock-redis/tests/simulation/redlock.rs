//! The coordinator over nodes in memory, on paused time: requests that are lost, late or out of order, nodes that pause, restart and lose
//! their data, clocks that differ by seconds. Everything follows from a seed.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use fastrand::Rng;
use lock_core::{
    Attempt as Attempted, Busy, Claim, Clock, Executor, FencingToken, Grant, Holder, Lease, LockError, ManualClock,
    OwnerId, Stamp, Wait,
};
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};

use super::attempt::Attempt;
use super::node::{Answer, Born, Node};
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
}

/// What a node stores.
struct Stored {
    lock: Option<Lock>,
    counter: Option<u64>,
    silent_until: Stamp,
    down_until: Stamp,
    /// In microseconds.
    clock_ahead: u64,
}

struct Lock {
    owner: OwnerId,
    client: u64,
    attempt: u64,
    token: u64,
    until: Stamp,
}

/// What clients believe.
#[derive(Default)]
struct Believed {
    holder: Option<(OwnerId, Lease)>,
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
            lock: None,
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
                    (node.lock, node.counter) = (None, None);
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
        let mut believed = lock(&self.believed);
        believed.grants += 1;
        let other = believed.holder.replace((grant.claim.owner(), grant.lease.clone()));
        let given = (grant.token, grant.claim.owner());
        // A claim whose release has failed is granted again with the token that it has.
        let fell = before.is_some_and(|before| grant.token <= before.0 && given != before);
        if believed.highest.is_none_or(|highest| highest.0 < grant.token) {
            believed.highest = Some(given);
        }
        drop(believed);
        if other.is_some_and(|(owner, lease)| owner != grant.claim.owner() && lease.is_valid(now)) {
            self.wrong(format!("two holders at {:?}", now.since(self.began)));
        }
        if fell {
            self.wrong(format!("the token {} came after {before:?}", grant.token));
        }
    }

    fn ended(&self, owner: OwnerId) {
        let holder = &mut lock(&self.believed).holder;
        if holder.as_ref().is_some_and(|(holder, _)| *holder == owner) {
            *holder = None;
        }
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
                stored.lock.take_if(|lock| lock.until <= now);
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
        let (sent, ttl, owner, client) = (self.now(), claim.ttl(), claim.owner(), self.client);
        let (number, proposal) = (attempt.number, attempt.proposal);
        let asked = self.call("acquire", move |world, stored, now| {
            if now < stored.silent_until {
                return Ok(Err(stored.silent_until.since(now)));
            }
            let life = ttl.min((sent + ttl).since(now));
            if life * 2 < ttl {
                return Err(());
            }
            let until = now + life;
            if let Some(lock) = &mut stored.lock {
                if lock.owner != owner {
                    return Ok(Ok(Err(lock.owner)));
                }
                lock.until = lock.until.max(until);
                lock.attempt = lock.attempt.max(number);
                return Ok(Ok(Ok((lock.token, life))));
            }
            let clock = world.micros(stored);
            let usable = stored.counter.is_some() && proposal <= clock && clock - proposal < 500_000;
            let token = (stored.counter.unwrap_or(0) + 1).max(if usable { proposal } else { clock });
            stored.counter = Some(token);
            stored.lock = Some(Lock {
                owner,
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
                    holder.owner = Some(other);
                    Answer::Busy(Busy::default().with_holder(holder))
                }
                Ok(Ok((token, life))) => {
                    let token = FencingToken::new(token).map_err(|_| LockError::unavailable("acquire", "no token"))?;
                    Answer::Granted(token, Lease::for_claim(claim, sent - ttl.saturating_sub(life)))
                }
            },
        )
    }

    async fn confirm(&self, claim: &Claim, presented: FencingToken, token: FencingToken) -> Result<bool, LockError> {
        let (owner, presented, token) = (claim.owner(), presented.get(), token.get());
        self.call("acquire", move |world, stored, _| {
            let granted = |lock: &&mut Lock| lock.owner == owner && [presented, token].contains(&lock.token);
            let Some(lock) = stored.lock.as_mut().filter(granted) else {
                return false;
            };
            if world.bug != Some(Bug::ConfirmsNothing) {
                lock.token = token;
                stored.counter = stored.counter.max(Some(token));
            }
            true
        })
        .await
    }

    async fn renew(&self, claim: &Claim) -> Result<bool, LockError> {
        let (owner, ttl, sent) = (claim.owner(), claim.ttl(), self.now());
        self.call("renew", move |_, stored, now| {
            let held = stored
                .lock
                .as_mut()
                .filter(|lock| lock.owner == owner && now < sent + ttl / 2);
            held.map(|lock| lock.until = now + ttl).is_some()
        })
        .await
    }

    async fn release(&self, claim: &Claim, last: u64) -> Result<Option<bool>, LockError> {
        let (owner, client) = (claim.owner(), self.client);
        self.call("release", move |world, stored, _| {
            let compares = world.bug != Some(Bug::ReleaseIgnoresAttempt);
            let ends = |lock: &mut Lock| {
                let is_later = compares && lock.client == client && lock.attempt > last;
                lock.owner == owner && !is_later
            };
            Some(stored.lock.take_if(ends).is_some())
        })
        .await
    }

    async fn born(&self, _: &str) -> Result<Option<Born>, LockError> {
        Ok(None)
    }
}

/// A client that takes the lock again and again.
async fn client(world: Arc<World>, number: u64) {
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
        let claim = Claim::new(name.clone(), Duration::from_millis(300 + world.below(1200)));
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
fn run(nodes: usize, seed: u64, bug: Option<Bug>) -> (Option<String>, usize) {
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
            tokio::spawn(client(Arc::clone(&world), number));
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
fn there_is_one_holder_at_a_time_and_tokens_rise() {
    let mut grants = 0;
    for seed in 0..10 {
        for nodes in [3, 5] {
            let (wrong, granted) = run(nodes, seed, None);
            assert_eq!(wrong, None, "seed {seed}, {nodes} nodes");
            grants += granted;
        }
    }
    println!("{grants} grants");
    assert!(grants > 500, "{grants}");
}

#[test]
fn each_planted_bug_is_found() {
    for (bug, what) in [
        (Bug::ConfirmsNothing, "came after"),
        (Bug::NoSilence, "two holders"),
        (Bug::ReleaseIgnoresAttempt, "two holders"),
    ] {
        let found = (0..40).find_map(|seed| {
            let (wrong, _) = run(3, seed, Some(bug));
            wrong.filter(|wrong| wrong.contains(what)).map(|wrong| (seed, wrong))
        });
        println!("{bug:?}: {found:?}");
        assert!(found.is_some(), "{bug:?} was not found");
    }
}
