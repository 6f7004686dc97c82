//! Locks that end with a transaction of the user's own.

#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a test may fail")]

mod server;

use std::time::Duration;

use lock_core::{DistributedLock, LockError};
use lock_postgres::tokio_postgres::Transaction;
use rustix::process::Signal;
use server::{PATIENCE, Server, claim, granted, is_busy, name};

const TTL: Duration = Duration::from_secs(20);
const WAIT: Option<Duration> = Some(Duration::from_millis(100));

async fn setting(tx: &Transaction<'_>, name: &str) -> String {
    tx.query_one(&format!("SHOW {name}"), &[]).await.unwrap().get(0)
}

#[tokio::test]
async fn a_lock_in_a_transaction_excludes_and_ends_with_it() {
    let server = Server::start();
    let lock = server.client().await;
    let mut plain = server.plain().await;
    let before = granted(&lock, &claim("b", TTL)).await.token;
    let mut tx = plain.transaction().await.unwrap();
    let token = lock.in_transaction(&mut tx, &name("a"), WAIT).await.unwrap();
    assert!(token > before);
    assert!(is_busy(&lock, &claim("a", TTL)).await);
    tx.commit().await.unwrap();
    let next = granted(&lock, &claim("a", TTL)).await;
    assert!(next.token > token);
}

#[tokio::test]
async fn a_timeout_leaves_the_transaction_usable_and_no_setting_changed() {
    let server = Server::start();
    let lock = server.client().await;
    let mut plain = server.plain().await;
    let held = claim("a", TTL);
    granted(&lock, &held).await;
    plain
        .batch_execute("CREATE TABLE stock (amount integer); SET lock_timeout = '7s'")
        .await
        .unwrap();
    let mut tx = plain.transaction().await.unwrap();
    tx.execute("INSERT INTO stock VALUES (1)", &[]).await.unwrap();
    for wait in [WAIT, Some(Duration::ZERO)] {
        let error = lock.in_transaction(&mut tx, &name("a"), wait).await.unwrap_err();
        assert!(matches!(error, LockError::TimedOut { .. }), "{error}");
        assert_eq!(setting(&tx, "lock_timeout").await, "7s");
    }
    lock.release(&held).await.unwrap();
    lock.in_transaction(&mut tx, &name("a"), WAIT).await.unwrap();
    assert_eq!(setting(&tx, "lock_timeout").await, "7s");
    tx.execute("UPDATE stock SET amount = 2", &[]).await.unwrap();
    tx.commit().await.unwrap();
    let amount: i32 = server.value("SELECT amount FROM stock").await;
    assert_eq!(amount, 2);
}

#[tokio::test]
async fn a_transaction_is_the_first_to_draw_after_a_crash_and_its_token_is_higher() {
    let mut server = Server::start();
    let lock = server.client().await;
    let before = granted(&lock, &claim("a", TTL)).await.token;
    server.restart(Signal::KILL);
    let mut plain = server.plain().await;
    let mut tx = plain.transaction().await.unwrap();
    // Nobody has put the counter right: the statement by itself draws nothing.
    let drawn = tx.query_one(&lock.transaction_sql().token, &[]).await.unwrap();
    assert_eq!(drawn.get::<_, Option<i64>>(0), None);
    let mut token = lock.in_transaction(&mut tx, &name("a"), WAIT).await;
    // The client may learn only now that its session has gone.
    if token.as_ref().is_err_and(LockError::is_retryable) {
        token = lock.in_transaction(&mut tx, &name("a"), WAIT).await;
    }
    assert!(token.unwrap() > before);
}

#[tokio::test]
async fn two_transactions_that_wait_for_each_other_are_told() {
    let server = Server::start();
    let lock = server.client().await;
    let (mut one, mut two) = (server.plain().await, server.plain().await);
    let (mut first, mut second) = (one.transaction().await.unwrap(), two.transaction().await.unwrap());
    lock.in_transaction(&mut first, &name("a"), None).await.unwrap();
    lock.in_transaction(&mut second, &name("b"), None).await.unwrap();
    let (b, a) = (name("b"), name("a"));
    let crossing = async {
        tokio::join!(
            async {
                let outcome = lock.in_transaction(&mut first, &b, None).await;
                first.rollback().await.unwrap();
                outcome
            },
            async {
                let outcome = lock.in_transaction(&mut second, &a, None).await;
                second.rollback().await.unwrap();
                outcome
            }
        )
    };
    let (one, two) = tokio::time::timeout(PATIENCE, crossing).await.unwrap();
    let deadlocks = [&one, &two]
        .into_iter()
        .filter(|o| matches!(o, Err(LockError::Deadlock { .. })))
        .count();
    assert_eq!(deadlocks, 1, "{one:?} {two:?}");
}
