//! Poolers between the client and the server.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use lock_core::{Clock, DistributedLock, Grant, LockError, Locks};
use lock_postgres::{PostgresConfig, PostgresLock};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::server::bouncer::{Bouncer, simple};
use crate::server::proxy::Proxy;
use crate::server::{HANG_LIMIT, Server, claim, granted, in_time, is_busy};

const TTL: Duration = Duration::from_secs(30);

/// Settings that somebody else set for the session.
const LEAKED: &str = "SELECT string_agg(name, ', ') FROM pg_settings WHERE source = 'session' AND name IN \
                      ('search_path', 'idle_session_timeout', 'lock_timeout', 'statement_timeout', 'synchronous_commit', \
                      'default_transaction_isolation', 'client_connection_check_interval', 'tcp_keepalives_idle')";

/// How often it is tried; a thousand times by hand.
fn rounds() -> usize {
    std::env::var("FENCELOCK_POOLER_ROUNDS").map_or(40, |rounds| rounds.parse().unwrap())
}

/// What came of it, over all rounds.
#[derive(Debug, Default)]
struct Seen {
    overlaps: usize,
    granted: usize,
    refused: usize,
    failed: usize,
}

async fn attempt(config: PostgresConfig) -> Result<(PostgresLock, Option<Grant>), LockError> {
    let lock = config.connect().await?;
    let grant = lock.try_acquire(&claim("a", TTL)).await?.granted();
    Ok((lock, grant))
}

/// Two clients after each other, with a stray statement between, beside that many other clients of the pool.
async fn attack(server: &Server, bouncer: &Bouncer, others: usize, config: impl Fn() -> PostgresConfig) -> Seen {
    let stop = Arc::new(AtomicBool::new(false));
    let mut tasks = Vec::new();
    for _ in 0..others {
        let (client, stop) = (bouncer.plain(server).await, Arc::clone(&stop));
        tasks.push(tokio::spawn(async move {
            while !stop.load(Ordering::Relaxed) {
                simple(&client, "SELECT 1").await;
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        }));
    }
    let stray = bouncer.plain(server).await;
    let mut seen = Seen::default();
    for round in 0..rounds() {
        let one = attempt(config()).await;
        for _ in 0..round % 3 {
            simple(&stray, "SELECT 1").await;
        }
        let two = attempt(config()).await;
        let now = Clock::system().now();
        let mut holders = 0;
        for attempt in [&one, &two] {
            match attempt {
                Ok((_, grant)) => holders += usize::from(grant.as_ref().is_some_and(|grant| grant.lease.is_valid(now))),
                Err(LockError::UnsafeConfiguration { .. }) => seen.refused += 1,
                Err(_) => seen.failed += 1,
            }
        }
        seen.granted += holders;
        seen.overlaps += usize::from(holders > 1);
    }
    stop.store(true, Ordering::Relaxed);
    for task in tasks {
        task.await.unwrap();
    }
    seen
}

async fn is_refused_and_leaves_nothing(mode: &str, others: usize, more: &str) {
    let server = Server::start();
    drop(server.client().await);
    server.until_locks(0).await;
    let settings = format!("pool_mode = {mode}\ndefault_pool_size = 2\nmin_pool_size = 2\n{more}");
    let bouncer = Bouncer::start(&server, &settings);
    let plain = [bouncer.plain(&server).await, bouncer.plain(&server).await];
    // Both sessions of the pool are there.
    tokio::join!(
        simple(&plain[0], "SELECT pg_sleep(0.1)"),
        simple(&plain[1], "SELECT pg_sleep(0.1)")
    );
    let seen = attack(&server, &bouncer, others, || bouncer.config(&server)).await;
    let mut leaked = Vec::new();
    for _ in 0..4 {
        leaked.extend(simple(&plain[0], LEAKED).await);
        leaked.extend(simple(&plain[1], LEAKED).await);
    }
    let locks = server.locks().await;
    println!("{mode}, {others} others, {more}: {seen:?}, leaked {leaked:?}, {locks} locks left");
    assert_eq!(seen.overlaps, 0, "{seen:?}");
    assert_eq!(leaked, Vec::<String>::new());
    assert_eq!(locks, 0);
    assert_eq!(seen.refused, 2 * rounds(), "{seen:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pooler_that_shares_sessions_lets_nobody_hold() {
    for (mode, others, more) in [
        ("transaction", 0, "server_round_robin = 1"),
        ("transaction", 1, "server_round_robin = 1"),
        ("transaction", 20, ""),
        ("statement", 0, "server_round_robin = 1"),
        ("statement", 20, ""),
    ] {
        is_refused_and_leaves_nothing(mode, others, more).await;
    }
}

/// PgBouncer as it should be.
const SESSION: &str = "pool_mode = session\ndefault_pool_size = 20";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pooler_that_shares_nothing_is_used_if_that_is_said() {
    let server = Server::start();
    let bouncer = Bouncer::start(&server, SESSION);
    let error = bouncer.config(&server).connect().await.unwrap_err();
    assert!(matches!(error, LockError::UnsafeConfiguration { .. }), "{error:?}");
    assert!(format!("{error:#}").contains("pool_mode=session"), "{error}");
    let url = format!(
        "postgres://postgres@127.0.0.1:{}/postgres?pool_mode=session",
        bouncer.port
    );
    let (one, two) = (PostgresLock::connect(&url).await.unwrap(), server.client().await);
    let short = Duration::from_secs(4);
    let mine = claim("a", short).with_own_lease();
    let first = granted(&one, &mine).await;
    assert!(is_busy(&two, &claim("a", TTL)).await);
    // Nobody renews it: the server ends the session behind the pooler.
    server.until_locks(0).await;
    let next = granted(&two, &claim("a", TTL)).await;
    assert!(next.token > first.token);
    // Kept for as long as it is renewed.
    let locks = Locks::new(one);
    let guard = locks.lock("b").ttl(short).await.unwrap();
    tokio::time::sleep(short * 3 / 2).await;
    assert!(guard.is_held());
    guard.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pooler_of_which_the_wrong_thing_is_said_lets_no_two_hold() {
    let server = Server::start();
    drop(server.client().await);
    for settings in [
        "pool_mode = transaction\ndefault_pool_size = 2\nserver_round_robin = 1",
        "pool_mode = transaction\ndefault_pool_size = 1",
        "pool_mode = statement\ndefault_pool_size = 3",
    ] {
        let bouncer = Bouncer::start(&server, settings);
        let config = || {
            let config = bouncer.config(&server).session_pooler(true);
            config.op_timeout(Duration::from_secs(1))
        };
        let seen = attack(&server, &bouncer, 0, config).await;
        println!("{settings:?}: {seen:?}");
        assert_eq!(seen.overlaps, 0, "{settings}: {seen:?}");
        drop(bouncer);
        server.until_locks(0).await;
    }
}

/// How many sessions wait for a lock on a table or on a row of it.
const BLOCKED: &str = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'";

async fn until_blocked(server: &Server, wanted: i64, or: impl Fn() -> bool) -> bool {
    let start = Instant::now();
    while server.value::<i64>(BLOCKED).await != wanted {
        if or() {
            return false;
        }
        assert!(start.elapsed() < HANG_LIMIT, "{wanted} sessions never wait");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    true
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pooler_of_which_the_wrong_thing_is_said_keeps_nobody_from_putting_the_counter_right() {
    let server = Server::start();
    drop(server.client().await);
    server.run_sql("UPDATE fencelock.counter SET era = ''").await;
    let bouncer = Bouncer::start(&server, "pool_mode = transaction\ndefault_pool_size = 3");
    let (proxy, strays) = (
        Proxy::to(bouncer.port).await,
        [bouncer.plain(&server).await, bouncer.plain(&server).await],
    );
    let mut plain = server.plain().await;
    let look = plain.transaction().await.unwrap();
    look.batch_execute("LOCK TABLE fencelock.counter IN ACCESS EXCLUSIVE MODE")
        .await
        .unwrap();
    let config = server.config_at(proxy.port());
    let connecting = config.session_pooler(true).op_timeout(HANG_LIMIT).connect();
    let connecting = tokio::spawn(connecting);
    until_blocked(&server, 1, || connecting.is_finished()).await;
    // Between the look at the counter and what puts it right another client takes the session.
    proxy.hold_answers();
    look.rollback().await.unwrap();
    let row = plain.transaction().await.unwrap();
    row.batch_execute("SELECT FROM fencelock.counter FOR UPDATE")
        .await
        .unwrap();
    until_blocked(&server, 0, || false).await;
    simple(&strays[0], "BEGIN").await;
    proxy.pass();
    if until_blocked(&server, 1, || connecting.is_finished()).await {
        // And once more before it is done.
        proxy.hold_answers();
        row.rollback().await.unwrap();
        until_blocked(&server, 0, || false).await;
        simple(&strays[1], "BEGIN").await;
        simple(&strays[0], "ROLLBACK").await;
        proxy.pass();
    }
    let connected = in_time(connecting).await.unwrap();
    assert!(
        matches!(connected, Err(LockError::UnsafeConfiguration { .. })),
        "{connected:?}"
    );
    for stray in &strays {
        simple(stray, "ROLLBACK").await;
    }
    let locks = server.locks().await;
    assert_eq!(locks, 0, "a session of the pool keeps others from it");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pooler_that_hands_on_sessions_as_they_are_or_has_none_left_is_told() {
    let server = Server::start();
    let one_session = "pool_mode = session\ndefault_pool_size = 1";
    let as_they_are = format!("{one_session}\nserver_reset_query =\nserver_check_query = select 1");
    for (settings, closes, says) in [
        (&*as_they_are, true, "server_reset_query"),
        (one_session, false, "default_pool_size"),
    ] {
        let bouncer = Bouncer::start(&server, settings);
        let config = || {
            let config = bouncer.config(&server).session_pooler(true);
            config.op_timeout(Duration::from_secs(2))
        };
        let one = config().connect().await.unwrap();
        granted(&one, &claim(says, TTL)).await;
        if closes {
            // As a process that is killed does.
            one.close().await.unwrap();
        }
        let error = in_time(config().connect()).await.unwrap_err();
        assert!(format!("{error:#}").contains(says), "{error}");
        one.close().await.unwrap();
    }
}

/// Leads to the server, as a pooler that answers the first question of that many connections with the end of another client's answers.
async fn with_answers_of_another_client(server: u16, mut connections: usize) -> u16 {
    const END: &[u8] = b"C\0\0\0\x0dSELECT 0\0Z\0\0\0\x05I";
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let mut server = TcpStream::connect(("127.0.0.1", server)).await.unwrap();
            let mut is_handed_on = connections > 0;
            connections = connections.saturating_sub(1);
            tokio::spawn(async move {
                let (mut asked, mut answered) = (vec![0; 65536], vec![0; 65536]);
                loop {
                    let passed = tokio::select! {
                        read = client.read(&mut asked) => {
                            let Ok(read @ 1..) = read else { return };
                            // Before its first question it logs in.
                            if is_handed_on && asked[0] == b'Q' {
                                is_handed_on = false;
                                client.write_all(END).await.unwrap();
                            }
                            server.write_all(&asked[..read]).await
                        }
                        read = server.read(&mut answered) => {
                            let Ok(read @ 1..) = read else { return };
                            client.write_all(&answered[..read]).await
                        }
                    };
                    if passed.is_err() {
                        return;
                    }
                }
            });
        }
    });
    port
}

#[tokio::test]
async fn sessions_with_the_answers_of_another_client_are_left_a_few_times() {
    let server = Server::start();
    let config = async |connections| {
        let port = with_answers_of_another_client(server.port(), connections).await;
        server.config_at(port)
    };
    for connections in [1, 3] {
        let lock = in_time(config(connections).await.connect()).await.unwrap();
        let grant = granted(&lock, &claim("a", TTL)).await;
        lock.release(&grant.claim, None).await.unwrap();
    }
    let error = in_time(config(usize::MAX).await.connect()).await.unwrap_err();
    assert!(matches!(error, LockError::Unavailable { .. }), "{error:?}");
    // Not because the time was over.
    assert!(format!("{error:#}").contains("than what was asked for"), "{error:#}");
}
