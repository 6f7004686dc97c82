//! A claim that goes from one waiter of a client to the next without a request.

use std::future::IntoFuture;
use std::time::Duration;

use lock_core::{LockError, LockGuard, LockRequest, Locks, LossReason, MemoryLock, Renew};
use tokio::task::JoinHandle;

use super::scripted::{OP_TIMEOUT, Op, TTL, World};
use crate::paused;

const RUN: Duration = Duration::from_millis(5);

fn world() -> World {
    World::with(|server| server.blocks = true)
}

impl World {
    /// Two tasks wait, so that the next claim asks for a block. The first one is granted it.
    async fn granted_with_a_waiter(
        &self,
        first: impl Fn(LockRequest) -> LockRequest,
        second: impl Fn(LockRequest) -> LockRequest,
    ) -> (LockGuard, JoinHandle<Result<LockGuard, LockError>>) {
        let before = self.locks.lock("a").await.unwrap();
        let first = tokio::spawn(first(self.locks.lock("a")).into_future());
        self.settle().await;
        let second = tokio::spawn(second(self.locks.lock("a")).into_future());
        self.settle().await;
        before.release().await.unwrap();
        (first.await.unwrap().unwrap(), second)
    }
}

fn same(request: LockRequest) -> LockRequest {
    request
}

#[tokio::test(start_paused = true)]
async fn waiters_of_a_client_need_no_request_until_the_block_is_used_up() {
    let world = world();
    let (guard, waits) = world.granted_with_a_waiter(same, same).await;
    let asked = world.requests();
    let waiters: Vec<_> = (0..100)
        .map(|_| tokio::spawn(world.locks.lock("a").into_future()))
        .collect();
    world.settle().await;
    let mut last = guard.token();
    drop(guard);
    for (at, waits) in [waits].into_iter().chain(waiters).enumerate() {
        let guard = waits.await.unwrap().unwrap();
        assert!(guard.token() > last && guard.is_held(), "{at}");
        last = guard.token();
        // The first one of a block of 64 had its guard before.
        assert_eq!(world.requests() > asked, at >= 63, "{at}");
        guard.release().await.unwrap();
    }
    assert_eq!(world.server.state().crossed, 0);
    assert!(!world.server.keeps("a"));
    let stats = world.locks.stats();
    assert_eq!((stats.acquired, stats.released, stats.held), (103, 103, 0));
}

#[tokio::test(start_paused = true)]
async fn two_that_take_turns_need_no_request_either() {
    let world = world();
    let mut guard = world.locks.lock("a").await.unwrap();
    for turn in 0..20 {
        let next = tokio::spawn(world.locks.lock("a").into_future());
        world.settle().await;
        guard.release().await.unwrap();
        guard = next.await.unwrap().unwrap();
        // The first release has found a waiter.
        assert_eq!(world.requests(), 3, "{turn}");
    }
    guard.release().await.unwrap();
    drop(world.locks.lock("a").await.unwrap());
    world.locks.drain().await;
    assert_eq!(world.requests(), 6);
}

#[tokio::test(start_paused = true)]
async fn others_get_their_turn_5_ms_after_the_grant() {
    let world = world();
    let (guard, second) = world.granted_with_a_waiter(same, same).await;
    let asked = world.requests();
    world.pass(RUN - Duration::from_millis(2)).await;
    let third = tokio::spawn(world.locks.lock("a").into_future());
    world.settle().await;
    drop(guard);
    let guard = second.await.unwrap().unwrap();
    assert_eq!(world.requests(), asked);
    world.pass(Duration::from_millis(2)).await;
    drop(guard);
    assert!(third.await.unwrap().unwrap().is_held());
    assert!(world.requests() > asked);
}

#[tokio::test(start_paused = true)]
async fn what_differs_is_asked_of_the_server() {
    type Change = fn(LockRequest) -> LockRequest;
    let changes: [(&str, Change, Change); 5] = [
        ("ttl", same, |request| request.ttl(TTL / 2)),
        ("label", same, |request| request.label("another")),
        ("renewal", same, |request| request.renew(Renew::Never)),
        (
            "no renewal at all",
            |request| request.renew(Renew::Never),
            |request| request.renew(Renew::Never),
        ),
        ("nothing", same, same),
    ];
    for (what, first, second) in changes {
        let world = world();
        let (guard, waits) = world.granted_with_a_waiter(first, second).await;
        let asked = world.requests();
        drop(guard);
        assert!(waits.await.unwrap().unwrap().is_held());
        assert_eq!(world.requests() == asked, what == "nothing", "{what}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_hold_whose_owner_was_asked_for_shares_it_with_no_other() {
    let world = world();
    let (guard, waits) = world.granted_with_a_waiter(same, same).await;
    let owner = guard.owner();
    drop(guard);
    assert_ne!(waits.await.unwrap().unwrap().owner(), owner);
}

#[tokio::test(start_paused = true)]
async fn each_hold_has_its_own_end() {
    let world = world();
    let (guard, second) = world
        .granted_with_a_waiter(same, |request| request.max_hold(TTL * 2 / 3))
        .await;
    let (ended, token) = (guard.lost(), guard.token());
    drop(guard);
    assert_eq!(ended.await, LossReason::Released);
    let guard = second.await.unwrap().unwrap();
    assert!(guard.token() > token);
    // Its lease is renewed, although it has another guard by now.
    world.pass(TTL / 2).await;
    assert!(guard.is_held() && world.server.count(Op::Renew) > 0);
    assert!(guard.remaining() <= TTL / 6);
    assert_eq!(guard.lost().await, LossReason::MaxHold);
}

/// Two waiters of `locks`, the first of which holds the lock by a block.
async fn run_of(memory: &MemoryLock, locks: &Locks) -> (LockGuard, JoinHandle<Result<LockGuard, LockError>>) {
    let other = Locks::with_options(memory.client(), paused::options());
    let before = other.lock("a").await.unwrap();
    let waits: Vec<_> = (0..3).map(|_| tokio::spawn(locks.lock("a").into_future())).collect();
    crate::until(|| locks.stats().waiting == 3 && memory.waiters() == 1).await;
    before.release().await.unwrap();
    let mut waits = waits.into_iter();
    // The first claim was sent for one waiter.
    waits.next().unwrap().await.unwrap().unwrap().release().await.unwrap();
    let guard = waits.next().unwrap().await.unwrap().unwrap();
    (guard, waits.next().unwrap())
}

#[tokio::test(start_paused = true)]
async fn a_grant_that_is_taken_away_is_lost_to_the_hold_that_has_it_then() {
    for sharing in [false, true] {
        let memory = paused::memory();
        let client = if sharing {
            memory.sharing_leases()
        } else {
            memory.client()
        };
        let locks = Locks::with_options(client, paused::options());
        let (guard, next) = run_of(&memory, &locks).await;
        let handed_over = locks.stats().handed_over;
        drop(guard);
        let guard = next.await.unwrap().unwrap();
        assert_eq!(locks.stats().handed_over, handed_over + 1);
        let (token, lost) = (guard.token(), guard.lost());
        assert!(memory.steal(guard.name()) > Some(token));
        assert_eq!(lost.await, LossReason::NotHeld);
        assert!(!guard.is_held());
        crate::until(|| locks.stats().held == 0).await;
        assert_eq!(locks.stats().lost, 1);
    }
}

#[tokio::test(start_paused = true)]
async fn a_grant_that_was_taken_away_goes_to_no_other_waiter() {
    let memory = paused::memory();
    let locks = Locks::with_options(memory.client(), paused::options());
    let (guard, next) = run_of(&memory, &locks).await;
    let stolen = memory.steal(guard.name()).unwrap();
    drop(guard);
    memory.expire(&"a".parse().unwrap());
    assert!(next.await.unwrap().unwrap().token() > stolen);
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_ends_a_run() {
    let world = world();
    let (guard, waits) = world.granted_with_a_waiter(same, same).await;
    let lost = guard.lost();
    tokio::time::timeout(OP_TIMEOUT, world.locks.shutdown())
        .await
        .unwrap()
        .unwrap();
    assert_eq!(lost.await, LossReason::Shutdown);
    drop(guard);
    assert!(matches!(waits.await.unwrap(), Err(LockError::Closed { .. })));
    assert!(!world.server.keeps("a"));
}
