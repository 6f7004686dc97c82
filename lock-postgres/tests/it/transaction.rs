//! Locks that end with a transaction of the user's own.

use std::time::Duration;

use lock_core::{DistributedLock, LockError};
use lock_postgres::PostgresLock;
use lock_postgres::tokio_postgres::{IsolationLevel, Transaction};
use rustix::process::Signal;

use crate::server::{Database, HANG_LIMIT, Server, claim, granted, in_time, is_busy, name};

const TTL: Duration = Duration::from_secs(30);
/// For a wait that ends without the lock.
const SHORT: Option<Duration> = Some(Duration::from_millis(100));
/// For a lock that is free.
const WAIT: Option<Duration> = Some(HANG_LIMIT);

async fn setting(tx: &Transaction<'_>, name: &str) -> String {
    tx.query_one(&format!("SHOW {name}"), &[]).await.unwrap().get(0)
}

#[tokio::test]
async fn a_lock_in_a_transaction_excludes_and_ends_with_it() {
    let server = Database::new().await;
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
    let server = Database::new().await;
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
    for wait in [SHORT, Some(Duration::ZERO)] {
        let error = lock.in_transaction(&mut tx, &name("a"), wait).await.unwrap_err();
        assert!(matches!(error, LockError::TimedOut { .. }), "{error}");
        assert_eq!(setting(&tx, "lock_timeout").await, "7s");
    }
    lock.release(&held, None).await.unwrap();
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
    let server = Database::new().await;
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
    let (one, two) = in_time(crossing).await;
    let deadlocks = [&one, &two]
        .into_iter()
        .filter(|o| matches!(o, Err(LockError::Deadlock { .. })))
        .count();
    assert_eq!(deadlocks, 1, "{one:?} {two:?}");
}

/// Two transactions under the lock, each of which counts the rows and adds one with what it counted. How many rows there are
/// and how many different counts, with whatever errors there were.
async fn two_count(server: &Database, lock: &PostgresLock, level: IsolationLevel) -> (i64, Vec<String>) {
    server
        .run_sql("DROP TABLE IF EXISTS sold; CREATE TABLE sold (number bigint NOT NULL)")
        .await;
    let (mut one, mut two) = (server.plain().await, server.plain().await);
    let mut first = one.build_transaction().isolation_level(level).start().await.unwrap();
    let mut second = two.build_transaction().isolation_level(level).start().await.unwrap();
    let sell = "INSERT INTO sold SELECT count(*) FROM sold";
    let mut errors = Vec::new();
    let name = name("a");
    match lock.in_transaction(&mut first, &name, None).await {
        Ok(_) => {}
        Err(error) => {
            assert!(matches!(error, LockError::Configuration { .. }), "{error}");
            return (0, vec![format!("{error:#}")]);
        }
    }
    let theirs = async {
        lock.in_transaction(&mut second, &name, None).await.unwrap();
        second.execute(sell, &[]).await?;
        second.commit().await
    };
    let mine = async {
        server.until_locks(2).await;
        first.execute(sell, &[]).await?;
        first.commit().await
    };
    let (theirs, mine) = in_time(async { tokio::join!(theirs, mine) }).await;
    for outcome in [mine, theirs] {
        if let Err(error) = outcome {
            errors.push(error.code().unwrap().code().to_owned());
        }
    }
    let repeated: i64 = server.value("SELECT count(*) - count(DISTINCT number) FROM sold").await;
    (repeated, errors)
}

#[tokio::test]
async fn a_transaction_sees_what_the_last_holder_wrote_or_fails() {
    let server = Database::new().await;
    let lock = server.client().await;
    let counted = two_count(&server, &lock, IsolationLevel::ReadCommitted).await;
    assert_eq!(counted, (0, vec![]));
    let (repeated, errors) = two_count(&server, &lock, IsolationLevel::Serializable).await;
    assert_eq!((repeated, &*errors), (0, &["40001".to_owned()][..]));
    let (repeated, errors) = two_count(&server, &lock, IsolationLevel::RepeatableRead).await;
    assert_eq!(repeated, 0, "an update was lost");
    assert!(errors[0].contains("READ COMMITTED"), "{errors:?}");
    assert_eq!(server.locks().await, 0);
}

#[tokio::test]
async fn a_savepoint_that_is_rolled_back_takes_the_lock_with_it_only_if_it_is_older() {
    let server = Database::new().await;
    let lock = server.client().await;
    let mut plain = server.plain().await;
    let mut tx = plain.transaction().await.unwrap();
    lock.in_transaction(&mut tx, &name("a"), WAIT).await.unwrap();
    let younger = tx.savepoint("younger").await.unwrap();
    younger.rollback().await.unwrap();
    assert!(is_busy(&lock, &claim("a", TTL)).await);
    let mut older = tx.savepoint("older").await.unwrap();
    lock.in_transaction(&mut older, &name("b"), WAIT).await.unwrap();
    assert!(is_busy(&lock, &claim("b", TTL)).await);
    older.rollback().await.unwrap();
    granted(&lock, &claim("b", TTL)).await;
    assert!(is_busy(&lock, &claim("a", TTL)).await);
}

#[tokio::test]
async fn a_prepared_transaction_is_shown_with_its_name_and_is_not_ended() {
    let server = Database::new().await;
    let lock = server.client().await;
    let plain = server.plain().await;
    let key = lock.key(&name("a"));
    let prepare = format!("BEGIN; SELECT pg_advisory_xact_lock({key}); PREPARE TRANSACTION 'order 7'");
    plain.batch_execute(&prepare).await.unwrap();
    assert!(is_busy(&lock, &claim("a", TTL)).await);
    let holder = lock.holders(&name("a")).await.unwrap().pop().expect("it is held");
    assert_eq!(holder.label.as_deref(), Some("prepared transaction order 7"));
    // Whose key it is, the server cannot tell.
    assert_eq!(lock.list("").await.unwrap(), []);
    let error = lock.force_release(&name("a")).await.unwrap_err();
    assert!(format!("{error:#}").contains("ROLLBACK PREPARED 'order 7'"), "{error}");
    assert!(is_busy(&lock, &claim("a", TTL)).await);
    plain.batch_execute("ROLLBACK PREPARED 'order 7'").await.unwrap();
    assert_eq!(lock.holders(&name("a")).await.unwrap().pop(), None);
    granted(&lock, &claim("a", TTL)).await;
}

#[tokio::test]
async fn a_shared_lock_of_another_program_is_shown_as_what_keeps_the_name() {
    let server = Database::new().await;
    let lock = server.client().await;
    let plain = server.plain().await;
    let key = lock.key(&name("a"));
    plain
        .batch_execute(&format!(
            "SET application_name = 'reports'; SELECT pg_advisory_lock_shared({key})"
        ))
        .await
        .unwrap();
    assert!(is_busy(&lock, &claim("a", TTL)).await);
    let holder = lock.holders(&name("a")).await.unwrap().pop().expect("it is held");
    let label = holder.label.unwrap();
    assert!(label.contains("reports") && label.contains("shared"), "{label}");
}
