//! More clients than the server has connections.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use lock_core::{DistributedLock, Locks, Options};
use lock_postgres::schema_sql;
use lock_postgres::tokio_postgres::NoTls;

use super::ceiling::BEHIND;
use crate::server::{Server, until};

/// Three times as many as the server has connections for. By hand: 300, for the 100 that a server has unless told otherwise.
fn connections() -> u32 {
    std::env::var("FENCELOCK_CROWD").map_or(40, |connections| connections.parse().unwrap())
}

const WAIT: Duration = Duration::from_secs(120);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_start_while_another_puts_the_counter_right_leave_no_error_in_the_log() {
    const CLIENTS: usize = 30;
    let server = Server::with(&["max_connections=60"]);
    drop(server.client().await);
    server.until_locks(0).await;
    let last = "SELECT last_value FROM fencelock.token";
    server.run_sql(BEHIND).await;
    let before: i64 = server.value(last).await;
    let plain = server.plain().await;
    plain
        .batch_execute("SELECT pg_advisory_lock(x'66656e63656c6f64'::bigint)")
        .await
        .unwrap();
    let start_all = async || {
        let config = || server.config().op_timeout(Duration::from_secs(20));
        let starts: Vec<_> = (0..CLIENTS).map(|_| tokio::spawn(config().connect())).collect();
        for start in starts {
            start.await.unwrap().unwrap().close().await.unwrap();
        }
    };
    // As long as the turn is another's, they take the counter as it is.
    start_all().await;
    assert_eq!(server.value::<i64>(last).await, before);
    plain.batch_execute("SELECT pg_advisory_unlock_all()").await.unwrap();
    start_all().await;
    let after: i64 = server.value(last).await;
    assert!(after >= before + 30_000_000, "{before} {after}");
    let log = server.log();
    let errors = log.lines().filter(|line| line.contains("ERROR")).count();
    assert_eq!(errors, 0, "{log}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_times_as_many_clients_as_connections_get_their_turns() {
    let clients_in_all = 3 * connections();
    let server = Arc::new(Server::with(&[&format!("max_connections={}", connections())]));
    server.run_sql("CREATE ROLE ordinary LOGIN").await;
    server
        .run_sql(&schema_sql("fencelock", Some("ordinary")).unwrap())
        .await;
    let first = Locks::with_options(server.client().await, Options::new().ttl(Duration::from_secs(30)));
    let guard = first.lock("a").await.unwrap();
    let (inside, turns) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU32::new(0)));
    let clients: Vec<_> = (0..clients_in_all)
        .map(|number| {
            // All of them share one thread here, which processes of their own do not.
            let config = server.config_as("ordinary");
            let lock = config.op_timeout(Duration::from_secs(20)).connect_lazy().unwrap();
            let (inside, turns) = (Arc::clone(&inside), Arc::clone(&turns));
            tokio::spawn(async move {
                // As processes are started by a busy machine.
                tokio::time::sleep(Duration::from_millis(20) * number).await;
                let locks = Locks::with_options(lock, Options::new().ttl(Duration::from_secs(30)));
                let guard = locks.lock("a").wait_for(WAIT).await?;
                assert!(!inside.swap(true, Ordering::SeqCst), "two hold at once");
                tokio::time::sleep(Duration::from_millis(2)).await;
                inside.store(false, Ordering::SeqCst);
                guard.release().await?;
                turns.fetch_add(1, Ordering::SeqCst);
                locks.shutdown().await
            })
        })
        .collect();
    // The server has no connection left.
    let plain = async || server.login().user("ordinary").connect(NoTls).await;
    until("all connections are in use", async || plain().await.is_err()).await;
    guard.release().await.unwrap();
    let released = Instant::now();
    let mut failed = Vec::new();
    for client in clients {
        if let Err(error) = client.await.unwrap() {
            failed.push(format!("{error:#}"));
        }
    }
    println!("{} turns within {:?}", turns.load(Ordering::SeqCst), released.elapsed());
    let lines = server.log().lines().count();
    println!("{lines} lines in the log");
    assert!(failed.is_empty(), "{} failed: {}", failed.len(), failed[0]);
    assert_eq!(turns.load(Ordering::SeqCst), clients_in_all);
}
