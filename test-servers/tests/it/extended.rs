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

/// Which of two keys the server knows, each as 0 or 1.
async fn knows(server: &Server) -> (Redis, String) {
    let mut redis = Redis::connect(server.authority()).await;
    let known = redis.ask("EXISTS a").await + &redis.ask("EXISTS b").await;
    (redis, known)
}

async fn serves_restarts_and_forgets(kind: &'static Kind, version: &str) {
    let server = Server::start_own(kind, &[]).await.unwrap();
    let other = Server::start_own(kind, &[]).await.unwrap();
    assert!(server.version().starts_with(version), "{server}");
    assert_eq!(server.url(), format!("redis://{}", server.authority()));
    let (mut redis, _) = knows(&server).await;
    assert_eq!(redis.ask("SET a 1").await, "+OK");
    assert_eq!(knows(&other).await.1, ":0:0", "servers of one kind share nothing");

    server.kill().await.unwrap();
    assert!(redis.try_ask("PING").await.map_or(true, |answer| answer.is_empty()));
    assert!(TcpStream::connect(server.authority()).await.is_err());
    server.restart(Data::Kept).await.unwrap();
    let (mut redis, known) = knows(&server).await;
    assert_eq!(known, ":1:0");

    server.pause().await.unwrap();
    assert!(timeout(QUIET, redis.try_ask("PING")).await.is_err());
    server.resume().await.unwrap();
    server.copy().await.unwrap();
    let (mut redis, _) = knows(&server).await;
    assert_eq!(redis.ask("SET b 1").await, "+OK");
    server.restart(Data::Copied).await.unwrap();
    let (mut redis, known) = knows(&server).await;
    assert_eq!((&*known, &*redis.ask("SET b 1").await), (":1:0", "+OK"));

    // A paused server can be killed as well.
    server.pause().await.unwrap();
    server.restart(Data::Lost).await.unwrap();
    assert_eq!(knows(&server).await.1, ":0:0");
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
    let (start, pause) = (Instant::now(), Duration::from_millis(300));
    server.pause_for(pause).await.unwrap();
    assert_eq!(redis.ask("PING").await, "+PONG");
    assert!(start.elapsed() >= pause);
}

/// The faults that need nothing but a server that answers its own probe.
async fn restarts(kind: &'static Kind, version: &str) {
    let server = Server::start_own(kind, &[]).await.unwrap();
    assert!(server.version().starts_with(version), "{server}");
    server.copy().await.unwrap();
    for data in [Data::Kept, Data::Copied, Data::Lost] {
        server.restart(data).await.unwrap();
    }
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

/// Starts the child, and returns what it says of its servers.
async fn told_by_child_of(test: &str) -> (Child, String) {
    let mut child = child_of(test, &[]);
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let told = async {
        loop {
            let line = lines.next_line().await.unwrap().expect("the child tells of its server");
            if let Some((_, told)) = line.split_once("started: ") {
                return told.to_owned();
            }
        }
    };
    let told = timeout(2 * PATIENCE, told).await.unwrap();
    (child, told)
}

async fn end(mut child: Child, signal: Signal) {
    let pid = Pid::from_raw(child.id().unwrap().try_into().unwrap());
    kill_process(pid.unwrap(), signal).unwrap();
    timeout(PATIENCE, child.wait()).await.unwrap().unwrap();
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
        let (child, told) = told_by_child_of(test).await;
        end(child, signal).await;
        if signal == Signal::KILL {
            // Nothing could tell the engine, where there is one: the next run does.
            end(told_by_child_of(test).await.0, Signal::TERM).await;
        }
        let ended = async {
            for server in told.split(' ') {
                while TcpStream::connect(server).await.is_ok() {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            }
        };
        let ended = timeout(PATIENCE, ended).await;
        assert!(ended.is_ok(), "a server of {told} is still there after {signal:?}");
    }
}

#[tokio::test]
async fn a_server_that_the_environment_names_is_used_and_left_alone() {
    if std::env::var_os(CHILD).is_some() {
        let server = Server::start(&Kind::REDIS).await.unwrap();
        assert!(!server.is_ours() && server.kill().await.is_err());
        println!("{server}");
        return;
    }
    let test = "a_server_that_the_environment_names_is_used_and_left_alone";
    let server = Server::start_own(&Kind::REDIS, &[]).await.unwrap();
    let mut redis = Redis::connect(server.authority()).await;
    assert_eq!(redis.ask("CONFIG SET requirepass secret").await, "+OK");
    let variable = Kind::REDIS.url_variable();
    // One that is named and is not there is a failure, not a reason to look elsewhere.
    for (login, succeeds) in [(":secret@", true), (":wrong@", false), ("", false)] {
        let url = format!("redis://{login}{}", server.authority());
        let child = child_of(test, &[(&variable, &url)]).wait_with_output().await.unwrap();
        assert_eq!(child.status.success(), succeeds, "{url}");
        let told = String::from_utf8([child.stdout, child.stderr].concat()).unwrap();
        let expected = match succeeds {
            true => format!("{} of {variable} at {}", server.version(), server.authority()),
            false => format!("{variable} at {} does not answer", server.authority()),
        };
        assert!(told.contains(&expected), "{told}");
        assert_eq!(redis.ask("PING").await, "+PONG");
    }
}
