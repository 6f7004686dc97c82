//! Names that stay taken for a time: what only this backend has to show of them.

#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a test may fail")]

mod server;

use std::future::IntoFuture;
use std::time::{Duration, Instant};

use lock_core::{Attempt, Claim, DistributedLock, LockError, Locks, Released, Renewal};
use lock_postgres::{PostgresConfig, PostgresLock, Tls, schema_sql};
use rustix::process::Signal;
use server::proxy::Proxy;
use server::{PATIENCE, Server, claim, granted, in_time, is_busy, name};

const TTL: Duration = Duration::from_secs(20);

/// Longer than any of these tests.
const LONG: Duration = Duration::from_secs(600);

/// What there is of reservations, whether or not they are over.
const ROWS: &str = "SELECT count(*) FROM fencelock.reservation";

fn reserving(name: &str, length: Duration) -> Claim {
    claim(name, TTL).with_at_least(length)
}

/// Takes the name and reserves it.
async fn reserved(lock: &PostgresLock, name: &str, length: Duration) -> Claim {
    let claim = reserving(name, length);
    granted(lock, &claim).await;
    assert_eq!(lock.reserve(&claim, length).await.unwrap(), Renewal::Renewed);
    claim
}

/// How long the name stays taken according to the answer.
async fn taken_for(lock: &PostgresLock, name: &str) -> Duration {
    match lock.try_acquire(&claim(name, TTL)).await.unwrap() {
        Attempt::Busy(busy) => busy.retry_after.expect("it tells how long"),
        other => panic!("the name is reserved; it said {other:?}"),
    }
}

async fn is_free(lock: &PostgresLock, name: &str) -> bool {
    let claim = claim(name, TTL);
    let free = matches!(lock.try_acquire(&claim).await.unwrap(), Attempt::Granted(_));
    lock.release(&claim).await.unwrap();
    free
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_name_stays_taken_across_a_crash_of_the_server() {
    let mut server = Server::start();
    for signal in [Signal::KILL, Signal::QUIT, Signal::INT] {
        let lock = server.client().await;
        let given_up = reserved(&lock, "given up", LONG).await;
        assert_eq!(lock.release(&given_up).await.unwrap(), Released::Released);
        let released = reserved(&lock, "released", LONG).await;
        assert_eq!(
            lock.release_reserved(&released, LONG).await.unwrap(),
            Released::Released
        );
        // Last: a later one would make it durable, too.
        let held = reserved(&lock, "held", LONG).await;
        server.restart(signal);
        let other = server.client().await;
        for name in ["held", "released"] {
            let left = taken_for(&other, name).await;
            assert!(left > LONG - PATIENCE && left <= LONG, "{signal:?}: {left:?}");
        }
        assert!(is_free(&other, "given up").await, "{signal:?}");
        // The hold went with the server.
        assert_eq!(lock.reserve(&held, LONG).await.unwrap(), Renewal::NotHeld);
        for name in ["held", "released"] {
            let ended = other.force_release(&server::name(name)).await.unwrap();
            assert!(ended.expect("it is reserved").is_reserved);
            assert!(is_free(&other, name).await, "{signal:?}");
        }
    }
}

/// What the message has that reserves, and no other.
const RESERVE: &str = "RETURNING r.until";

async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let start = Instant::now();
    while !holds().await {
        assert!(start.elapsed() < PATIENCE, "not in time: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_arrives_after_the_release_of_its_claim_reserves_nothing() {
    const MANY: usize = 1 << 40;
    let server = Server::with(&["log_statement=all"]);
    let other = server.client().await;
    // The first session goes through the proxy, the next one past it.
    let proxy = Proxy::to(server.port()).await;
    let mut login = server.login_at(proxy.port());
    login.host("127.0.0.1").port(server.port());
    let config = PostgresConfig::new(login).tls(Tls::Disable);
    let lock = config.op_timeout(Duration::from_secs(4)).connect().await.unwrap();
    let claim = reserving("late", LONG);
    granted(&lock, &claim).await;

    // How long the first of the two messages is, seen where it is in vain.
    let plain = server.plain().await;
    let turn = 0x6665_6e63_656c_6f65_i64;
    plain
        .batch_execute(&format!("SELECT pg_advisory_lock({turn})"))
        .await
        .unwrap();
    proxy.hold_requests_after(MANY);
    lock.reserve(&claim, LONG)
        .await
        .expect_err("another session has the turn");
    let first = MANY - proxy.left();
    plain
        .batch_execute(&format!("SELECT pg_advisory_unlock({turn})"))
        .await
        .unwrap();

    // The second one stays on its way, and its session is lost.
    proxy.hold_requests_after(first);
    let reserving = {
        let (lock, claim) = (lock.clone(), claim.clone());
        tokio::spawn(async move { lock.reserve(&claim, LONG).await })
    };
    until("the first message has passed", async || proxy.left() == 0).await;
    until("the second message waits", async || proxy.waits()).await;
    proxy.hang_up();
    let lost = in_time(reserving).await.unwrap().unwrap_err();
    assert!(lost.is_retryable(), "{lost}");
    assert_eq!(server.log().matches(RESERVE).count(), 0);
    in_time(async {
        while let Err(error) = lock.release(&claim).await {
            assert!(error.is_retryable(), "{error}");
        }
    })
    .await;
    proxy.pass();
    until("the second message is worked", async || server.log().contains(RESERVE)).await;
    until("its session has ended", async || server.locks().await == 0).await;
    assert!(is_free(&other, "late").await);
    // It counts for as long as the request does, and is swept then.
    let withdrawn: i64 = server.value(ROWS).await;
    assert_eq!(withdrawn, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_standby_that_is_away_keeps_no_holder_waiting() {
    const STUCK: &str =
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND application_name LIKE 'fencelock %'";
    let server = Server::start();
    let (lock, other) = (server.client().await, server.client().await);
    let kept = claim("kept", TTL);
    let kept = granted(&lock, &kept).await;
    server.loses_its_standby().await;
    let first = reserved(&lock, "a", LONG).await;
    lock.renew(&kept.lease).await.unwrap();
    assert_eq!(lock.release(&first).await.unwrap(), Released::Released);
    assert!(is_free(&other, "a").await);
    let second = reserved(&lock, "a", LONG).await;
    lock.release_reserved(&second, LONG).await.unwrap();
    assert!(is_busy(&other, &claim("a", TTL)).await);
    other.force_release(&name("a")).await.unwrap().expect("it is reserved");
    assert!(is_free(&other, "a").await);
    assert_eq!(server.value::<i64>(STUCK).await, 0);
    server.forgets_its_standby().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_notices_each_reservation_and_its_end() {
    let server = Server::start();
    let (lock, other) = (server.client().await, server.client().await);
    let brief = Duration::from_millis(300);
    for round in 0..3 {
        // It knows of none.
        assert!(is_free(&other, "b").await);
        let claim = reserved(&lock, "a", brief).await;
        let asked = Instant::now();
        lock.release_reserved(&claim, brief).await.unwrap();
        assert!(
            is_busy(&other, &self::claim("a", TTL)).await || asked.elapsed() > brief,
            "{round}"
        );
        assert!(is_free(&other, "b").await, "it is another name");
        until("the reservation ends", async || is_free(&other, "a").await).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reservations_that_are_over_are_deleted_by_later_ones() {
    const MANY: usize = 40;
    let server = Server::start();
    let lock = server.client().await;
    let brief = Duration::from_millis(1);
    for number in 0..MANY {
        let claim = reserved(&lock, &format!("n {number}"), brief).await;
        lock.release_reserved(&claim, brief).await.unwrap();
    }
    let left: i64 = server.value(ROWS).await;
    assert!(left <= 5, "{left} rows");
    // Beside those that last.
    for number in 0..MANY {
        let length = if number % 2 == 0 { LONG } else { brief };
        let claim = reserved(&lock, &format!("m {number}"), length).await;
        lock.release_reserved(&claim, length).await.unwrap();
    }
    let left: i64 = server.value(ROWS).await;
    assert!(left <= MANY as i64 / 2 + 5, "{left} rows");
    assert_eq!(lock.list("m ").await.unwrap().len(), MANY / 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locking_is_one_message_beside_reservations_too_and_waiting_for_one_is_few() {
    const PAIRS: usize = 50;
    let server = Server::with(&["log_statement=all"]);
    let (lock, other) = (server.client().await, server.client().await);
    let reserved = reserved(&other, "reserved", LONG).await;
    let pair = async || {
        let claim = claim("a", TTL);
        granted(&lock, &claim).await;
        lock.release(&claim).await.unwrap();
    };
    // The first one finds out.
    pair().await;
    let messages = || server.log().matches("statement: ").count();
    let before = messages();
    for _ in 0..PAIRS {
        pair().await;
    }
    assert_eq!(messages() - before, 2 * PAIRS);

    assert_eq!(
        other.release_reserved(&reserved, LONG).await.unwrap(),
        Released::Released
    );
    let locks = Locks::new(server.client().await);
    let waiting = tokio::spawn(locks.lock("reserved").wait_for(PATIENCE).into_future());
    server.until_waiting("reserved", 1).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let before = messages();
    tokio::time::sleep(Duration::from_secs(3)).await;
    let sent = messages() - before;
    assert!(sent <= 6, "{sent} messages in 3 s");
    // It does not look by itself for some seconds.
    let start = Instant::now();
    lock.force_release(&name("reserved"))
        .await
        .unwrap()
        .expect("it is reserved");
    in_time(waiting).await.unwrap().unwrap().release().await.unwrap();
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
}

/// Brings the schema to what an earlier version has made.
const EARLIER: &str = "DROP TABLE fencelock.reservation; DROP SEQUENCE fencelock.reserved_until";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_schema_of_an_earlier_version_is_completed_by_those_who_may() {
    let server = Server::start();
    let schema = schema_sql("fencelock", Some("low")).unwrap();
    server
        .run_sql(&format!("CREATE ROLE low LOGIN; {schema}; {EARLIER}"))
        .await;
    let mut login = server.login();
    login.user("low");
    let low = PostgresConfig::new(login).tls(Tls::Disable).connect().await.unwrap();
    assert!(is_free(&low, "a").await, "what it needs no reservations for goes on");
    let claim = reserving("a", LONG);
    granted(&low, &claim).await;
    let error = low.reserve(&claim, LONG).await.unwrap_err();
    assert!(matches!(error, LockError::Configuration { .. }), "{error:?}");
    assert!(error.to_string().contains("CREATE TABLE IF NOT EXISTS"), "{error}");
    assert_eq!(low.release(&claim).await.unwrap(), Released::Released);
    assert!(low.holder(&name("a")).await.unwrap().is_none() && low.list("").await.unwrap().is_empty());

    let high = server.client().await;
    reserved(&high, "a", LONG).await;
    high.close().await.unwrap();
    // It was connected before, and may use what was made since.
    until("the lock is free", async || server.locks().await == 0).await;
    assert!(taken_for(&low, "a").await > LONG - PATIENCE);
    reserved(&low, "b", LONG).await;
    assert_eq!(low.list("").await.unwrap().len(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_role_that_cannot_see_reservations_is_refused() {
    let server = Server::start();
    let schema = schema_sql("fencelock", Some("low")).unwrap();
    server.run_sql(&format!("CREATE ROLE low LOGIN; {schema}")).await;
    for right in ["SEQUENCE fencelock.reserved_until", "fencelock.reservation"] {
        server.run_sql(&format!("REVOKE ALL ON {right} FROM low")).await;
        let mut login = server.login();
        login.user("low");
        let error = PostgresConfig::new(login)
            .tls(Tls::Disable)
            .connect()
            .await
            .unwrap_err();
        assert!(matches!(error, LockError::Configuration { .. }), "{error:?}");
        assert!(error.to_string().contains("fencelock schema postgres"), "{error}");
        server.run_sql(&schema).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transaction_is_not_granted_a_reserved_name_whatever_it_sees() {
    let server = Server::start();
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
        other.release_reserved(&claim, LONG).await.unwrap();
        for wait in [Duration::ZERO, Duration::from_millis(50)] {
            let error = lock.in_transaction(&mut tx, &name("a"), Some(wait)).await.unwrap_err();
            assert!(error.is_busy(), "{level}: {error}");
        }
        lock.in_transaction(&mut tx, &name("b"), None).await.unwrap();
        let forced = lock.clone();
        let forcing = tokio::spawn(async move {
            forced.force_release(&name("a")).await.unwrap().expect("it is reserved");
        });
        in_time(lock.in_transaction(&mut tx, &name("a"), None)).await.unwrap();
        forcing.await.unwrap();
        tx.commit().await.unwrap();
        // For other drivers.
        let brief = Duration::from_secs(2);
        let claim = reserved(&other, "a", brief).await;
        let asked = Instant::now();
        other.release_reserved(&claim, brief).await.unwrap();
        let sql = lock.transaction_sql().reserved;
        let key = lock.key(&name("a"));
        assert!(plain.query_one(&sql, &[&key]).await.unwrap().get::<_, bool>(0));
        let mut tx = plain.transaction().await.unwrap();
        in_time(lock.in_transaction(&mut tx, &name("a"), Some(PATIENCE)))
            .await
            .unwrap();
        println!(
            "{level}: granted {:?} after the release of a name reserved for {brief:?}",
            asked.elapsed()
        );
        assert!(!tx.query_one(&sql, &[&key]).await.unwrap().get::<_, bool>(0));
        tx.commit().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reservation_ends_by_the_clock_of_the_server() {
    let server = Server::with_a_clock_that_steps();
    let (lock, other) = (server.client().await, server.client().await);
    let claim = reserved(&lock, "a", LONG).await;
    lock.release_reserved(&claim, LONG).await.unwrap();
    let step = async |seconds: i64| {
        server.step_clock(seconds);
        until("the clock is set", async || {
            (server.seconds_behind().await + seconds as f64).abs() < 1.0
        })
        .await;
    };
    // Sessions may end with the step, as their limits go by the same clock.
    let free = async || {
        let claim = self::claim("a", TTL);
        let attempt = other.try_acquire(&claim).await;
        let free = matches!(attempt, Ok(Attempt::Granted(_)));
        until("it is released", async || other.release(&claim).await.is_ok()).await;
        attempt.ok().map(|_| free)
    };
    assert_eq!(free().await, Some(false));
    step(2 * LONG.as_secs() as i64).await;
    until("it has ended", async || free().await == Some(true)).await;
    // After a step back the sequence is ahead of what is reserved from then on, and a session knows where it was once that was past.
    step(0).await;
    until("it is free", async || free().await == Some(true)).await;
    let short = LONG / 4;
    until("it is reserved", async || {
        let claim = reserving("b", short);
        let reserving = async {
            lock.try_acquire(&claim).await?;
            lock.reserve(&claim, short).await?;
            lock.release_reserved(&claim, short).await
        };
        reserving.await.is_ok_and(|released| released == Released::Released)
    })
    .await;
    let left = taken_for(&other, "b").await;
    assert!(left > short - PATIENCE && left <= short, "{left:?}");
}
