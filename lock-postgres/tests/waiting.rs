//! Waiting: few connections, and nobody else is held up.

#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a test may fail")]

mod server;

use std::time::{Duration, Instant};

use lock_core::{DistributedLock, LockGuard, Locks, Options};
use server::{PATIENCE, Server, claim, granted, soon};

const TTL: Duration = Duration::from_secs(20);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hundred_waiters_of_one_process_use_two_connections_beyond_the_holders() {
    let server = Server::start();
    let holder = server.client().await;
    let mine = claim("a", TTL);
    granted(&holder, &mine).await;
    let locks = Locks::with_options(server.client().await, Options::new().ttl(TTL));
    let before = server.sessions().await.len();
    let waiters: Vec<_> = (0..100)
        .map(|_| tokio::spawn(locks.lock("a").wait_for(PATIENCE).with(async |_guard| ())))
        .collect();
    server.until_locks(2, PATIENCE).await;
    let mut most = 0;
    for _ in 0..20 {
        // Without the one that it has had from the start.
        most = most.max(server.sessions().await.len() - before + 1);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    holder.release(&mine).await.unwrap();
    for waiter in waiters {
        waiter.await.unwrap().unwrap();
    }
    println!("100 waiters used {most} connections");
    assert!(most <= 2, "{most} connections");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_index_is_made_while_others_wait_for_minutes() {
    let server = Server::start();
    let (holder, other) = (server.client().await, server.client().await);
    granted(&holder, &claim("a", TTL)).await;
    let waiting = tokio::spawn(async move { other.acquire(&claim("a", TTL), soon()).await });
    server.until_locks(2, PATIENCE).await;
    server.run_sql("CREATE TABLE stock (id integer)").await;
    let start = Instant::now();
    let index = "CREATE INDEX CONCURRENTLY ON stock (id)";
    tokio::time::timeout(PATIENCE / 3, server.run_sql(index)).await.unwrap();
    println!("the index took {:?}", start.elapsed());
    assert!(!waiting.is_finished());
    waiting.abort();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_on_our_tables_loses_none_of_a_thousand_held_locks() {
    const TTL: Duration = Duration::from_secs(3);
    let server = Server::start();
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
    while start.elapsed() < Duration::from_secs(5) {
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
        .wait_for(PATIENCE)
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
    // What failed after the lock was taken let go of it.
    drop(guards);
    server.until_locks(0, PATIENCE).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_that_is_killed_leaves_the_queue_by_itself() {
    let server = Server::start();
    let proxy = server::proxy::Proxy::to(server.port()).await;
    let holder = server.client().await;
    let mine = claim("a", TTL);
    granted(&holder, &mine).await;
    let config = lock_postgres::PostgresConfig::new(server.login_at(proxy.port())).tls(lock_postgres::Tls::Disable);
    let other = config.connect().await.unwrap();
    let waiting = tokio::spawn(async move { other.acquire(&claim("a", TTL), soon()).await });
    server.until_locks(2, PATIENCE).await;
    proxy.cut();
    let left = server.until_locks(1, Duration::from_secs(5)).await;
    println!("a dead waiter left after {left:?}");
    waiting.abort();
    holder.release(&mine).await.unwrap();
}
