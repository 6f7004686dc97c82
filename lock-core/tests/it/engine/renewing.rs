//! What is held is kept alive, and what is lost is known in time.

use std::time::Duration;

use lock_core::{LockError, LossReason, ReleaseOutcome, Renew, Stamp};

use super::scripted::{Fate, OP_TIMEOUT, Op, SECOND, TTL, World};

const BEAT: Duration = Duration::from_secs(10);

#[tokio::test(start_paused = true)]
async fn a_lock_is_renewed_at_a_third_of_its_ttl_or_a_little_sooner() {
    let world = World::new();
    let started = world.now();
    let guard = world.locks.lock("a").await.unwrap();
    world.pass(10 * TTL).await;
    assert!(guard.is_held());
    let renewals = world.server.times(Op::Renew);
    let first = renewals[0].since(started);
    assert!(first > BEAT / 3 && first <= BEAT + SECOND / 10, "{first:?}");
    for pair in renewals.windows(2) {
        let beat = pair[1].since(pair[0]);
        assert!(beat > BEAT * 4 / 5 && beat <= BEAT + SECOND / 10, "{beat:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn leases_that_were_taken_at_once_are_not_renewed_at_once_but_some_of_them_together() {
    const LEASES: usize = 1_000;
    let world = World::new();
    let mut guards = Vec::new();
    for n in 0..LEASES {
        guards.push(world.locks.lock(format!("n{n}")).await.unwrap());
    }
    world.pass(BEAT + SECOND).await;
    let mut at = world.server.times(Op::Renew);
    assert!(at.len() >= LEASES);
    at.dedup();
    // The first are due in half of a beat, about five in each millisecond: that many go together at the most.
    let together = BEAT.as_millis() as usize / 2 / (TTL.as_millis() as usize / 1000);
    assert!(at.len() <= together + 50, "{}", at.len());
    world.pass(2 * TTL - BEAT - SECOND).await;
    assert!(guards.iter().all(|guard| guard.is_held()));
    let renewals = world.server.times(Op::Renew);
    assert!(renewals.len() >= 5 * LEASES, "{}", renewals.len());
    // The most that fall into a tenth of a beat. At once they would be all of them, and evenly spread a tenth.
    let until = |start: Stamp| renewals.partition_point(|at| *at < start + BEAT / 10);
    let busiest = renewals.iter().enumerate().map(|(i, start)| until(*start) - i).max();
    assert!(busiest.unwrap() < LEASES * 2 / 5, "{busiest:?}");
}

#[tokio::test(start_paused = true)]
async fn a_lock_that_cannot_be_renewed_is_lost_before_the_server_lets_go() {
    for fate in [Fate::Fail, Fate::Hang] {
        let world = World::new();
        let guard = world.locks.lock("a").await.unwrap();
        world.server.next(Op::Renew, [fate; 1000]);
        world.server.next(Op::Release, [Fate::DeliverAfter(SECOND / 100)]);
        assert_eq!(guard.lost().await, LossReason::Expired);
        assert!(!guard.is_held());
        assert!(
            world.server.keeps("a"),
            "the loss is known while the server still keeps it"
        );
        assert_eq!(guard.release().await.unwrap(), ReleaseOutcome::AlreadyLost);
        world.pass(SECOND / 50).await;
        assert!(!world.server.keeps("a"), "and a lost lock is still released");
    }
}

#[tokio::test(start_paused = true)]
async fn a_machine_that_slept_past_the_ttl_is_told_within_a_second() {
    let world = World::new();
    let guard = world.locks.lock("a").await.unwrap();
    world.pass(SECOND).await;
    world.hand.advance(TTL);
    let woken = world.now();
    assert_eq!(guard.lost().await, LossReason::Expired);
    assert!(world.now().since(woken) <= SECOND + SECOND / 10);
}

#[tokio::test(start_paused = true)]
async fn renewing_now_moves_the_deadline_and_tells_a_loss() {
    let world = World::new();
    let guard = world.locks.lock("a").await.unwrap();
    world.pass(BEAT - SECOND).await;
    guard.renew_now().await.unwrap();
    assert!(guard.remaining() > TTL - SECOND);
    world.server.next(Op::Renew, [Fate::Fail]);
    assert!(matches!(guard.renew_now().await, Err(LockError::Unavailable { .. })));
    assert!(guard.is_held());
    world.server.take_away("a");
    assert!(matches!(guard.renew_now().await, Err(LockError::Lost { .. })));
    assert!(!guard.is_held());
}

#[tokio::test(start_paused = true)]
async fn a_server_that_is_too_far_away_for_the_ttl_is_said_to_be() {
    let world = World::new();
    let guard = world.locks.lock("a").ttl(2 * OP_TIMEOUT).await.unwrap();
    world
        .server
        .next(Op::Renew, [Fate::AnswerAfter(OP_TIMEOUT * 3 / 5); 100]);
    let error = guard.renew_now().await.unwrap_err().to_string();
    assert!(
        error.contains("a quarter of the ttl of 10s") && error.contains("raise the ttl"),
        "{error}"
    );
}

#[tokio::test(start_paused = true)]
async fn all_guards_on_a_lease_are_told_when_it_ends() {
    for reason in [LossReason::NotHeld, LossReason::Expired] {
        let world = World::with(|server| server.shares = true);
        let mut guards = Vec::new();
        for n in 0..10 {
            guards.push(world.locks.lock(format!("n{n}")).await.unwrap());
        }
        match reason {
            LossReason::NotHeld => world.server.end_shared_lease(),
            _ => world.server.next(Op::Renew, [Fate::Fail; 1000]),
        }
        for guard in &guards {
            assert_eq!(guard.lost().await, reason);
        }
        crate::until(|| world.locks.stats().held == 0).await;
        assert_eq!(world.locks.stats().lost, 10);
    }
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_two_clients_share_is_renewed_when_one_of_them_has_ended() {
    let backend: std::sync::Arc<dyn lock_core::DistributedLock> =
        std::sync::Arc::new(crate::paused::memory().sharing_leases());
    for first in [true, false] {
        let [one, other] = [(); 2].map(|()| crate::paused::client(std::sync::Arc::clone(&backend)));
        let (a, b) = (one.lock("a").await.unwrap(), other.lock("b").await.unwrap());
        let (released, kept, ended, _client) = if first { (a, b, one, other) } else { (b, a, other, one) };
        released.release().await.unwrap();
        drop(ended);
        tokio::time::sleep(3 * TTL).await;
        assert!(kept.is_held());
        backend.force_release(kept.name()).await.unwrap();
        assert_eq!(kept.lost().await, LossReason::NotHeld);
    }
}

#[tokio::test(start_paused = true)]
async fn transient_errors_do_not_lose_the_lock() {
    let world = World::new();
    let guard = world.locks.lock("a").await.unwrap();
    world
        .server
        .next(Op::Renew, [Fate::Fail, Fate::Hang, Fate::Fail, Fate::Panic]);
    world.pass(2 * TTL).await;
    assert!(guard.is_held());
    assert_eq!(world.locks.stats().renewal_errors, 4);
    assert_eq!(guard.release().await.unwrap(), ReleaseOutcome::Released);
}

#[tokio::test(start_paused = true)]
async fn one_slow_renewal_delays_no_other() {
    let world = World::new();
    let started = world.now();
    let slow = world.locks.lock("slow").ttl(TTL / 2).await.unwrap();
    world.server.next(Op::Renew, [Fate::Hang; 2]);
    let others: Vec<_> = {
        let mut others = Vec::new();
        for n in 0..100 {
            others.push(world.locks.lock(format!("n{n}")).ttl(TTL / 2).await.unwrap());
        }
        others
    };
    world.pass(TTL).await;
    assert!(others.iter().all(|guard| guard.is_held()) && slow.is_held());
    let renewals = world.server.times(Op::Renew);
    let first_hundred = renewals[99].since(started);
    assert!(first_hundred < BEAT / 2 + SECOND / 10, "{first_hundred:?}");
}

#[tokio::test(start_paused = true)]
async fn a_lock_without_renewal_ends_even_on_a_lease_that_others_keep() {
    let world = World::with(|server| server.shares = true);
    let never = world.locks.lock("never").renew(Renew::Never).await.unwrap();
    let kept = world.locks.lock("kept").await.unwrap();
    assert!(matches!(never.renew_now().await, Err(LockError::NotSupported { .. })));
    assert_eq!(never.lost().await, LossReason::Expired);
    assert_eq!(never.release().await.unwrap(), ReleaseOutcome::AlreadyLost);
    world.pass(TTL).await;
    assert!(kept.is_held());
}
