//! Observing who holds a lock.

use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::join_all;
use lock_core::{Leadership, LockError, Observation};
use tokio::time::{Instant, timeout};

use crate::engine::scripted::{Fate, OP_TIMEOUT, Op, World, ask, granted};
use crate::{paused, until};

/// Paused time within which a change is noticed.
const SOON: Duration = Duration::from_millis(1_100);

async fn next(leaders: &mut Observation) -> Result<Leadership, LockError> {
    timeout(SOON, leaders.next()).await.unwrap().unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_future_that_is_dropped_loses_no_change_and_begins_no_interval_anew() {
    let locks = paused::client(paused::memory());
    let mut leaders = locks.observe("job");
    assert_eq!(next(&mut leaders).await.unwrap(), Leadership::Vacant);
    assert!(timeout(Duration::from_millis(1), leaders.next()).await.is_err());
    let guard = locks.lock("job").await.unwrap();
    let began = Instant::now();
    let seen = loop {
        if let Ok(seen) = timeout(Duration::from_millis(50), leaders.next()).await {
            break seen.unwrap().unwrap();
        }
    };
    assert_eq!(seen.holder().unwrap().token, Some(guard.token()));
    assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn the_server_is_asked_as_often_as_is_set() {
    let locks = paused::client(paused::memory());
    for (interval, longest) in [(0, 20), (200, 210), (60_000, 60_100)] {
        let mut leaders = locks.observe("job").every(Duration::from_millis(interval));
        assert_eq!(next(&mut leaders).await.unwrap(), Leadership::Vacant);
        let guard = locks.lock("job").await.unwrap();
        let began = Instant::now();
        leaders.next().await.unwrap().unwrap();
        let took = began.elapsed().as_millis();
        assert!((u128::from(interval) / 2..=longest).contains(&took), "{took}");
        guard.release().await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn failures_are_told_and_name_the_lock() {
    let memory = paused::memory();
    let locks = paused::client(memory.client());
    // Final, so it ends the stream.
    let errors: Vec<_> = locks.observe("two\nlines").collect().await;
    assert!(matches!(&*errors, [Err(LockError::InvalidName { .. })]), "{errors:?}");
    let mut leaders = locks.observe("job");
    assert_eq!(next(&mut leaders).await.unwrap(), Leadership::Vacant);
    memory.set_reachable(false);
    let away = fails!(next(&mut leaders).await, LockError::Unavailable { .. });
    assert!(away.is_retryable() && away.name().is_some(), "{away}");
    memory.set_reachable(true);
    let guard = locks.lock("job").await.unwrap();
    assert!(next(&mut leaders).await.unwrap().holder().is_some());
    drop(guard);
    locks.shutdown().await.unwrap();
    let closed = fails!(next(&mut leaders).await, LockError::Closed { .. });
    assert!(closed.name().is_some() && leaders.next().await.is_none(), "{closed}");
}

#[tokio::test(start_paused = true)]
async fn a_hundred_observers_of_a_silent_server_are_told_within_one_limit() {
    let world = World::new();
    world.server.next(Op::Holders, [Fate::Hang; 100]);
    let began = Instant::now();
    let mut observers: Vec<_> = (0..100).map(|_| world.locks.observe("job")).collect();
    for look in join_all(observers.iter_mut().map(Observation::next)).await {
        fails!(look.unwrap(), LockError::Unavailable { .. });
    }
    assert!(began.elapsed() < OP_TIMEOUT + SOON, "{:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn holders_are_told_one_after_the_other() {
    let memory = paused::memory();
    let [locks, other] = [(); 2].map(|()| paused::client(memory.client()));
    let mut leaders = locks.scoped("shop").observe("job");
    assert_eq!(next(&mut leaders).await.unwrap(), Leadership::Vacant);
    let mut last = None;
    for _ in 0..3 {
        let guard = other.lock("shop/job").await.unwrap();
        let seen = next(&mut leaders).await.unwrap().holder().unwrap().clone();
        assert_eq!(seen.token, Some(guard.token()));
        assert!(seen.token > last);
        assert_eq!(seen.name.unwrap().as_str(), "job");
        last = seen.token;
        // From one holder to the next it is one change.
        let waiting = ask(other.lock("shop/job"));
        until(|| other.stats().waiting > 0).await;
        guard.release().await.unwrap();
        let guard = granted(waiting).await;
        // What the server shows is the last token of a block.
        assert!(next(&mut leaders).await.unwrap().holder().unwrap().token >= Some(guard.token()));
        guard.release().await.unwrap();
        assert_eq!(next(&mut leaders).await.unwrap(), Leadership::Vacant);
    }
}
