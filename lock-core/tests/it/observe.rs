//! Observing who holds a lock, on the backend in memory.

use std::future::IntoFuture;
use std::time::Duration;

use futures_util::StreamExt;
use lock_core::{Leadership, LockError, Observation};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use crate::engine::scripted::{Fate, OP_TIMEOUT, Op, World};
use crate::{paused, until};

/// Paused time within which a change is noticed.
const SOON: Duration = Duration::from_millis(1_100);

async fn next(leaders: &mut Observation) -> Leadership {
    timeout(SOON, leaders.next()).await.unwrap().unwrap().unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_future_that_is_dropped_loses_no_change_and_begins_no_interval_anew() {
    let locks = paused::client(paused::memory());
    let mut leaders = locks.observe("job");
    assert_eq!(next(&mut leaders).await, Leadership::Vacant);
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
    for (interval, longest) in [
        (Duration::ZERO, 20),
        (Duration::from_millis(200), 210),
        (Duration::from_secs(60), 60_100),
    ] {
        let mut leaders = locks.observe("job").every(interval);
        assert_eq!(leaders.next().await.unwrap().unwrap(), Leadership::Vacant);
        let guard = locks.lock("job").await.unwrap();
        let began = Instant::now();
        leaders.next().await.unwrap().unwrap();
        let took = began.elapsed();
        assert!(
            took <= Duration::from_millis(longest) && took >= interval / 2,
            "{took:?}"
        );
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
    assert_eq!(next(&mut leaders).await, Leadership::Vacant);
    memory.set_reachable(false);
    let away = timeout(SOON, leaders.next()).await.unwrap().unwrap().unwrap_err();
    assert!(away.is_retryable() && away.name().is_some(), "{away}");
    memory.set_reachable(true);
    let guard = locks.lock("job").await.unwrap();
    assert!(next(&mut leaders).await.holder().is_some());
    drop(guard);
    locks.shutdown().await.unwrap();
    let closed = timeout(SOON, leaders.next()).await.unwrap().unwrap().unwrap_err();
    assert!(
        matches!(closed, LockError::Closed { .. }) && closed.name().is_some(),
        "{closed}"
    );
    assert!(leaders.next().await.is_none());
}

#[tokio::test(start_paused = true)]
async fn a_hundred_observers_of_a_silent_server_are_told_within_one_limit() {
    let world = World::new();
    world.server.next(Op::Holders, [Fate::Hang; 100]);
    let began = Instant::now();
    let mut looks = JoinSet::new();
    for _ in 0..100 {
        let mut leaders = world.locks.observe("job");
        looks.spawn(async move { leaders.next().await });
    }
    while let Some(look) = looks.join_next().await {
        let error = look.unwrap().unwrap().unwrap_err();
        assert!(matches!(error, LockError::Unavailable { .. }), "{error}");
    }
    assert!(began.elapsed() < OP_TIMEOUT + SOON, "{:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn holders_are_told_one_after_the_other() {
    let memory = paused::memory();
    let (locks, other) = (
        paused::client(memory.client()).scoped("shop"),
        paused::client(memory.client()),
    );
    let mut leaders = locks.observe("job");
    assert_eq!(next(&mut leaders).await, Leadership::Vacant);
    let mut last = None;
    for _ in 0..3 {
        let guard = other.lock("shop/job").await.unwrap();
        let Leadership::Held(seen) = next(&mut leaders).await else {
            panic!("the new holder is seen")
        };
        assert_eq!(seen.token, Some(guard.token()));
        assert!(seen.token > last);
        assert_eq!(seen.name.unwrap().as_str(), "job");
        last = seen.token;
        // From one holder to the next it is one change.
        let waiting = tokio::spawn(other.lock("shop/job").into_future());
        until(|| other.stats().waiting > 0).await;
        guard.release().await.unwrap();
        let guard = waiting.await.unwrap().unwrap();
        // What the server shows is the last token of a block.
        assert!(next(&mut leaders).await.holder().unwrap().token >= Some(guard.token()));
        guard.release().await.unwrap();
        assert_eq!(next(&mut leaders).await, Leadership::Vacant);
    }
}
