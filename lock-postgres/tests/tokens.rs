//! No token is ever equal to or below an earlier one, whatever happens to the server in the middle of many acquisitions.

#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a test may fail")]

mod server;

use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use lock_core::{Attempt, DistributedLock, LockError};
use lock_postgres::{PostgresConfig, PostgresLock, Tls};
use rustix::process::Signal;
use server::{PATIENCE, Server, claim, copy, give, program, signal_process};

const TTL: Duration = Duration::from_secs(5);

/// What the clock of the server says after the fault, beside what it said when the tokens were drawn.
#[derive(Clone, Copy, PartialEq, Eq)]
enum TheClock {
    IsRight,
    IsAnHourBehind,
}

/// One grant: between these moments that token was drawn.
struct Drawn {
    asked: Instant,
    answered: Instant,
    token: u64,
}

/// Clients that take and release locks as fast as they can.
struct Crowd {
    stop: Arc<AtomicBool>,
    grants: Arc<AtomicUsize>,
    tasks: Vec<tokio::task::JoinHandle<Vec<Drawn>>>,
}

impl Crowd {
    fn start(config: &PostgresConfig) -> Self {
        let (stop, grants) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let clients: Vec<PostgresLock> = (0..2).map(|_| config.clone().connect_lazy().unwrap()).collect();
        let tasks = (0..8).map(|number| {
            let (stop, grants) = (Arc::clone(&stop), Arc::clone(&grants));
            tokio::spawn(take(clients[number % 2].clone(), number, stop, grants))
        });
        Self {
            tasks: tasks.collect(),
            stop,
            grants,
        }
    }

    /// Waits until that many more have been granted.
    async fn grants(&self, more: usize) {
        let wanted = self.grants.load(Ordering::SeqCst) + more;
        let start = Instant::now();
        while self.grants.load(Ordering::SeqCst) < wanted {
            assert!(start.elapsed() < PATIENCE, "nothing is granted");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    async fn end(self) -> Vec<Drawn> {
        self.stop.store(true, Ordering::SeqCst);
        let mut drawn = Vec::new();
        for task in self.tasks {
            drawn.extend(task.await.unwrap());
        }
        drawn
    }
}

async fn take(lock: PostgresLock, number: usize, stop: Arc<AtomicBool>, grants: Arc<AtomicUsize>) -> Vec<Drawn> {
    let mut drawn = Vec::new();
    while !stop.load(Ordering::SeqCst) {
        let claim = claim(&format!("n {number}"), TTL);
        let asked = Instant::now();
        match lock.try_acquire(&claim).await {
            Ok(Attempt::Granted(grant)) => {
                drawn.push(Drawn {
                    asked,
                    answered: Instant::now(),
                    token: grant.token.get(),
                });
                grants.fetch_add(1, Ordering::SeqCst);
            }
            Ok(busy) => panic!("nobody else wants it: {busy:?}"),
            // There is no server at the moment.
            Err(error) => {
                let gone = error.is_retryable() || matches!(error, LockError::UnsafeConfiguration { .. });
                // While it is dropped and restored the schema is missing.
                assert!(gone || error.to_string().contains("schema"), "{error}");
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
        let _ = lock.release(&claim).await;
    }
    drawn
}

/// Whatever was drawn after another is higher, and no two are the same.
fn check(mut drawn: Vec<Drawn>) -> usize {
    drawn.sort_by_key(|drawn| drawn.asked);
    let mut answered: Vec<_> = drawn.iter().map(|drawn| (drawn.answered, drawn.token)).collect();
    answered.sort_unstable();
    let (mut next, mut highest) = (0, 0);
    for one in &drawn {
        while next < answered.len() && answered[next].0 < one.asked {
            highest = highest.max(answered[next].1);
            next += 1;
        }
        assert!(one.token > highest, "{} was drawn after {highest}", one.token);
    }
    let count = drawn.len();
    let mut tokens: Vec<_> = drawn.into_iter().map(|drawn| drawn.token).collect();
    tokens.sort_unstable();
    tokens.dedup();
    assert_eq!(tokens.len(), count, "a token was drawn twice");
    count
}

/// As if the clock had been right until now, and were then set back by an hour.
async fn set_clock(server: &Server, clock: TheClock) {
    // Makes the schema.
    drop(server.client().await);
    if clock == TheClock::IsAnHourBehind {
        server
            .run_sql(
                "UPDATE fencelock.counter SET start = start + 3600000000, ceiling = ceiling + 3600000000;
                 SELECT setval('fencelock.token', start) FROM fencelock.counter",
            )
            .await;
    }
}

async fn rise_across(clock: TheClock, fault: impl AsyncFnOnce(&mut Server, &Crowd)) {
    let mut server = Server::start();
    set_clock(&server, clock).await;
    let crowd = Crowd::start(&server.config());
    crowd.grants(300).await;
    let began = Instant::now();
    crowd.grants(300).await;
    let rate = 300.0 / began.elapsed().as_secs_f64();
    fault(&mut server, &crowd).await;
    crowd.grants(500).await;
    let count = check(crowd.end().await);
    println!("{count} tokens, all rising, at {rate:.0} a second");
}

/// The test, with both clocks.
macro_rules! tokens_rise_across {
    ($($name:ident: $fault:expr;)+) => {$(
        mod $name {
            use super::*;

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn with_a_clock_that_is_right() {
                rise_across(TheClock::IsRight, $fault).await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn with_a_clock_that_is_an_hour_behind() {
                rise_across(TheClock::IsAnHourBehind, $fault).await;
            }
        }
    )+};
}

tokens_rise_across! {
    a_killed_postmaster: async |server: &mut Server, _: &Crowd| server.restart(Signal::KILL);
    a_killed_walwriter: async |server: &mut Server, _: &Crowd| {
        kill_process_of(server, "SELECT pid FROM pg_stat_activity WHERE backend_type = 'walwriter'").await;
    };
    a_killed_backend: async |server: &mut Server, _: &Crowd| {
        kill_process_of(server, "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'fencelock %' LIMIT 1").await;
    };
    an_immediate_restart: async |server: &mut Server, _: &Crowd| server.restart(Signal::QUIT);
    a_clean_restart: async |server: &mut Server, _: &Crowd| server.restart(Signal::INT);
    a_sequence_with_a_log_that_came_back_older: async |server: &mut Server, _: &Crowd| {
        // As in version 14, which has no other.
        server.run_sql("ALTER SEQUENCE fencelock.token SET LOGGED").await;
        server.restart(Signal::KILL);
    };
    an_older_copy: async |server: &mut Server, crowd: &Crowd| {
        server.end(Signal::INT);
        let older = server.folder().join("older");
        copy(&server.data(), &older);
        server.start_again();
        crowd.grants(500).await;
        server.end(Signal::INT);
        std::fs::remove_dir_all(server.data()).unwrap();
        std::fs::rename(&older, server.data()).unwrap();
        server.start_again();
    };
    a_dump_that_is_restored: async |server: &mut Server, crowd: &Crowd| {
        let dump = output(program("pg_dump").args(url(server)).args(["--schema", "fencelock", "--inserts"]));
        crowd.grants(500).await;
        // Clients would make the schema anew in between: the number keeps them from it, as it keeps them from each other.
        let restore: Vec<_> = dump.lines().filter(|line| !line.starts_with('\\')).collect();
        server
            .run_sql(&format!(
                "SELECT pg_advisory_xact_lock(7378424937698848611); SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                 WHERE application_name LIKE 'fencelock %'; DROP SCHEMA fencelock CASCADE; {}",
                restore.join("\n")
            ))
            .await;
    };
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_rise_across_the_promotion_of_a_standby_that_lags() {
    promotion(TheClock::IsRight).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_rise_across_the_promotion_of_a_standby_that_lags_with_a_clock_that_is_an_hour_behind() {
    promotion(TheClock::IsAnHourBehind).await;
}

async fn promotion(clock: TheClock) {
    let mut primary = Server::start();
    set_clock(&primary, clock).await;
    let folder = tempfile::Builder::new().prefix("fencelock-pg-").tempdir().unwrap();
    give(folder.path());
    let data = folder.path().join("data");
    output(
        program("pg_basebackup")
            .args([
                "-h",
                "127.0.0.1",
                "-p",
                &primary.port().to_string(),
                "-U",
                "postgres",
                "--no-sync",
                "-R",
                "-c",
                "fast",
            ])
            .arg("-D")
            .arg(&data),
    );
    // It gets everything and shows none of it.
    let standby = Server::on_data(&data, &["recovery_min_apply_delay=1h"]);
    let mut login = primary.login();
    login.host("127.0.0.1").port(standby.port());
    let crowd = Crowd::start(&PostgresConfig::new(login).tls(Tls::Disable));
    crowd.grants(500).await;
    primary.end(Signal::KILL);
    standby
        .plain()
        .await
        .batch_execute("SELECT pg_promote(false)")
        .await
        .unwrap();
    crowd.grants(500).await;
    let count = check(crowd.end().await);
    println!("{count} tokens, all rising");
}

async fn kill_process_of(server: &Server, sql: &str) {
    let pid: i32 = server.value(sql).await;
    signal_process(pid.unsigned_abs(), Signal::KILL);
}

fn url(server: &Server) -> [String; 2] {
    [
        "-d".to_owned(),
        format!("postgres://postgres@127.0.0.1:{}/postgres", server.port()),
    ]
}

fn output(command: &mut std::process::Command) -> String {
    let output = command.stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[tokio::test]
async fn a_sequence_that_was_set_back_by_hand_is_noticed_and_put_right() {
    let server = Server::start();
    let lock = server.client().await;
    let first = server::granted(&lock, &claim("a", TTL)).await;
    server.run_sql("SELECT setval('fencelock.token', 7)").await;
    let next = server::granted(&lock, &claim("b", TTL)).await;
    assert!(next.token > first.token);
}

#[tokio::test]
async fn sessions_use_up_no_tokens_while_the_clock_is_behind() {
    let server = Server::start();
    set_clock(&server, TheClock::IsAnHourBehind).await;
    let before: i64 = server.value("SELECT last_value FROM fencelock.token").await;
    for _ in 0..20 {
        server::granted(&server.client().await, &claim("a", TTL)).await;
        server.until_locks(0, PATIENCE).await;
    }
    let after: i64 = server.value("SELECT last_value FROM fencelock.token").await;
    assert_eq!(after - before, 20);
}
