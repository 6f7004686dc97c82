//! A claim that a client keeps for its next holder.

use std::time::{Duration, Instant};

use lock_core::{LockError, LockRequest, Locks, LossReason, MemoryLock, Options, Renew};

use super::scripted::{Fate, Op, SECOND, TTL, World, ask};
use crate::{paused, until};

fn world() -> World {
    keeping(SECOND, false)
}

fn keeping(linger: Duration, unfair: bool) -> World {
    World::with(|kind| (kind.linger, kind.unfair) = (linger, unfair))
}

async fn use_once(locks: &Locks) -> u64 {
    let guard = locks.lock("a").await.unwrap();
    assert!(guard.is_held());
    let token = guard.token().get();
    guard.release().await.unwrap();
    token
}

/// A store that has granted nothing yet grants one token.
async fn has_counted(memory: &MemoryLock) {
    use_once(&Locks::new(memory.client())).await;
    tokio::time::sleep(Duration::from_millis(1)).await;
}

#[tokio::test(start_paused = true)]
async fn a_lock_that_is_used_again_needs_no_request_until_its_block_is_used_up() {
    let world = world();
    let mut last = 0;
    for uses in 1..=65 {
        let token = use_once(&world.locks).await;
        assert!(token > last);
        last = token;
        assert_eq!(world.locks.stats().held, 0);
        // Granted and, after the last token of its block, released.
        let requests = match uses {
            ..64 => 1,
            64 => 2,
            _ => 3,
        };
        world.settle().await;
        assert_eq!(world.requests(), requests, "{uses}");
    }
    let stats = world.locks.stats();
    assert_eq!((stats.acquired, stats.released, stats.lost), (65, 65, 0));
}

#[tokio::test(start_paused = true)]
async fn it_is_renewed_and_released_at_the_end_of_its_time_however_often_it_is_used() {
    // At most a third of the ttl, and 100 ms where the server has no queue.
    for (linger, unfair, length) in [(SECOND, false, SECOND), (TTL, false, TTL / 3), (TTL, true, SECOND / 10)] {
        let world = keeping(linger, unfair);
        for _ in 0..10 {
            use_once(&world.locks).await;
            world.pass(length / 11).await;
        }
        assert!(world.server.keeps("a") && world.server.count(Op::Try) == 1);
        world.pass(length / 5).await;
        assert!(!world.server.keeps("a"), "{length:?}");
        let stats = world.locks.stats();
        assert_eq!((stats.acquired, stats.released, stats.releasing), (10, 10, 0));
        // One that is held when its time is over is renewed on.
        use_once(&world.locks).await;
        let guard = world.held("a").await;
        world.pass(2 * TTL).await;
        assert!(guard.is_held() && world.server.count(Op::Try) == 2);
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_not_kept() {
    type Change = fn(LockRequest) -> LockRequest;
    let changes: [(&str, Change); 3] = [
        ("ttl", |request| request.ttl(TTL / 2)),
        ("label", |request| request.label("another")),
        ("renewal", |request| request.renew(Renew::Never)),
    ];
    for (what, change) in changes {
        let world = world();
        use_once(&world.locks).await;
        // Also for a request that does not wait: the lock is free for this client.
        let guard = change(world.lock("a")).no_wait().await.unwrap();
        let crossed = world.server.script().crossed;
        assert_eq!((world.server.count(Op::Try), crossed), (2, 0), "{what}");
        guard.release().await.unwrap();
        assert_eq!(world.server.keeps("a"), what != "renewal");
    }
    let world = world();
    let guard = world.held("a").await;
    let _ = guard.owner();
    guard.release().await.unwrap();
    assert!(!world.server.keeps("a"));
    world.lock("a").lead(async |_| {}).await.unwrap();
    assert!(!world.server.keeps("a"));
    // A lease that is not renewed in time.
    world.server.next(Op::Renew, [Fate::Fail; 1_000]);
    let guard = world.held("a").await;
    world.pass(TTL * 3 / 4).await;
    guard.release().await.unwrap();
    assert!(!world.server.keeps("a"));
}

#[tokio::test(start_paused = true)]
async fn a_drain_and_a_shutdown_release_it_at_once() {
    let world = world();
    use_once(&world.locks).await;
    world.locks.drain().await;
    assert!(!world.server.keeps("a"));
    // What is released while a drain waits is not kept.
    world.server.next(Op::Release, [Fate::AnswerAfter(SECOND)]);
    use_once(&world.locks).await;
    let (guard, locks) = (world.held("b").await, world.locks.clone());
    let draining = tokio::spawn(async move { locks.drain().await });
    world.settle().await;
    guard.release().await.unwrap();
    assert!(!draining.is_finished() && !world.server.keeps("b"));
    draining.await.unwrap();
    use_once(&world.locks).await;
    assert!(world.server.keeps("a"));
    world.locks.shutdown().await.unwrap();
    assert!(!world.server.keeps("a"));
    fails!(world.lock("a").await, LockError::Closed { .. });
}

#[tokio::test(start_paused = true)]
async fn what_is_lost_while_it_is_kept_is_asked_for_anew() {
    for sharing in [false, true] {
        let memory = paused::memory();
        let memory = if sharing { memory.sharing_leases() } else { memory };
        let locks = Locks::with_options(memory.client(), paused::options().linger(SECOND));
        has_counted(&memory).await;
        use_once(&locks).await;
        assert!(memory.steal(&"a".parse().unwrap()).is_some());
        assert!(locks.try_lock("a").await.unwrap().is_none());
        memory.expire(&"a".parse().unwrap());
        use_once(&locks).await;
        // The loss of a lock that was kept before is told to its next holder.
        let guard = locks.lock("a").await.unwrap();
        assert!(locks.stats().handed_over > 0);
        memory.steal(guard.name());
        assert_eq!(guard.lost().await, LossReason::NotHeld);
        until(|| locks.stats().lost == 1).await;
    }
}

/// A caller that leaves at about the moment of its grant.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_lock_that_only_a_caller_has_that_is_gone_is_not_busy() {
    let memory = MemoryLock::new();
    for linger in [Duration::ZERO, SECOND / 50] {
        let locks = Locks::with_options(memory.client(), Options::new().linger(linger));
        for turn in 0..2_000_u64 {
            let asking = ask(locks.lock("a"));
            let left = Instant::now() + Duration::from_micros(turn % 100);
            while Instant::now() < left {
                std::hint::spin_loop();
            }
            asking.abort();
            let _ = asking.await.map(drop);
            assert!(locks.try_lock("a").await.unwrap().is_some(), "{linger:?}, {turn}");
        }
        locks.shutdown().await.unwrap();
    }
}
