//! A claim that goes from one waiter of a client to the next without a request.

use std::time::Duration;

use lock_core::{LockError, LockGuard, LockRequest, LossReason, Renew};

use super::scripted::{Asked, OP_TIMEOUT, Op, TTL, World, ask, granted};
use crate::{paused, until};

const RUN: Duration = Duration::from_millis(5);

fn world() -> World {
    World::with(|kind| kind.blocks = true)
}

type Change = fn(LockRequest) -> LockRequest;

fn same(request: LockRequest) -> LockRequest {
    request
}

/// Two tasks wait, so that the next claim asks for a block. The first one is granted it.
async fn granted_with_a_waiter(world: &World, [first, second]: [Change; 2]) -> (LockGuard, Asked) {
    let before = world.held("a").await;
    let first = ask(first(world.lock("a")));
    world.settle().await;
    let second = ask(second(world.lock("a")));
    world.settle().await;
    before.release().await.unwrap();
    (granted(first).await, second)
}

#[tokio::test(start_paused = true)]
async fn waiters_of_a_client_need_no_request_until_the_block_is_used_up() {
    let world = world();
    let (guard, second) = granted_with_a_waiter(&world, [same; 2]).await;
    let asked = world.requests();
    let mut waiters = vec![second];
    waiters.extend((0..100).map(|_| ask(world.lock("a"))));
    world.settle().await;
    let mut last = guard.token();
    drop(guard);
    for (at, waits) in waiters.into_iter().enumerate() {
        let guard = granted(waits).await;
        assert!(guard.token() > last && guard.is_held(), "{at}");
        last = guard.token();
        // The first one of a block of 64 had its guard before.
        assert_eq!(world.requests() > asked, at >= 63, "{at}");
        guard.release().await.unwrap();
    }
    assert_eq!(world.server.script().crossed, 0);
    assert!(!world.server.keeps("a"));
    let stats = world.locks.stats();
    assert_eq!((stats.acquired, stats.released, stats.held), (103, 103, 0));
}

#[tokio::test(start_paused = true)]
async fn two_that_take_turns_need_no_request_either() {
    let world = world();
    let mut guard = world.held("a").await;
    for turn in 0..20 {
        let next = ask(world.lock("a"));
        world.settle().await;
        guard.release().await.unwrap();
        guard = granted(next).await;
        // The first release has found a waiter.
        assert_eq!(world.requests(), 3, "{turn}");
    }
    guard.release().await.unwrap();
    drop(world.held("a").await);
    world.locks.drain().await;
    assert_eq!(world.requests(), 6);
}

#[tokio::test(start_paused = true)]
async fn others_get_their_turn_5_ms_after_the_grant() {
    let world = world();
    let (guard, second) = granted_with_a_waiter(&world, [same; 2]).await;
    let asked = world.requests();
    world.pass(RUN - Duration::from_millis(2)).await;
    let third = ask(world.lock("a"));
    world.settle().await;
    drop(guard);
    let guard = granted(second).await;
    assert_eq!(world.requests(), asked);
    world.pass(Duration::from_millis(2)).await;
    drop(guard);
    assert!(granted(third).await.is_held());
    assert!(world.requests() > asked);
}

#[tokio::test(start_paused = true)]
async fn what_differs_is_asked_of_the_server() {
    let changes: [(&str, [Change; 2]); 6] = [
        ("ttl", [same, |request| request.ttl(TTL / 2)]),
        ("label", [same, |request| request.label("another")]),
        ("renewal", [same, |request| request.renew(Renew::Never)]),
        ("no renewal at all", [|request| request.renew(Renew::Never); 2]),
        ("owner", [same; 2]),
        ("nothing", [same; 2]),
    ];
    for (what, changes) in changes {
        let world = world();
        let (guard, waits) = granted_with_a_waiter(&world, changes).await;
        let asked = world.requests();
        // One that was asked for is shared with no other.
        let owner = (what == "owner").then(|| guard.owner());
        drop(guard);
        let next = granted(waits).await;
        assert!(next.is_held());
        assert_eq!(world.requests() == asked, what == "nothing", "{what}");
        assert_ne!(owner, Some(next.owner()));
    }
}

#[tokio::test(start_paused = true)]
async fn each_hold_has_its_own_end() {
    let world = world();
    let (guard, second) = granted_with_a_waiter(&world, [same, |request| request.max_hold(TTL * 2 / 3)]).await;
    let (ended, token) = (guard.lost(), guard.token());
    drop(guard);
    assert_eq!(ended.await, LossReason::Released);
    let guard = granted(second).await;
    assert!(guard.token() > token);
    // Its lease is renewed, although it has another guard by now.
    world.pass(TTL / 2).await;
    assert!(guard.is_held() && world.server.count(Op::Renew) > 0);
    assert!(guard.remaining() <= TTL / 6);
    assert_eq!(guard.lost().await, LossReason::MaxHold);
}

#[tokio::test(start_paused = true)]
async fn a_grant_that_is_taken_away_is_lost_to_the_hold_that_has_it_and_goes_to_no_other() {
    for (sharing, is_handed_over) in [(false, true), (true, true), (false, false)] {
        let memory = paused::memory();
        let memory = if sharing { memory.sharing_leases() } else { memory };
        let [locks, other] = [(); 2].map(|()| paused::client(memory.client()));
        let before = other.lock("a").await.unwrap();
        let [first, second, third] = [(); 3].map(|()| ask(locks.lock("a")));
        until(|| locks.stats().waiting == 3 && memory.waiters() == 1).await;
        before.release().await.unwrap();
        // The first claim was sent for one waiter, the next one for several.
        granted(first).await.release().await.unwrap();
        let guard = granted(second).await;
        let handed_over = locks.stats().handed_over;
        if is_handed_over {
            drop(guard);
            let guard = granted(third).await;
            assert_eq!(locks.stats().handed_over, handed_over + 1);
            let lost = guard.lost();
            assert!(memory.steal(guard.name()) > Some(guard.token()));
            assert_eq!(lost.await, LossReason::NotHeld);
            assert!(!guard.is_held());
            until(|| locks.stats().held == 0).await;
            assert_eq!(locks.stats().lost, 1);
        } else {
            let stolen = memory.steal(guard.name()).unwrap();
            drop(guard);
            memory.expire(&"a".parse().unwrap());
            assert!(granted(third).await.token() > stolen);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_ends_a_run() {
    let world = world();
    let (guard, waits) = granted_with_a_waiter(&world, [same; 2]).await;
    let lost = guard.lost();
    let shutdown = tokio::time::timeout(OP_TIMEOUT, world.locks.shutdown());
    shutdown.await.unwrap().unwrap();
    assert_eq!(lost.await, LossReason::Shutdown);
    drop(guard);
    fails!(waits.await.unwrap(), LockError::Closed { .. });
    assert!(!world.server.keeps("a"));
}
