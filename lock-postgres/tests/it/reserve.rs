//! Names that stay taken for a time: what only this backend has to show of them.

use std::time::Duration;

use lock_core::{Attempt, Claim, DistributedLock, Released, Renewal};
use lock_postgres::{PostgresConfig, PostgresLock, Tls, schema_sql};
use rustix::process::Signal;

use crate::bad_input::{is_configuration, refusal};
use crate::server::proxy::Proxy;
use crate::server::{self, Database, HANG_LIMIT, Server, claim, granted, in_time, name, until};

pub(crate) const TTL: Duration = Duration::from_secs(30);

/// Longer than any of these tests.
pub(crate) const LONG: Duration = Duration::from_secs(600);

/// What there is of reservations, whether or not they are over.
const ROWS: &str = "SELECT count(*) FROM fencelock.reservation";

pub(crate) fn reserving(name: &str, length: Duration) -> Claim {
    claim(name, TTL).with_at_least(length)
}

/// Takes the name and reserves it.
pub(crate) async fn reserved(lock: &PostgresLock, name: &str, length: Duration) -> Claim {
    let claim = reserving(name, length);
    granted(lock, &claim).await;
    assert_eq!(lock.reserve(&claim, length).await.unwrap(), Renewal::Renewed);
    claim
}

/// How long the name stays taken according to the answer.
pub(crate) async fn taken_for(lock: &PostgresLock, name: &str) -> Duration {
    match lock.try_acquire(&claim(name, TTL)).await.unwrap() {
        Attempt::Busy(busy) => busy.retry_after.expect("it tells how long"),
        other => panic!("the name is reserved; it said {other:?}"),
    }
}

pub(crate) async fn is_free(lock: &PostgresLock, name: &str) -> bool {
    let claim = claim(name, TTL);
    let free = matches!(lock.try_acquire(&claim).await.unwrap(), Attempt::Granted(_));
    lock.release(&claim, None).await.unwrap();
    free
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_name_stays_taken_across_a_crash_of_the_server() {
    stays_taken_across(&[Signal::KILL]).await;
}

/// Names stay taken while the server is ended with each of these signals.
pub(crate) async fn stays_taken_across(signals: &[Signal]) {
    let mut server = Server::start();
    for &signal in signals {
        let lock = server.client().await;
        let given_up = reserved(&lock, "given up", LONG).await;
        assert_eq!(lock.release(&given_up, None).await.unwrap(), Released::Released);
        let released = reserved(&lock, "released", LONG).await;
        assert_eq!(lock.release(&released, Some(LONG)).await.unwrap(), Released::Released);
        // Last: a later one would make it durable, too.
        let held = reserved(&lock, "held", LONG).await;
        server.restart(signal);
        let other = server.client().await;
        for name in ["held", "released"] {
            let left = taken_for(&other, name).await;
            assert!(left > LONG - HANG_LIMIT && left <= LONG, "{signal:?}: {left:?}");
        }
        assert!(is_free(&other, "given up").await, "{signal:?}");
        // The hold went with the server.
        assert_eq!(lock.reserve(&held, LONG).await.unwrap(), Renewal::NotHeld);
        for name in ["held", "released"] {
            let ended = other.force_release(&server::name(name)).await.unwrap();
            assert!(ended[0].is_reserved);
            assert!(is_free(&other, name).await, "{signal:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_arrives_after_the_release_of_its_claim_reserves_nothing() {
    let server = Database::with_statements_logged().await;
    let other = server.client().await;
    // The first session goes through the proxy, the next one past it.
    let proxy = Proxy::to(server.port()).await;
    let mut login = server.login_at(proxy.port());
    login.host("127.0.0.1").port(server.port());
    let config = PostgresConfig::new(login).tls(Tls::Disable);
    let lock = config.op_timeout(Duration::from_secs(12)).connect().await.unwrap();
    let claim = reserving("late", LONG);
    granted(&lock, &claim).await;

    // The request stays on its way, and its session is lost.
    proxy.hold_requests_after(0);
    let reserving = {
        let (lock, claim) = (lock.clone(), claim.clone());
        tokio::spawn(async move { lock.reserve(&claim, LONG).await })
    };
    until("the request waits", async || proxy.waits()).await;
    proxy.take_no_more();
    proxy.hang_up();
    let lost = in_time(reserving).await.unwrap().unwrap_err();
    assert!(lost.is_retryable(), "{lost}");
    // The server still has the session.
    assert_eq!(server.locks().await, 1);
    in_time(async {
        while let Err(error) = lock.release(&claim, None).await {
            assert!(error.is_retryable(), "{error}");
        }
    })
    .await;
    assert_eq!(server.locks().await, 0);
    proxy.pass();
    assert!(is_free(&other, "late").await);
    assert_eq!(server.value::<i64>(ROWS).await, 0);
    assert!(!server.log().contains("INSERT INTO \"fencelock\".reservation"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reservations_that_are_over_are_deleted_by_later_ones() {
    const MANY: usize = 40;
    let server = Server::start();
    let lock = server.client().await;
    let brief = Duration::from_millis(1);
    for number in 0..MANY {
        let claim = reserved(&lock, &format!("n {number}"), brief).await;
        lock.release(&claim, Some(brief)).await.unwrap();
    }
    let left: i64 = server.value(ROWS).await;
    assert!(left <= 5, "{left} rows");
    // Beside those that last.
    for number in 0..MANY {
        let length = if number % 2 == 0 { LONG } else { brief };
        let claim = reserved(&lock, &format!("m {number}"), length).await;
        lock.release(&claim, Some(length)).await.unwrap();
    }
    let left: i64 = server.value(ROWS).await;
    assert!(left <= MANY as i64 / 2 + 5, "{left} rows");
    assert_eq!(lock.list("m ").await.unwrap().len(), MANY / 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locking_and_releasing_are_one_message_each_beside_reservations_too() {
    const PAIRS: usize = 50;
    let server = Database::with_statements_logged().await;
    let (lock, other) = (server.client().await, server.client().await);
    let pair = async || {
        let claim = claim("a", TTL);
        granted(&lock, &claim).await;
        lock.release(&claim, None).await.unwrap();
    };
    for is_reserved in [false, true] {
        if is_reserved {
            reserved(&other, "reserved", LONG).await;
        }
        // The first one finds out.
        pair().await;
        let messages = || server.log().matches("statement: ").count();
        let before = messages();
        for _ in 0..PAIRS {
            pair().await;
        }
        assert_eq!(messages() - before, 2 * PAIRS, "reserved: {is_reserved}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_role_that_cannot_see_reservations_is_refused() {
    let server = Database::new().await;
    let schema = schema_sql("fencelock", Some("unseeing")).unwrap();
    server.run_sql(&format!("CREATE ROLE unseeing LOGIN; {schema}")).await;
    for right in ["SEQUENCE fencelock.reserved_until", "fencelock.reservation"] {
        server.run_sql(&format!("REVOKE ALL ON {right} FROM unseeing")).await;
        is_configuration(
            &refusal(server.config_as("unseeing")).await,
            "fencelock schema postgres",
        );
        server.run_sql(&schema).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transaction_is_not_granted_a_reserved_name_whatever_it_sees() {
    let server = Database::new().await;
    let (lock, other) = (server.client().await, server.client().await);
    let mut plain = server.plain().await;
    for level in ["READ COMMITTED", "SERIALIZABLE"] {
        let mut tx = plain.transaction().await.unwrap();
        // What it sees is of this moment, if it is serializable.
        tx.batch_execute(&format!(
            "SET TRANSACTION ISOLATION LEVEL {level}; SELECT FROM fencelock.reservation"
        ))
        .await
        .unwrap();
        let claim = reserved(&other, "a", LONG).await;
        other.release(&claim, Some(LONG)).await.unwrap();
        for wait in [Duration::ZERO, Duration::from_millis(50)] {
            let error = lock.in_transaction(&mut tx, &name("a"), Some(wait)).await.unwrap_err();
            assert!(error.is_busy(), "{level}: {error}");
        }
        lock.in_transaction(&mut tx, &name("b"), None).await.unwrap();
        let forced = lock.clone();
        let forcing = tokio::spawn(async move {
            forced
                .force_release(&name("a"))
                .await
                .unwrap()
                .pop()
                .expect("it is reserved");
        });
        in_time(lock.in_transaction(&mut tx, &name("a"), None)).await.unwrap();
        forcing.await.unwrap();
        tx.commit().await.unwrap();
        // For other drivers.
        let sql = lock.transaction_sql().reserved;
        let (free, key) = (lock.key(&name("a")), lock.key(&name("c")));
        let claim = reserved(&other, "c", LONG).await;
        other.release(&claim, Some(LONG)).await.unwrap();
        for (key, is_reserved) in [(key, true), (free, false)] {
            assert_eq!(
                plain.query_one(&sql, &[&key]).await.unwrap().get::<_, bool>(0),
                is_reserved
            );
        }
        lock.force_release(&name("c"))
            .await
            .unwrap()
            .pop()
            .expect("it is reserved");
    }
}
