//! Waiting: few connections, and nobody else is held up.

use std::time::{Duration, Instant};

use lock_core::{DistributedLock, LockGuard, Locks, Options};

use crate::server::{Database, HANG_LIMIT, claim, granted, in_time, is_busy, name, until, waiting};

pub(crate) const TTL: Duration = Duration::from_secs(30);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hundred_waiters_of_one_process_use_few_connections() {
    let server = Database::new().await;
    let holder = server.client().await;
    let mine = claim("a", TTL);
    granted(&holder, &mine).await;
    let locks = Locks::with_options(server.client().await, Options::new().ttl(TTL));
    let others = server.sessions().await.len() - 1;
    // With ttls that no one session could keep all of, and some that want a session of their own.
    let mut waiters = Vec::new();
    for number in 0..100 {
        let waiter = locks
            .lock("a")
            .wait_for(2 * HANG_LIMIT)
            .ttl(TTL + 3 * Duration::from_secs(number));
        waiters.push(tokio::spawn(waiter.with(async |_guard| ())));
    }
    server.until_waiting("a", 1).await;
    let most = few_connections_are_left(&server, others, FEW).await;
    holder.release(&mine, None).await.unwrap();
    for waiter in waiters {
        waiter.await.unwrap().unwrap();
    }
    println!("100 waiters used {most} connections");
}

/// How many connections a client uses at most that waits: one that shows the waits, which is all on a quiet machine, and two that
/// carry nothing and are kept.
const FEW: usize = 3;

/// How many names are waited for.
pub(crate) const NAMES: i64 = 50;

/// Waits until waiters have no more than so many connections beside those others, and returns how many they had at most.
async fn few_connections_are_left(server: &Database, others: usize, few: usize) -> usize {
    let (mut most, mut in_a_row) = (0, 0);
    let start = Instant::now();
    while in_a_row < 5 {
        let used = server.sessions().await.len() - others;
        most = most.max(used);
        in_a_row = if used <= few { in_a_row + 1 } else { 0 };
        assert!(start.elapsed() < HANG_LIMIT, "waiters use {used} connections");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    most
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wait_that_another_request_puts_off_goes_on() {
    let server = Database::with_statements_logged().await;
    let holder = server.client().await;
    let mine = claim("a", TTL);
    granted(&holder, &mine).await;
    let locks = Locks::with_options(server.client().await, Options::new().ttl(TTL));
    let wait = |limit| tokio::spawn(locks.lock("a").wait_for(limit).into_future());
    let first = wait(Duration::from_secs(3));
    server.until_waiting("a", 1).await;
    let second = wait(2 * HANG_LIMIT);
    assert!(first.await.unwrap().is_err());
    let looks = || server.log().matches("pg_try_advisory_lock(").count();
    let before = looks();
    until("it looks again", async || looks() > before + 2).await;
    holder.release(&mine, None).await.unwrap();
    assert!(in_time(second).await.unwrap().unwrap().is_held());
    let shown = server.log().matches("pg_advisory_lock_shared(").count();
    assert_eq!(shown, 2, "one wait takes two shared locks, in one statement");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_index_is_made_while_others_wait_for_minutes() {
    let server = Database::new().await;
    let (holder, other) = (server.client().await, server.client().await);
    granted(&holder, &claim("a", TTL)).await;
    let waiting = waiting(&other, claim("a", TTL));
    server.until_waiting("a", 1).await;
    server.run_sql("CREATE TABLE stock (id integer)").await;
    let start = Instant::now();
    let index = "CREATE INDEX CONCURRENTLY ON stock (id)";
    in_time(server.run_sql(index)).await;
    println!("the index took {:?}", start.elapsed());
    assert!(!waiting.is_finished());
    waiting.abort();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancelled_statement_ends_no_wait() {
    let server = Database::new().await;
    let holder = server.client().await;
    let mine = claim("a", TTL);
    granted(&holder, &mine).await;
    let locks = Locks::with_options(server.client().await, Options::new().ttl(TTL));
    let wait = |name: &'static str| {
        let waiter = locks.lock(name).wait_for(2 * HANG_LIMIT);
        tokio::spawn(waiter.with(async |_guard| ()))
    };
    let waiting = wait("a");
    server.until_waiting("a", 1).await;
    // Whoever draws a token now waits for that.
    let mut plain = server.plain().await;
    let tx = plain.transaction().await.unwrap();
    tx.batch_execute("ALTER SEQUENCE fencelock.token OWNED BY NONE")
        .await
        .unwrap();
    holder.release(&mine, None).await.unwrap();
    // A wait that is cancelled, and one whose first attempt is.
    let waiting = [waiting, wait("b")];
    let admin = server.plain().await;
    let cancel = "SELECT count(pg_cancel_backend(pid)) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%nextval%' \
                  AND application_name LIKE 'fencelock %' AND datname = current_database()";
    let (mut cancelled, start) = (0, Instant::now());
    while cancelled < 6 {
        assert!(start.elapsed() < HANG_LIMIT, "{cancelled} statements were cancelled");
        cancelled += admin.query_one(cancel, &[]).await.unwrap().get::<_, i64>(0);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    tx.rollback().await.unwrap();
    for waiter in waiting {
        waiter.await.unwrap().unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_names_are_waited_for_on_few_connections() {
    many_names_are_waited_for(Duration::ZERO, FEW).await;
}

/// Waits for [`NAMES`] names with ttls that are apart by that step, until no more than so many connections are used.
pub(crate) async fn many_names_are_waited_for(step: Duration, few: usize) {
    let server = Database::new().await;
    let holder = Locks::with_options(server.client().await, Options::new().ttl(TTL));
    let mut guards = Vec::new();
    for name in 0..NAMES {
        guards.push(holder.lock(format!("n {name}")).await.unwrap());
    }
    let locks = Locks::with_options(server.client().await, Options::new().ttl(TTL));
    let waiters: Vec<_> = (0..NAMES)
        .map(|name| {
            let ttl = TTL + step * u32::try_from(name).unwrap();
            tokio::spawn(
                locks
                    .lock(format!("n {name}"))
                    .ttl(ttl)
                    .wait_for(2 * HANG_LIMIT)
                    .into_future(),
            )
        })
        .collect();
    server.until_locks(3 * NAMES).await;
    let most = few_connections_are_left(&server, 1, few).await;
    let start = Instant::now();
    drop(guards);
    let mut granted = Vec::new();
    for waiter in waiters {
        granted.push(waiter.await.unwrap().unwrap());
    }
    println!(
        "{NAMES} waits used {most} connections, and ended within {:?}",
        start.elapsed()
    );
    assert!(granted.iter().all(LockGuard::is_held));
    drop(granted);
    server.until_locks(0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_that_could_not_take_back_a_wait_takes_no_more_locks_and_so_ends_under_load() {
    let server = Database::new().await;
    let (lock, other) = (server.client().await, server.client().await);
    let first = claim("first", TTL);
    granted(&other, &claim("wanted", TTL)).await;
    let kept = granted(&lock, &first).await;
    let keeper = async |wanted: &str| {
        let key = lock.key(&name(wanted)) as u64;
        let (high, low) = (key >> 32, key & 0xffff_ffff);
        let of = format!("locktype = 'advisory' AND objsubid = 1 AND classid = {high} AND objid = {low}");
        server
            .value::<i32>(&format!("SELECT pid FROM pg_locks WHERE {of}"))
            .await
    };
    let stale = keeper("first").await;
    // In the way of what shows a wait to others, in the other space of keys.
    let plain = server.plain().await;
    let key = lock.key(&name("wanted"));
    let halves = format!("'{}'::integer, '{}'::integer", (key >> 32) as i32, key as i32);
    plain
        .batch_execute(&format!("SELECT pg_advisory_lock({halves})"))
        .await
        .unwrap();
    let waiting = waiting(&lock, claim("wanted", TTL));
    until("the wait is to be shown", async || {
        server.log().contains("pg_advisory_lock_shared")
    })
    .await;
    waiting.abort();
    drop(plain);
    // It carries a lock all the while.
    let next = in_time(async {
        for number in 0.. {
            let next = claim(&format!("next {number}"), TTL);
            granted(&lock, &next).await;
            if keeper(next.name().as_str()).await != stale {
                return next;
            }
            lock.release(&next, None).await.unwrap();
            assert!(kept.lease.is_valid(lock.clock().now()), "it is used on and on");
        }
        unreachable!("there are numbers enough")
    })
    .await;
    lock.release(&first, None).await.unwrap();
    until("the session ends", async || !server.sessions().await.contains(&stale)).await;
    assert!(is_busy(&other, &next).await, "the other lock is still held");
}
