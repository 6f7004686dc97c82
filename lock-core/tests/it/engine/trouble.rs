//! Servers that are slow or gone, backends that break their word, and rough use.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use lock_core::{DistributedLock, LockError, LockGuard, Locks, LossReason, MemoryLock, Options};
use tokio::runtime::Runtime;

use super::scripted::{Fate, OP_TIMEOUT, Op, SECOND, TTL, World};
use crate::{block_until, until};

#[tokio::test(start_paused = true)]
async fn a_server_that_went_down_is_not_called_busy() {
    let world = World::new();
    world.server.occupy("a", TTL);
    world.server.next(Op::Acquire, [Fate::Fail; 1000]);
    let waiting = tokio::spawn({
        let locks = world.locks.clone();
        async move { locks.lock("a").await }
    });
    // The first answer is busy.
    world.settle().await;
    world.server.next(Op::Try, [Fate::Fail; 1000]);
    world.pass(2 * TTL).await;
    for wait in [Duration::ZERO, SECOND] {
        let error = world.locks.lock("a").wait_for(wait).await.unwrap_err();
        assert!(matches!(error, LockError::Unavailable { .. }), "{error}");
    }
    world.server.heal();
    assert!(waiting.await.unwrap().is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_server_that_stopped_answering_is_not_called_busy_before_the_wait_is_over() {
    let world = World::new();
    let ask = || {
        let locks = world.locks.clone();
        tokio::spawn(async move { locks.lock("a").await })
    };
    drop(world.locks.lock("a").await.unwrap());
    world
        .server
        .next(Op::Release, [Fate::AnswerAfter(OP_TIMEOUT - SECOND / 2)]);
    world.server.next(Op::Try, [Fate::Hang]);
    world.settle().await;
    // It has its turn after the release, and a second to ask the server. The other one hears nothing until its own time is over.
    let first = ask();
    world.pass(SECOND / 5).await;
    let second = ask();
    for task in [second, first] {
        let error = task.await.unwrap().unwrap_err();
        assert!(matches!(error, LockError::Unavailable { .. }), "{error}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_server_that_falls_silent_after_it_was_busy_does_not_lengthen_the_wait() {
    let world = World::new();
    world.server.occupy("a", TTL);
    world.server.next(Op::Acquire, [Fate::Hang; 9]);
    let started = world.now();
    let error = world.locks.lock("a").wait_for(SECOND / 10).await.unwrap_err();
    assert!(matches!(error, LockError::Unavailable { .. }), "{error}");
    assert!(world.now().since(started) <= SECOND + SECOND / 2);
    world.locks.drain().await;
    assert_eq!(world.server.count(Op::Release), 1);
}

#[tokio::test(start_paused = true)]
async fn retries_do_not_overrun_the_wait() {
    let world = World::new();
    world.server.occupy("a", 100 * TTL);
    world.server.next(Op::Acquire, [Fate::Fail; 1000]);
    for tenths in 20..40 {
        let (wait, started) = (tenths * SECOND / 10, world.now());
        assert!(world.locks.lock("a").wait_for(wait).await.is_err());
        let over = world.now().since(started + wait);
        assert!(over <= SECOND / 10, "{over:?} beyond {wait:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn work_is_not_continued_past_the_deadline_after_a_sleep_of_the_machine() {
    let world = World::new();
    let guard = world.locks.lock("a").await.unwrap();
    let steps = AtomicUsize::new(0);
    let work = async {
        world.hand.advance(TTL);
        loop {
            tokio::task::yield_now().await;
            steps.fetch_add(1, Ordering::SeqCst);
        }
    };
    let lost: Result<(), _> = guard.run(work).await;
    let lost = lost.unwrap_err();
    assert!(
        matches!(
            lost,
            LockError::Lost {
                reason: LossReason::Expired,
                ..
            }
        ),
        "{lost}"
    );
    assert_eq!(steps.into_inner(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_grant_for_another_claim_is_refused_and_cleaned_up() {
    let world = World::with(|server| server.grants_another_claim = true);
    let error = world.locks.lock("a").await.unwrap_err();
    assert!(error.to_string().contains("another claim"), "{error}");
    world.locks.drain().await;
    assert!(!world.server.keeps("a"));
}

const NAMES: [&str; 3] = ["a", "b", "c"];

/// What one name has seen: its holders, of which there is one at a time, and the last token.
#[derive(Default)]
struct Seen {
    holders: AtomicUsize,
    token: AtomicU64,
}

impl Seen {
    fn check(&self, guard: &LockGuard) {
        assert_eq!(self.holders.fetch_add(1, Ordering::SeqCst), 0, "two hold the lock");
        let token = guard.token().get();
        assert!(self.token.swap(token, Ordering::SeqCst) < token, "tokens rise");
        self.holders.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Runs `rounds` of hostile use of two clients on several threads: short waits, dropped requests, dropped guards, requests that differ. Ends
/// sooner if a client is shut down.
fn rough_use(clients: &[Locks; 2], rounds: usize) {
    let (runtime, seen) = (Runtime::new().unwrap(), Arc::new(<[Seen; 3]>::default()));
    runtime.block_on(async {
        let tasks: Vec<_> = (0..8)
            .map(|task| {
                let (locks, seen) = (clients[task % 2].clone(), Arc::clone(&seen));
                tokio::spawn(async move {
                    for round in 0..rounds {
                        let name = (task + round) % NAMES.len();
                        let request = locks.lock(NAMES[name]).wait_for(Duration::from_micros(300));
                        let request = request.label(if round % 5 == 4 { "other" } else { "one" });
                        let limit = Duration::from_micros(((task * 7 + round * 13) % 900) as u64);
                        match tokio::time::timeout(limit, request).await {
                            Ok(Err(LockError::Closed { .. })) => return,
                            // A backend whose tasks get no processor for a second is called unavailable.
                            Err(_) | Ok(Err(LockError::TimedOut { .. } | LockError::Unavailable { .. })) => {}
                            Ok(Ok(guard)) => {
                                if guard.is_held() {
                                    seen[name].check(&guard);
                                }
                                match round % 2 {
                                    0 => drop(guard),
                                    _ => drop(guard.release().await),
                                }
                            }
                            Ok(Err(error)) => panic!("{error}"),
                        }
                    }
                })
            })
            .collect();
        for task in tasks {
            task.await.unwrap();
        }
    });
}

/// Two clients of one store whose tasks run on `runtime`.
fn clients(memory: &MemoryLock, runtime: &Runtime, linger: Duration) -> [Locks; 2] {
    let options = || Options::new().runtime(runtime.handle().clone()).linger(linger);
    [(); 2].map(|()| Locks::with_options(memory.client(), options()))
}

#[test]
fn rough_use_on_many_threads_leaves_nothing_behind() {
    let own = Runtime::new().unwrap();
    let kept = Duration::from_micros(200);
    for (sharing, linger) in [
        (false, Duration::ZERO),
        (true, Duration::ZERO),
        (false, kept),
        (false, 15 * kept),
    ] {
        let memory = MemoryLock::new();
        let memory = if sharing { memory.sharing_leases() } else { memory };
        let clients = clients(&memory, &own, linger);
        rough_use(&clients, 500);
        own.block_on(async {
            for locks in &clients {
                locks.drain().await;
                until(|| locks.stats().waiting + locks.stats().held + locks.stats().releasing == 0).await;
                let stats = locks.stats();
                assert_eq!((stats.acquired, stats.lost), (stats.released, 0));
            }
            let left = memory.list("").await.unwrap();
            assert!(left.is_empty(), "{left:?}");
        });
    }
}

#[test]
fn a_shutdown_in_the_middle_of_rough_use_leaves_nothing_behind() {
    let own = Runtime::new().unwrap();
    for _ in 0..50 {
        let memory = MemoryLock::new();
        let clients = clients(&memory, &own, Duration::ZERO);
        std::thread::scope(|scope| {
            scope.spawn(|| rough_use(&clients, usize::MAX));
            block_until(|| clients.iter().all(|locks| locks.stats().acquired > 0));
            for locks in &clients {
                own.block_on(locks.shutdown()).unwrap();
            }
            let left = own.block_on(memory.list("")).unwrap();
            assert!(left.is_empty(), "{left:?}");
        });
        assert!(own.block_on(memory.list("")).unwrap().is_empty());
    }
}
