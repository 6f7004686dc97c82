//! Waiters of one client that come, leave, time out and are lost, at a server that fails, against what must be true of them.

use std::future::IntoFuture;
use std::time::Duration;

use lock_core::{LockError, LockGuard};
use proptest::prelude::*;
use tokio::task::JoinHandle;

use super::scripted::{Fate, OP_TIMEOUT, Op, SECOND, TTL, World};

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
    let wait = prop_oneof![
        Just(None),
        Just(Some(Duration::ZERO)),
        Just(Some(SECOND / 2)),
        Just(Some(20 * SECOND)),
    ];
    let op = prop_oneof![Just(Op::Try), Just(Op::Acquire), Just(Op::Release)];
    let fate = prop_oneof![
        Just(Fate::Fail),
        Just(Fate::Refuse),
        Just(Fate::Hang),
        Just(Fate::LoseReply),
        Just(Fate::Panic),
        Just(Fate::AnswerAfter(SECOND)),
        Just(Fate::FailAfter(SECOND)),
    ];
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
    started: lock_core::Stamp,
    task: JoinHandle<Result<LockGuard, LockError>>,
}

struct Model {
    world: World,
    requests: Vec<Request>,
    guard: Option<LockGuard>,
    last_token: u64,
}

impl Model {
    /// Takes the outcomes of requests, in the order in which they were made.
    async fn look(&mut self) {
        self.world.settle().await;
        let mut waiting = Vec::new();
        for request in std::mem::take(&mut self.requests) {
            let waited = self.world.now().since(request.started);
            if let Some(wait) = request.wait {
                let limit = if wait.is_zero() {
                    OP_TIMEOUT + SECOND / 2
                } else {
                    wait + SECOND
                };
                assert!(
                    request.task.is_finished() || waited < limit + PRECISION,
                    "{wait:?} took {waited:?}"
                );
            }
            if !request.task.is_finished() {
                waiting.push(request);
                continue;
            }
            match request.task.await.unwrap() {
                Ok(guard) => {
                    assert!(
                        !self.guard.as_ref().is_some_and(LockGuard::is_held),
                        "two hold the lock"
                    );
                    assert!(guard.token().get() > self.last_token, "tokens rise");
                    let first = waiting.iter().find(|earlier| earlier.wait.is_none());
                    assert!(first.is_none(), "an earlier request still waits");
                    self.last_token = guard.token().get();
                    self.guard = Some(guard);
                }
                Err(LockError::TimedOut { .. }) => assert!(request.wait.is_some(), "it waits for ever"),
                Err(LockError::Unavailable { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
        self.requests = waiting;
        assert_eq!(self.world.server.state().crossed, 0, "one claim of a client at a time");
    }

    async fn pass(&mut self, time: Duration) {
        let end = self.world.now() + time;
        while self.world.now() < end {
            self.world.pass(PRECISION / 2).await;
            self.look().await;
        }
    }
}

async fn run(steps: Vec<Step>, kind: usize) {
    let world = match kind {
        0 => World::new(),
        1 => World::with(|server| server.blocks = true),
        _ => World::with(|server| server.linger = SECOND),
    };
    let mut model = Model {
        world,
        requests: Vec::new(),
        guard: None,
        last_token: 0,
    };
    let mut elsewhere = false;
    for step in steps {
        match step {
            Step::Request(wait) => {
                let request = model.world.locks.lock("a");
                let request = match wait {
                    Some(limit) => request.wait_for(limit),
                    None => request,
                };
                model.requests.push(Request {
                    wait,
                    started: model.world.now(),
                    task: tokio::spawn(request.into_future()),
                });
            }
            Step::Leave(at) if at < model.requests.len() => model.requests.remove(at).task.abort(),
            Step::Leave(_) => {}
            Step::Release(waits) => {
                if let Some(guard) = model.guard.take() {
                    let release = tokio::spawn(guard.release());
                    model.world.settle().await;
                    if !waits {
                        release.abort();
                    }
                }
            }
            Step::Drop => model.guard = None,
            Step::Elsewhere if elsewhere => {
                model.world.server.take_away("a");
                elsewhere = false;
            }
            Step::Elsewhere => {
                if !model.world.server.keeps("a") {
                    model.world.server.occupy("a", 100 * TTL);
                    elsewhere = true;
                }
            }
            Step::Trouble(op, fate) => model.world.server.next(op, [fate]),
            Step::Pass(time) => model.pass(time).await,
        }
        model.look().await;
    }
    // The server is well again, and all who wait are served.
    model.world.server.heal();
    if elsewhere {
        model.world.server.take_away("a");
    }
    while !model.requests.is_empty() {
        model.guard = None;
        model.pass(PRECISION).await;
        assert!(
            model.world.now()
                < model
                    .requests
                    .iter()
                    .map(|r| r.started)
                    .min()
                    .unwrap_or(model.world.now())
                    + 100 * TTL
        );
    }
    model.guard = None;
    model.world.locks.drain().await;
    let stats = model.world.locks.stats();
    assert_eq!((stats.waiting, stats.held, stats.releasing), (0, 0, 0));
    assert!(!model.world.server.keeps("a"), "nothing is left at the server");
    model.world.locks.shutdown().await.unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]

    #[test]
    fn waiters_are_served_in_order_and_leave_nothing_behind(
        steps in prop::collection::vec(step(), 1..40),
        kind in 0..3_usize,
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        runtime.block_on(run(steps, kind));
    }
}

#[tokio::test(start_paused = true)]
async fn a_release_is_repeated_until_its_lease_must_be_over_or_for_as_long_as_other_locks_keep_it() {
    for shares in [false, true] {
        let world = World::with(|server| server.shares = shares);
        let kept = world.locks.lock("kept").await.unwrap();
        let dropped = world.locks.lock("a").await.unwrap();
        world.server.next(Op::Release, [Fate::Fail; 1_000]);
        drop(dropped);
        world.pass(3 * TTL).await;
        let tries = world.server.count(Op::Release);
        world.pass(TTL).await;
        assert_eq!(world.server.count(Op::Release) > tries, shares);
        assert!(kept.is_held());
        world.server.heal();
        world.locks.drain().await;
        assert!(!world.server.keeps("a"));
    }
}

#[tokio::test(start_paused = true)]
async fn a_place_at_the_server_is_kept_for_the_next_that_asks_for_the_same() {
    for (label, tries) in [("", 2), ("another", 3)] {
        let world = World::new();
        let guard = world.locks.lock("a").await.unwrap();
        let first = tokio::spawn(world.locks.lock("a").label("").wait_for(SECOND).into_future());
        let second = tokio::spawn(world.locks.lock("a").label(label).into_future());
        world.settle().await;
        // Another client has it by the time that they ask.
        world.server.take_away("a");
        world.server.occupy("a", 10 * TTL);
        drop(guard);
        assert!(first.await.unwrap().unwrap_err().is_busy());
        world.settle().await;
        assert_eq!(world.server.count(Op::Try), tries, "{label:?}");
        world.server.take_away("a");
        assert!(second.await.unwrap().unwrap().is_held());
    }
}

#[tokio::test(start_paused = true)]
async fn after_a_wait_that_ended_the_next_request_is_for_another_owner() {
    let world = World::with(|server| server.gives_up_early = true);
    world.server.occupy("a", 10 * TTL);
    let waits = tokio::spawn(world.locks.lock("a").into_future());
    world.pass(SECOND).await;
    // Nor is it asked without a pause.
    assert!((3..50).contains(&world.server.count(Op::Try)));
    world.server.take_away("a");
    waits.await.unwrap().unwrap().release().await.unwrap();
    let asked = world.server.state().asked.clone();
    assert!(
        (1..asked.len()).all(|at| !asked[..at].contains(&asked[at])),
        "{asked:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_another_request_takes_over_is_not_counted_as_being_released() {
    let world = World::new();
    world.server.occupy("a", 10 * TTL);
    for _ in 0..2 {
        let given_up = tokio::time::timeout(SECOND, world.locks.lock("a").into_future()).await;
        assert!(given_up.is_err());
        // At once, so that the task of the name has not looked yet.
        let mut next = std::pin::pin!(world.locks.lock("a").into_future());
        assert!(tokio::time::timeout(SECOND / 10, &mut next).await.is_err());
        assert_eq!((world.locks.stats().releasing, world.locks.stats().waiting), (0, 1));
    }
    world.locks.drain().await;
    assert_eq!(world.locks.stats().releasing, 0);
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_only_others_wait_behind_is_counted_until_it_is_released() {
    let world = World::new();
    world.server.next(Op::Try, [Fate::AnswerAfter(SECOND)]);
    let first = tokio::spawn(world.locks.lock("a").label("first").into_future());
    world.settle().await;
    let second = tokio::spawn(world.locks.lock("a").label("second").into_future());
    world.settle().await;
    first.abort();
    world.settle().await;
    let drained = world.now();
    world.locks.drain().await;
    assert!(world.now().since(drained) >= SECOND - PRECISION && world.server.count(Op::Release) == 1);
    assert!(second.await.unwrap().unwrap().is_held());
}

#[tokio::test(start_paused = true)]
async fn credentials_that_are_refused_to_a_release_end_no_wait() {
    let world = World::new();
    let guard = world.locks.lock("a").await.unwrap();
    let waits = tokio::spawn(world.locks.lock("a").into_future());
    world.settle().await;
    world.server.next(Op::Release, [Fate::Deny; 4]);
    drop(guard);
    assert!(waits.await.unwrap().unwrap().is_held());
}

#[tokio::test(start_paused = true)]
async fn who_waits_for_a_release_of_the_same_client_is_not_refused_by_what_it_releases() {
    let world = World::new();
    let guard = world.locks.lock("a").await.unwrap();
    world.server.next(Op::Release, [Fate::AnswerAfter(SECOND / 4)]);
    world.server.next(Op::Try, [Fate::AnswerAfter(SECOND / 4)]);
    drop(guard);
    world.settle().await;
    assert!(world.locks.lock("a").wait_for(SECOND * 3 / 10).await.unwrap().is_held());
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_waited_at_the_server_is_released_though_its_last_request_was_not_sent() {
    let world = World::new();
    world.server.occupy("a", 10 * TTL);
    world.server.next(Op::Acquire, [Fate::Refuse]);
    world.server.next(Op::Try, [Fate::AnswerAfter(SECOND / 1000)]);
    let waits = tokio::spawn(world.locks.lock("a").into_future());
    // It has been told that the lock is busy, and its wait has failed.
    crate::until(|| world.server.count(Op::Acquire) == 1).await;
    world.settle().await;
    waits.abort();
    world.settle().await;
    world.locks.drain().await;
    assert_eq!(world.server.count(Op::Release), 1);
}

#[tokio::test(start_paused = true)]
async fn a_place_at_the_server_is_kept_for_those_that_came_after_the_request() {
    for later in [Some(10 * SECOND), None] {
        let world = World::new();
        world.server.occupy("a", 10 * TTL);
        let first = tokio::spawn(world.locks.lock("a").wait_for(SECOND).into_future());
        world.settle().await;
        let second = world.locks.lock("a");
        let second = match later {
            Some(limit) => second.wait_for(limit),
            None => second,
        };
        let second = tokio::spawn(second.into_future());
        assert!(first.await.unwrap().unwrap_err().is_busy());
        world.pass(SECOND).await;
        assert_eq!((world.server.count(Op::Try), world.server.count(Op::Release)), (1, 0));
        world.server.take_away("a");
        let guard = second.await.unwrap().unwrap();
        assert_eq!(world.server.state().asked.clone(), [guard.owner()]);
    }
}
