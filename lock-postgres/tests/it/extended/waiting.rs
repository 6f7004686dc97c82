//! What many waiters and long waits cost.

use std::time::{Duration, Instant};

use lock_core::{DistributedLock, LockGuard, Locks, Options};
use tokio::task::JoinHandle;

use crate::server::{Database, HANG_LIMIT, Server, claim, granted, waited};
use crate::waiting::{NAMES, TTL, many_names_are_waited_for};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_on_our_tables_loses_none_of_a_thousand_held_locks() {
    const TTL: Duration = Duration::from_secs(10);
    let server = Database::new().await;
    let locks = Locks::with_options(server.client().await, Options::new().ttl(TTL));
    let mut guards = Vec::new();
    for i in 0..1000 {
        guards.push(locks.lock(format!("n {i}")).await.unwrap());
    }
    let mut plain = server.plain().await;
    let tx = plain.transaction().await.unwrap();
    tx.batch_execute("LOCK TABLE fencelock.counter, fencelock.era IN ACCESS EXCLUSIVE MODE")
        .await
        .unwrap();
    // A sequence cannot be locked by itself, but altered.
    tx.batch_execute("ALTER SEQUENCE fencelock.token OWNED BY NONE")
        .await
        .unwrap();
    let start = Instant::now();
    let mut failed = 0;
    while start.elapsed() < TTL * 3 / 2 {
        let more = (0..10).map(|i| tokio::spawn(locks.lock(format!("more {i}")).no_wait().into_future()));
        for attempt in more.collect::<Vec<_>>() {
            failed += usize::from(attempt.await.unwrap().is_err());
        }
    }
    let held = guards.iter().filter(|guard| guard.is_held()).count();
    println!("{held} of 1000 locks are held, and {failed} attempts failed");
    assert_eq!(held, 1000);
    assert!(failed > 0, "our tables were not locked");
    tx.rollback().await.unwrap();
    assert!(guards.iter().all(LockGuard::is_held));
    locks
        .lock("more 0")
        .wait_for(HANG_LIMIT)
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
    // What failed after the lock was taken let go of it.
    drop(guards);
    server.until_locks(0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiting_writes_no_line_into_the_log() {
    let server = Database::new().await;
    let holder = server.client().await;
    let clients: Vec<_> = (0..5).map(|_| server.config().connect_lazy().unwrap()).collect();
    let before = server.log().lines().count();
    let mine = claim("a", TTL);
    granted(&holder, &mine).await;
    let waiters: Vec<_> = clients
        .into_iter()
        .map(|lock| {
            tokio::spawn(async move {
                let locks = Locks::with_options(lock, Options::new().ttl(Duration::from_millis(500)));
                // A wait that ends without the lock, too.
                assert!(locks.lock("a").wait_for(Duration::from_millis(300)).await.is_err());
                let guard = locks.lock("a").wait_for(HANG_LIMIT).await.unwrap();
                // On a busy machine so short a ttl may be over.
                let _ = guard.release().await;
            })
        })
        .collect();
    server.until_waiting("a", 5).await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    holder.release(&mine, None).await.unwrap();
    for waiter in waiters {
        waiter.await.unwrap();
    }
    let log = server.log();
    let lines: Vec<_> = log.lines().skip(before).collect();
    assert!(lines.is_empty(), "{lines:#?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_wakes_a_waiter_long_before_it_looks_by_itself() {
    let server = Database::new().await;
    let (one, two) = (server.client().await, server.client().await);
    let mut times = Vec::new();
    for _ in 0..20 {
        let mine = claim("a", TTL);
        granted(&one, &mine).await;
        let other = two.clone();
        let waiting = tokio::spawn(async move { (waited(&other, &claim("a", TTL)).await, Instant::now()) });
        server.until_waiting("a", 1).await;
        // Far into the time between two looks.
        tokio::time::sleep(Duration::from_millis(150)).await;
        let released = Instant::now();
        one.release(&mine, None).await.unwrap();
        let (grant, then) = waiting.await.unwrap();
        times.push(then - released);
        two.release(&grant.claim, None).await.unwrap();
        server.until_locks(0).await;
    }
    times.sort_unstable();
    println!("handed over within {:?}, at most {:?}", times[10], times[19]);
    // By itself it looks every half a second.
    assert!(times[10] < Duration::from_millis(200), "{times:?}");
}

/// Statements of clients for each hand-over, while so many wait.
async fn requests_per_hand_over(waiters: usize) -> f64 {
    const ROUNDS: usize = 20;
    let server = Server::with(&["log_statement=all", "max_connections=200"]);
    let mut tasks = Vec::new();
    let first = server.client().await;
    let mine = claim("a", TTL);
    granted(&first, &mine).await;
    for _ in 0..waiters {
        let lock = server.client().await;
        tasks.push(tokio::spawn(async move {
            let theirs = claim("a", TTL);
            waited(&lock, &theirs).await;
            (lock, theirs)
        }));
    }
    server.until_waiting("a", i64::try_from(waiters).unwrap()).await;
    let attempts = || server.log().matches("THEN -1 WHEN pg_try_advisory_lock(").count();
    let start = Instant::now();
    let before = attempts();
    let (mut lock, mut held) = (first, mine);
    for _ in 0..ROUNDS {
        lock.release(&held, None).await.unwrap();
        (lock, held) = first_of(&mut tasks).await;
    }
    let looks = start.elapsed().as_secs_f64() * 2.0 * waiters as f64;
    let all = (attempts() - before) as f64;
    println!(
        "{waiters} waiters: {:.1} attempts for each hand-over, {:.1} of them by the clock",
        all / ROUNDS as f64,
        looks / ROUNDS as f64
    );
    for task in tasks {
        task.abort();
    }
    (all - looks).max(0.0) / ROUNDS as f64
}

/// The outcome of the first of them that ends.
async fn first_of<T>(tasks: &mut Vec<JoinHandle<T>>) -> T {
    loop {
        if let Some(at) = tasks.iter().position(JoinHandle::is_finished) {
            return tasks.swap_remove(at).await.unwrap();
        }
        tokio::time::sleep(Duration::from_micros(200)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hand_over_wakes_a_few_however_many_wait() {
    let (few, many) = (requests_per_hand_over(25).await, requests_per_hand_over(100).await);
    println!("{few:.1} beside 25 waiters and {many:.1} beside 100");
    assert!(many < 25.0, "{many:.1}");
}

/// An attempt with another ttl than the last one opens one more connection if none is free soon: the more of them, the slower the
/// machine.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_names_are_waited_for_with_many_ttls_on_few_connections() {
    many_names_are_waited_for(Duration::from_secs(7), usize::try_from(NAMES).unwrap() / 2).await;
}
