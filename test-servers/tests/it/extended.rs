//! Servers can be started, stopped and lost, in every way that there is on this machine.
//!
//! Which ways are tried is said by `FENCELOCK_TEST_SERVERS`, as for every other test that needs servers.

use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use test_servers::{Data, Kind, Server};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tokio::time::timeout;

use crate::{PATIENCE, Redis};

/// How long is waited for what is not to happen.
const QUIET: Duration = Duration::from_millis(100);

async fn serves_restarts_and_forgets(kind: &'static Kind, version: &str) {
    let server = Server::start_own(kind, &[]).await.unwrap();
    assert!(server.version().starts_with(version), "{server}");
    assert_eq!(server.url(), format!("redis://{}", server.authority()));
    let mut redis = Redis::connect(server.authority()).await;
    assert_eq!(redis.ask("SET a 1").await, "+OK");

    server.restart(Data::Kept).await.unwrap();
    assert!(redis.try_ask("PING").await.map_or(true, |answer| answer.is_empty()));
    let mut redis = Redis::connect(server.authority()).await;
    assert_eq!(redis.ask("EXISTS a").await, ":1");

    server.kill().await.unwrap();
    assert!(redis.try_ask("PING").await.map_or(true, |answer| answer.is_empty()));
    assert!(TcpStream::connect(server.authority()).await.is_err());
    server.restart(Data::Kept).await.unwrap();
    let mut redis = Redis::connect(server.authority()).await;
    assert_eq!(redis.ask("EXISTS a").await, ":1");

    server.pause().await.unwrap();
    assert!(timeout(QUIET, redis.try_ask("PING")).await.is_err());
    server.resume().await.unwrap();
    let mut redis = Redis::connect(server.authority()).await;
    assert_eq!(redis.ask("PING").await, "+PONG");

    server.copy().await.unwrap();
    assert_eq!(redis.ask("SET b 1").await, "+OK");
    server.restart(Data::Copied).await.unwrap();
    let mut redis = Redis::connect(server.authority()).await;
    assert_eq!(
        (&*redis.ask("EXISTS a").await, &*redis.ask("EXISTS b").await),
        (":1", ":0")
    );
    assert_eq!(redis.ask("SET b 1").await, "+OK");

    // A paused server can be killed as well.
    server.pause().await.unwrap();
    server.restart(Data::Lost).await.unwrap();
    let mut redis = Redis::connect(server.authority()).await;
    assert_eq!(redis.ask("EXISTS a").await, ":0");

    let authority = server.authority().to_owned();
    drop(server);
    assert!(TcpStream::connect(authority).await.is_err());
}

#[tokio::test]
async fn redis_8_serves_restarts_and_forgets() {
    serves_restarts_and_forgets(&Kind::REDIS, "Redis 8.").await;
}

#[tokio::test]
async fn valkey_serves_restarts_and_forgets() {
    serves_restarts_and_forgets(&Kind::VALKEY, "Valkey 8.1.").await;
}

#[tokio::test]
async fn redis_7_0_serves_restarts_and_forgets() {
    serves_restarts_and_forgets(&Kind::REDIS_7_0, "Redis 7.0.").await;
}

#[tokio::test]
async fn a_pause_ends_by_itself() {
    let server = Server::start_own(&Kind::REDIS, &[]).await.unwrap();
    let mut redis = Redis::connect(server.authority()).await;
    let pause = Duration::from_millis(300);
    let start = Instant::now();
    server.pause_for(pause).await.unwrap();
    let paused = Instant::now();
    assert_eq!(redis.ask("PING").await, "+PONG");
    assert!(start.elapsed() >= pause && paused.elapsed() < PATIENCE);
}

#[tokio::test]
async fn servers_of_one_kind_know_nothing_of_each_other() {
    let (one, other) = tokio::join!(
        Server::start_own(&Kind::REDIS, &[]),
        Server::start_own(&Kind::REDIS, &[])
    );
    let (one, other) = (one.unwrap(), other.unwrap());
    assert_ne!(one.authority(), other.authority());
    assert_eq!(Redis::connect(one.authority()).await.ask("SET a 1").await, "+OK");
    assert_eq!(Redis::connect(other.authority()).await.ask("EXISTS a").await, ":0");
}

/// The faults that need nothing but a server that answers its own probe.
async fn restarts(kind: &'static Kind, version: &str) {
    let server = Server::start_own(kind, &[]).await.unwrap();
    assert!(server.version().starts_with(version), "{server}");
    server.restart(Data::Kept).await.unwrap();
    server.pause().await.unwrap();
    server.resume().await.unwrap();
    server.copy().await.unwrap();
    server.restart(Data::Copied).await.unwrap();
    server.restart(Data::Lost).await.unwrap();
    let authority = server.authority().to_owned();
    drop(server);
    assert!(TcpStream::connect(authority).await.is_err());
}

#[tokio::test]
async fn postgres_restarts() {
    restarts(&Kind::POSTGRES, "PostgreSQL 17.").await;
}

#[tokio::test]
async fn etcd_restarts() {
    restarts(&Kind::ETCD, "etcd 3.5.").await;
}

/// Tells this program that it was started by one of its own tests, which is to do its other part.
const CHILD: &str = "FENCELOCK_TEST_SERVERS_CHILD";

/// Starts this program again, to do the other part of one of its tests.
fn child_of(test: &str, environment: &[(&str, &str)]) -> Child {
    let (_, module) = module_path!().split_once("::").unwrap();
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "--nocapture", &format!("{module}::{test}")])
        .env(CHILD, "1")
        .envs(environment.iter().copied())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap()
}

/// What the child says of its server. The child's part ends its lines with this.
async fn told_by(child: &mut Child) -> String {
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let told = async {
        loop {
            let line = lines.next_line().await.unwrap().expect("the child tells of its server");
            if let Some((_, told)) = line.split_once("started: ") {
                return told.to_owned();
            }
        }
    };
    timeout(2 * PATIENCE, told).await.unwrap()
}

async fn refuses(authority: &str) {
    let refused = async {
        while TcpStream::connect(authority).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(PATIENCE, refused)
        .await
        .unwrap_or_else(|_| panic!("{authority} is still there"));
}

/// A shell that runs tests in the background has them ignore SIGINT, and all that they start. A handler, in place of that,
/// is not inherited.
fn heed_interrupts() {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.map_or(0, |mask| u64::from_str_radix(mask.trim(), 16).unwrap());
    if ignored & (1 << (Signal::INT.as_raw() - 1)) != 0 {
        drop(tokio::signal::unix::signal(tokio::signal::unix::SignalKind::interrupt()).unwrap());
    }
}

#[tokio::test]
async fn no_server_outlives_its_process_for_long() {
    if std::env::var_os(CHILD).is_some() {
        let server = Server::start_own(&Kind::REDIS, &[]).await.unwrap();
        let paused = Server::start_own(&Kind::REDIS, &[]).await.unwrap();
        paused.pause().await.unwrap();
        println!("started: {} {}", server.authority(), paused.authority());
        std::future::pending().await
    }
    heed_interrupts();
    let test = "no_server_outlives_its_process_for_long";
    for signal in [Signal::INT, Signal::TERM, Signal::KILL] {
        let mut child = child_of(test, &[]);
        let told = told_by(&mut child).await;
        let servers: Vec<_> = told.split(' ').collect();
        for server in &servers {
            TcpStream::connect(server).await.unwrap();
        }
        let pid = Pid::from_raw(child.id().unwrap().try_into().unwrap()).unwrap();
        kill_process(pid, signal).unwrap();
        timeout(PATIENCE, child.wait()).await.unwrap().unwrap();
        if signal == Signal::KILL {
            // Nobody could tell the engine, where there is one: the next run does.
            let mut next = child_of(test, &[]);
            told_by(&mut next).await;
            next.kill().await.unwrap();
            let mut last = child_of(test, &[]);
            told_by(&mut last).await;
            kill_process(
                Pid::from_raw(last.id().unwrap().try_into().unwrap()).unwrap(),
                Signal::TERM,
            )
            .unwrap();
            timeout(PATIENCE, last.wait()).await.unwrap().unwrap();
        }
        for server in servers {
            refuses(server).await;
        }
    }
}

#[tokio::test]
async fn a_server_that_the_environment_names_is_used_and_left_alone() {
    if std::env::var_os(CHILD).is_some() {
        let server = Server::start(&Kind::REDIS).await.unwrap();
        assert!(!server.is_ours());
        assert!(server.kill().await.is_err());
        println!("{server}");
        return;
    }
    let test = "a_server_that_the_environment_names_is_used_and_left_alone";
    let server = Server::start_own(&Kind::REDIS, &[]).await.unwrap();
    let mut redis = Redis::connect(server.authority()).await;
    assert_eq!(redis.ask("CONFIG SET requirepass secret").await, "+OK");
    let variable = Kind::REDIS.url_variable();
    let url = format!("redis://:secret@{}/3", server.authority());
    let child = child_of(test, &[(&variable, &url)]).wait_with_output().await.unwrap();
    assert!(child.status.success());
    let expected = format!("{} of {variable} at {}", server.version(), server.authority());
    let told = String::from_utf8(child.stdout).unwrap();
    assert!(told.contains(&expected), "{told}");
    assert_eq!(redis.ask("PING").await, "+PONG");

    // One that is named and is not there is a failure, not a reason to look elsewhere.
    for url in ["redis://:wrong@", "redis://"] {
        let url = format!("{url}{}", server.authority());
        let refused = child_of(test, &[(&variable, &url)]).wait_with_output().await.unwrap();
        assert!(!refused.status.success());
        let told = String::from_utf8(refused.stderr).unwrap();
        assert!(told.contains("NOAUTH") || told.contains("WRONGPASS"), "{told}");
    }
}
