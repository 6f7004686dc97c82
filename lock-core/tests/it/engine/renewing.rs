//! What is held is kept alive, and what is lost is known in time.

use std::sync::Arc;
use std::time::Duration;

use lock_core::{DistributedLock, LockError, LossReason, ReleaseOutcome, Renew, Stamp};

use super::scripted::{Fate, OP_TIMEOUT, Op, SECOND, TTL, World};
use crate::{paused, until};

const BEAT: Duration = Duration::from_secs(10);

fn sharing() -> World {
    World::with(|kind| kind.shares = true)
}

#[tokio::test(start_paused = true)]
async fn a_lock_is_renewed_at_a_third_of_its_ttl_or_a_little_sooner() {
    let world = World::new();
    let started = world.now();
    let guard = world.held("a").await;
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
    let guards = world.held_by_number(LEASES).await;
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
        let guard = world.held("a").await;
        world.server.next(Op::Renew, [fate; 1_000]);
        world.server.next(Op::Release, [Fate::DeliverAfter(SECOND / 100)]);
        assert_eq!(guard.lost().await, LossReason::Expired);
        assert!(!guard.is_held() && world.server.keeps("a"), "it is known before");
        assert_eq!(guard.release().await.unwrap(), ReleaseOutcome::AlreadyLost);
        world.pass(SECOND / 50).await;
        assert!(!world.server.keeps("a"), "and a lost lock is still released");
    }
}

#[tokio::test(start_paused = true)]
async fn failures_that_pass_lose_no_lock_and_a_slow_renewal_delays_no_other() {
    let world = World::new();
    let guard = world.held("a").await;
    let fates = [Fate::Fail, Fate::Hang, Fate::Fail, Fate::Panic];
    world.server.next(Op::Renew, fates);
    world.pass(2 * TTL).await;
    assert!(guard.is_held() && world.locks.stats().renewal_errors == 4);
    assert_eq!(guard.release().await.unwrap(), ReleaseOutcome::Released);

    let world = World::new();
    let started = world.now();
    world.server.next(Op::Renew, [Fate::Hang; 2]);
    let mut guards = Vec::new();
    for n in 0..=100 {
        guards.push(world.lock(&format!("n{n}")).ttl(TTL / 2).await.unwrap());
    }
    world.pass(TTL).await;
    assert!(guards.iter().all(|guard| guard.is_held()));
    let first_hundred = world.server.times(Op::Renew)[99].since(started);
    assert!(first_hundred < BEAT / 2 + SECOND / 10, "{first_hundred:?}");
}

#[tokio::test(start_paused = true)]
async fn renewing_now_moves_the_deadline_and_tells_what_is_wrong() {
    let world = World::new();
    let guard = world.held("a").await;
    world.pass(BEAT - SECOND).await;
    guard.renew_now().await.unwrap();
    assert!(guard.remaining() > TTL - SECOND);
    world.server.next(Op::Renew, [Fate::Fail]);
    fails!(guard.renew_now().await, LockError::Unavailable { .. });
    assert!(guard.is_held());
    world.server.take_away("a");
    fails!(guard.renew_now().await, LockError::Lost { .. });
    assert!(!guard.is_held());
    // A server that is too far away for the ttl.
    let guard = world.lock("b").ttl(2 * OP_TIMEOUT).await.unwrap();
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
        let world = sharing();
        let guards = world.held_by_number(10).await;
        match reason {
            LossReason::NotHeld => world.server.end_leases(),
            _ => world.server.next(Op::Renew, [Fate::Fail; 1_000]),
        }
        for guard in &guards {
            assert_eq!(guard.lost().await, reason);
        }
        until(|| world.locks.stats().held == 0).await;
        assert_eq!(world.locks.stats().lost, 10);
    }
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_two_clients_share_is_renewed_when_one_of_them_has_ended() {
    let backend: Arc<dyn DistributedLock> = Arc::new(paused::memory().sharing_leases());
    for first in [true, false] {
        let [one, other] = [(); 2].map(|()| paused::client(Arc::clone(&backend)));
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
async fn a_lock_without_renewal_ends_even_on_a_lease_that_others_keep() {
    let world = sharing();
    let never = world.lock("never").renew(Renew::Never).await.unwrap();
    let kept = world.held("kept").await;
    fails!(never.renew_now().await, LockError::NotSupported { .. });
    let lost = tokio::time::timeout(2 * TTL, never.lost().wait()).await;
    assert_eq!(lost.expect("it ends"), LossReason::Expired);
    assert_eq!(never.release().await.unwrap(), ReleaseOutcome::AlreadyLost);
    world.pass(TTL).await;
    assert!(kept.is_held());
}
