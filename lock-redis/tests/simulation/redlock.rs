//! The coordinator over [nodes in memory](node), on paused time: requests that are lost, late or out of order, nodes that pause, restart and lose
//! their data, clocks that differ by seconds. Everything follows from a seed.

mod node;

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

use self::node::{Acquire, Answer as Said, Bug, Stored};
use super::attempt::Attempt;
use super::node::{Answer, Born, Confirmed, Node};
use super::quorum::Quorum;
use crate::subscriptions::Subscriptions;

const CLIENTS: u64 = 4;
const OP_TIMEOUT: Duration = Duration::from_millis(400);
const MAX_TTL: Duration = Duration::from_micros(node::MAX_TTL);
/// The clocks of two nodes differ by less than twice that, which is less than the silence after a restart.
const CLOCKS: u64 = 2_000_000;
const LENGTH: Duration = Duration::from_secs(60);
const TICK: Duration = Duration::from_millis(1);

/// A node as the world sees it.
struct Server {
    stored: Mutex<Stored>,
    down_until: Mutex<Stamp>,
    /// In microseconds.
    clock_ahead: u64,
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
    nodes: Vec<Server>,
    believed: Mutex<Believed>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl World {
    fn new(nodes: usize, seed: u64, bug: Option<Bug>) -> (Arc<Self>, ManualClock) {
        let (clock, hand) = Clock::manual();
        let mut random = Rng::with_seed(seed);
        let began = clock.now();
        let node = |clock_ahead| Server {
            stored: Mutex::new(Stored::new(clock_ahead, true, bug)),
            down_until: Mutex::new(began),
            clock_ahead,
        };
        let nodes = (0..nodes)
            .map(|_| node(1_000_000_000 + random.u64(..2 * CLOCKS)))
            .collect();
        let world = Self {
            began,
            clock,
            random: Mutex::new(random),
            nodes,
            believed: Mutex::default(),
        };
        (Arc::new(world), hand)
    }

    fn below(&self, limit: u64) -> u64 {
        lock(&self.random).u64(..limit)
    }

    /// The clock of the node at that time, in microseconds.
    fn micros(&self, node: usize, at: Stamp) -> u64 {
        let elapsed = at.since(self.began).as_micros();
        self.nodes[node].clock_ahead + u64::try_from(elapsed).unwrap_or_default()
    }

    /// A minority fails, and again when it has been silent for long enough.
    async fn disturb(self: Arc<Self>) {
        loop {
            sleep(Duration::from_millis(self.below(1500))).await;
            let (count, first, fault) = (self.nodes.len(), self.below(64), self.below(3));
            for at in 0..(count.div_ceil(2) - 1) {
                let at = (usize::try_from(first).unwrap_or_default() + at) % count;
                let back = self.clock.now() + Duration::from_millis(self.below(800));
                *lock(&self.nodes[at].down_until) = back;
                if fault > 0 {
                    lock(&self.nodes[at].stored).restart(self.micros(at, back), fault == 2);
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
    /// Carries out a request at the node, however late, also if the caller has gone. `work` gets the node's clock in us.
    async fn call(
        &self,
        operation: &'static str,
        work: impl FnOnce(&mut Stored, u64) -> Said + Send + 'static,
    ) -> Result<Said, LockError> {
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
            let (now, node) = (world.clock.now(), &world.nodes[number]);
            if is_lost || now < *lock(&node.down_until) {
                return;
            }
            let answer = work(&mut lock(&node.stored), world.micros(number, now));
            sleep(back).await;
            let _ = tell.send(answer);
        });
        let answer = timeout(OP_TIMEOUT, told).await.ok().and_then(Result::ok);
        answer.ok_or_else(|| LockError::no_answer(operation, OP_TIMEOUT))
    }

    /// The clock of the node now and that much later, in ms.
    fn stop(&self, later: u64) -> u64 {
        self.world.micros(self.number, self.now()) / 1000 + later
    }
}

/// That time in ms, of which it is a number.
fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
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
        Some(self.world.micros(self.number, self.now()))
    }

    async fn acquire(&self, claim: &Claim, attempt: &Attempt) -> Result<Answer, LockError> {
        if !attempt.is_wanted(claim) {
            return Err(LockError::unavailable("acquire", "given up"));
        }
        let (sent, ttl) = (self.now(), millis(claim.ttl()));
        let ask = Acquire {
            owner: claim.owner(),
            mode: claim.mode(),
            client: self.client,
            attempt: attempt.number,
            ttl,
            stop: self.stop(ttl),
            proposal: attempt.proposal,
            known: attempt.known.map_or(0, FencingToken::get),
            announced: millis(attempt.announced),
        };
        match self
            .call("acquire", move |stored, now| stored.acquire(now, &ask))
            .await?
        {
            Said::Granted { token, life } => {
                let token = FencingToken::new(token).map_err(|_| LockError::unavailable("acquire", "no token"))?;
                let lease = Lease::for_claim(claim, sent - Duration::from_millis(ttl - life));
                Ok(Answer::Granted(token, lease))
            }
            Said::Busy(owner) => {
                let mut holder = Holder::new();
                holder.owner = owner;
                Ok(Answer::Busy(Busy::default().with_holder(holder)))
            }
            Said::Young(left) => Ok(Answer::Young(Duration::from_millis(left))),
            _ => Err(LockError::unavailable("acquire", "late")),
        }
    }

    async fn confirm(
        &self,
        claim: &Claim,
        presented: FencingToken,
        token: FencingToken,
        is_agreed: bool,
    ) -> Result<Confirmed, LockError> {
        let (owner, presented, token) = (claim.owner(), presented.get(), token.get());
        let confirm = move |stored: &mut Stored, now| stored.confirm(now, owner, presented, token, is_agreed);
        Ok(match self.call("acquire", confirm).await? {
            Said::Confirmed => Confirmed::Yes,
            Said::Passed(last) => Confirmed::Passed(last),
            _ => Confirmed::Lost,
        })
    }

    async fn renew(&self, claim: &Claim) -> Result<bool, LockError> {
        let (owner, ttl) = (claim.owner(), millis(claim.ttl()));
        let stop = self.stop(ttl / 2);
        let renewed = self.call("renew", move |stored, now| stored.renew(now, owner, ttl, stop));
        Ok(renewed.await? == Said::Renewed)
    }

    async fn release(&self, claim: &Claim, last: u64, goes_on: bool) -> Result<Option<bool>, LockError> {
        let (owner, client) = (claim.owner(), self.client);
        let release = move |stored: &mut Stored, now| stored.release(now, owner, client, last, goes_on);
        Ok(Some(self.call("release", release).await? == Said::Released))
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
    for (bug, shares, what) in [
        (Bug::ConfirmsNothing, false, "came after"),
        (Bug::NoSilence, false, "two holders"),
        (Bug::ReleaseIgnoresAttempt, false, "two holders"),
        (Bug::SharesWhatIsExclusive, true, "two holders"),
        (Bug::ExcludesNoShared, true, "two holders"),
        (Bug::LeftoverKeepsToken, true, "came after"),
        (Bug::ConfirmsWhatIsDrawn, true, "was given to"),
    ] {
        let found = (0..400).find_map(|seed| {
            let (wrong, _) = run(3, seed, shares, Some(bug));
            wrong.filter(|wrong| wrong.contains(what)).map(|wrong| (seed, wrong))
        });
        println!("{bug:?}: {found:?}");
        assert!(found.is_some(), "{bug:?} was not found");
    }
}
