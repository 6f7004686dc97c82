//! Reservations that end by the clock, and beside a standby.

use std::future::IntoFuture;
use std::time::{Duration, Instant};

use lock_core::{Attempt, DistributedLock, Locks, Released};
use rustix::process::Signal;

use super::clock::step;
use crate::reserve::{LONG, TTL, is_free, reserved, reserving, stays_taken_across, taken_for};
use crate::server::{Database, HANG_LIMIT, Server, claim, granted, in_time, is_busy, name, until};

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
    assert_eq!(lock.release(&first, None).await.unwrap(), Released::Released);
    assert!(is_free(&other, "a").await);
    let second = reserved(&lock, "a", LONG).await;
    lock.release(&second, Some(LONG)).await.unwrap();
    assert!(is_busy(&other, &claim("a", TTL)).await);
    other
        .force_release(&name("a"))
        .await
        .unwrap()
        .pop()
        .expect("it is reserved");
    assert!(is_free(&other, "a").await);
    assert_eq!(server.value::<i64>(STUCK).await, 0);
    server.forgets_its_standby().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_notices_each_reservation_and_its_end() {
    let server = Database::new().await;
    let (lock, other) = (server.client().await, server.client().await);
    let brief = Duration::from_millis(300);
    for round in 0..3 {
        // It knows of none.
        assert!(is_free(&other, "b").await);
        let claim = reserved(&lock, "a", brief).await;
        let asked = Instant::now();
        lock.release(&claim, Some(brief)).await.unwrap();
        assert!(
            is_busy(&other, &self::claim("a", TTL)).await || asked.elapsed() > brief,
            "{round}"
        );
        assert!(is_free(&other, "b").await, "it is another name");
        until("the reservation ends", async || is_free(&other, "a").await).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reservation_ends_by_the_clock_of_the_server() {
    let server = Server::with_a_clock_that_steps();
    let (lock, other) = (server.client().await, server.client().await);
    let claim = reserved(&lock, "a", LONG).await;
    lock.release(&claim, Some(LONG)).await.unwrap();
    // Sessions may end with the step, as their limits go by the same clock.
    let free = async || {
        let claim = self::claim("a", TTL);
        let attempt = other.try_acquire(&claim).await;
        let free = matches!(attempt, Ok(Attempt::Granted(_)));
        until("it is released", async || other.release(&claim, None).await.is_ok()).await;
        attempt.ok().map(|_| free)
    };
    assert_eq!(free().await, Some(false));
    step(&server, 2 * LONG.as_secs() as i64).await;
    until("it has ended", async || free().await == Some(true)).await;
    // After a step back the sequence is ahead of what is reserved from then on, and a session knows where it was once that was past.
    step(&server, 0).await;
    until("it is free", async || free().await == Some(true)).await;
    let short = LONG / 4;
    until("it is reserved", async || {
        let claim = reserving("b", short);
        let reserving = async {
            lock.try_acquire(&claim).await?;
            lock.reserve(&claim, short).await?;
            lock.release(&claim, Some(short)).await
        };
        reserving.await.is_ok_and(|released| released == Released::Released)
    })
    .await;
    let left = taken_for(&other, "b").await;
    assert!(left > short - HANG_LIMIT && left <= short, "{left:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiting_for_the_end_of_a_reservation_takes_few_messages() {
    let server = Database::with_statements_logged().await;
    let (lock, other) = (server.client().await, server.client().await);
    let reserved = reserved(&other, "reserved", LONG).await;
    let messages = || server.log().matches("statement: ").count();
    assert_eq!(other.release(&reserved, Some(LONG)).await.unwrap(), Released::Released);
    let locks = Locks::new(server.client().await);
    let waiting = tokio::spawn(locks.lock("reserved").wait_for(HANG_LIMIT).into_future());
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
        .pop()
        .expect("it is reserved");
    in_time(waiting).await.unwrap().unwrap().release().await.unwrap();
    println!("granted {:?} after the end of the reservation", start.elapsed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transaction_is_granted_a_name_when_its_reservation_ends() {
    let brief = Duration::from_secs(2);
    let server = Database::new().await;
    let (lock, other) = (server.client().await, server.client().await);
    let mut plain = server.plain().await;
    let claim = reserved(&other, "a", brief).await;
    let asked = Instant::now();
    other.release(&claim, Some(brief)).await.unwrap();
    let mut tx = plain.transaction().await.unwrap();
    in_time(lock.in_transaction(&mut tx, &name("a"), Some(HANG_LIMIT)))
        .await
        .unwrap();
    println!(
        "granted {:?} after the release of a name reserved for {brief:?}",
        asked.elapsed()
    );
    let (sql, key) = (lock.transaction_sql().reserved, lock.key(&name("a")));
    assert!(!tx.query_one(&sql, &[&key]).await.unwrap().get::<_, bool>(0));
    tx.commit().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_name_stays_taken_across_each_end_of_the_server() {
    stays_taken_across(&[Signal::QUIT, Signal::INT]).await;
}
