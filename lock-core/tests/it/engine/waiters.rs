//! Waiters of one client that come, leave, time out and are lost, at a server that fails, against what must be true of them.

use std::time::Duration;

use lock_core::{LockError, LockGuard, Stamp};
use proptest::prelude::*;
use tokio::time::timeout;

use super::scripted::{Asked, Fate, OP_TIMEOUT, Op, SECOND, TTL, World, ask, granted, limited};

/// Of paused time, which timers round to milliseconds, and of the steps in which the test looks.
const PRECISION: Duration = Duration::from_millis(100);

#[derive(Clone, Copy, Debug)]
enum Step {
    Request(Option<Duration>),
    /// The caller drops the future of one of its requests.
    Leave(usize),
    /// The caller waits for the response, or drops the future.
    Release(bool),
    Drop,
    /// Another client takes the name if it is free, or releases it.
    Elsewhere,
    Trouble(Op, Fate),
    Pass(Duration),
}

fn step() -> impl Strategy<Value = Step> {
    let wait = prop::sample::select(vec![None, Some(Duration::ZERO), Some(SECOND / 2), Some(20 * SECOND)]);
    let op = prop::sample::select(vec![Op::Try, Op::Acquire, Op::Release]);
    let fate = prop::sample::select(vec![
        Fate::Fail,
        Fate::Refuse,
        Fate::Hang,
        Fate::LoseReply,
        Fate::Panic,
        Fate::AnswerAfter(SECOND),
        Fate::FailAfter(SECOND),
    ]);
    prop_oneof![
        6 => wait.prop_map(Step::Request),
        2 => (0..8_usize).prop_map(Step::Leave),
        3 => any::<bool>().prop_map(Step::Release),
        2 => Just(Step::Drop),
        2 => Just(Step::Elsewhere),
        3 => (op, fate).prop_map(|(op, fate)| match (op, fate) {
            // A backend notices by itself that a wait hangs.
            (Op::Acquire, Fate::Hang | Fate::LoseReply) => Step::Trouble(op, Fate::Fail),
            _ => Step::Trouble(op, fate),
        }),
        4 => (0..3_000_u64).prop_map(|millis| Step::Pass(Duration::from_millis(millis))),
    ]
}

struct Request {
    wait: Option<Duration>,
    started: Stamp,
    asked: Asked,
}

struct Model {
    world: World,
    requests: Vec<Request>,
    guard: Option<LockGuard>,
    last_token: u64,
    is_elsewhere: bool,
}

impl Model {
    async fn step(&mut self, step: Step) {
        let world = &self.world;
        match step {
            Step::Request(wait) => {
                let (started, asked) = (world.now(), ask(limited(world.lock("a"), wait)));
                self.requests.push(Request { wait, started, asked });
            }
            Step::Leave(at) if at < self.requests.len() => self.requests.remove(at).asked.abort(),
            Step::Leave(_) => {}
            Step::Release(waits) => {
                if let Some(guard) = self.guard.take() {
                    let release = tokio::spawn(guard.release());
                    world.settle().await;
                    if !waits {
                        release.abort();
                    }
                }
            }
            Step::Drop => self.guard = None,
            Step::Elsewhere if self.is_elsewhere => {
                world.server.take_away("a");
                self.is_elsewhere = false;
            }
            Step::Elsewhere => {
                if !world.server.keeps("a") {
                    world.server.occupy("a", 100 * TTL);
                    self.is_elsewhere = true;
                }
            }
            Step::Trouble(op, fate) => world.server.next(op, [fate]),
            Step::Pass(time) => self.pass(time).await,
        }
        self.look().await;
    }

    async fn pass(&mut self, time: Duration) {
        let end = self.world.now() + time;
        while self.world.now() < end {
            self.world.pass(PRECISION / 2).await;
            self.look().await;
        }
    }

    /// Takes the outcomes of requests, in the order in which they were made.
    async fn look(&mut self) {
        self.world.settle().await;
        let mut waiting: Vec<Request> = Vec::new();
        for request in std::mem::take(&mut self.requests) {
            let waited = self.world.now().since(request.started);
            if !request.asked.is_finished() {
                if let Some(wait) = request.wait {
                    let limit = if wait.is_zero() { OP_TIMEOUT } else { wait };
                    assert!(waited < limit + SECOND + PRECISION, "{wait:?} took {waited:?}");
                }
                waiting.push(request);
                continue;
            }
            match request.asked.await.unwrap() {
                Ok(guard) => {
                    let is_held = self.guard.as_ref().is_some_and(LockGuard::is_held);
                    assert!(!is_held, "two hold the lock");
                    assert!(guard.token().get() > self.last_token, "tokens rise");
                    let passes = waiting.iter().any(|earlier| earlier.wait.is_none());
                    assert!(!passes, "an earlier request still waits");
                    self.last_token = guard.token().get();
                    self.guard = Some(guard);
                }
                Err(LockError::TimedOut { .. }) => assert!(request.wait.is_some(), "it waits for ever"),
                Err(LockError::Unavailable { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
        self.requests = waiting;
        assert_eq!(self.world.server.script().crossed, 0, "one claim of a client at a time");
    }

    /// The server is well again: all that wait are served, and nothing is left.
    async fn end(mut self) {
        self.world.server.heal();
        if self.is_elsewhere {
            self.world.server.take_away("a");
        }
        let end = self.world.now() + 100 * TTL;
        while !self.requests.is_empty() {
            self.guard = None;
            self.pass(PRECISION).await;
            assert!(self.world.now() < end, "a request is never served");
        }
        self.guard = None;
        self.world.locks.drain().await;
        let stats = self.world.locks.stats();
        assert_eq!((stats.waiting, stats.held, stats.releasing), (0, 0, 0));
        assert!(!self.world.server.keeps("a"), "nothing is left at the server");
        self.world.locks.shutdown().await.unwrap();
    }
}

async fn run(steps: Vec<Step>, (blocks, linger): (bool, Duration)) {
    let mut model = Model {
        world: World::with(|kind| (kind.blocks, kind.linger) = (blocks, linger)),
        requests: Vec::new(),
        guard: None,
        last_token: 0,
        is_elsewhere: false,
    };
    for step in steps {
        model.step(step).await;
    }
    model.end().await;
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]

    #[test]
    fn waiters_are_served_in_order_and_leave_nothing_behind(
        steps in prop::collection::vec(step(), 1..40),
        kind in prop::sample::select(vec![(false, Duration::ZERO), (true, Duration::ZERO), (true, SECOND)]),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        runtime.block_on(run(steps, kind));
    }
}

#[tokio::test(start_paused = true)]
async fn a_place_at_the_server_is_kept_for_the_next_that_asks_for_the_same() {
    for (label, limit, came_before, claims) in [
        ("", None, true, 1),
        ("another", None, true, 2),
        ("", None, false, 1),
        ("", Some(10 * SECOND), false, 1),
    ] {
        let world = World::new();
        let guard = if came_before {
            Some(world.held("a").await)
        } else {
            world.server.occupy("a", 10 * TTL);
            None
        };
        let before = world.server.count(Op::Try);
        let first = ask(world.lock("a").label("").wait_for(SECOND));
        world.settle().await;
        let second = ask(limited(world.lock("a").label(label), limit));
        world.settle().await;
        if let Some(guard) = guard {
            // Another client has it by the time that they ask.
            world.server.take_away("a");
            world.server.occupy("a", 10 * TTL);
            drop(guard);
            world.settle().await;
        }
        let releases = world.server.count(Op::Release);
        assert!(first.await.unwrap().unwrap_err().is_busy());
        world.pass(SECOND).await;
        assert_eq!(world.server.count(Op::Try) - before, claims, "{label:?}");
        // A wait that has ended leaves nothing at the server: either its claim is that of the next, or it is released.
        assert_eq!(world.server.count(Op::Release) - releases, claims - 1, "{label:?}");
        world.server.take_away("a");
        let guard = granted(second).await;
        assert_eq!(world.server.script().asked.last(), Some(&guard.owner()));
    }
}

#[tokio::test(start_paused = true)]
async fn after_a_wait_that_ended_the_next_request_is_for_another_owner() {
    let world = World::with(|kind| kind.gives_up_early = true);
    world.server.occupy("a", 10 * TTL);
    let waits = ask(world.lock("a"));
    world.pass(SECOND).await;
    // Nor is it asked without a pause.
    assert!((3..50).contains(&world.server.count(Op::Try)));
    world.server.take_away("a");
    granted(waits).await.release().await.unwrap();
    let asked = world.server.script().asked.clone();
    let is_repeated = (1..asked.len()).any(|at| asked[..at].contains(&asked[at]));
    assert!(!is_repeated, "{asked:?}");
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_another_request_takes_over_is_not_counted_as_being_released() {
    let world = World::new();
    world.server.occupy("a", 10 * TTL);
    for _ in 0..2 {
        assert!(timeout(SECOND, world.lock("a").into_future()).await.is_err());
        // At once, so that the task of the name has not looked yet.
        let mut next = std::pin::pin!(world.lock("a").into_future());
        assert!(timeout(SECOND / 10, &mut next).await.is_err());
        assert_eq!((world.locks.stats().releasing, world.locks.stats().waiting), (0, 1));
    }
    world.locks.drain().await;
    assert_eq!(world.locks.stats().releasing, 0);
}
