//! Several processes at one server.

use std::collections::BTreeMap;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use lock_core::{DistributedLock, Grant, Locks, OwnerId};
use lock_redis::redis::{Cmd, aio::MultiplexedConnection};
use lock_redis::{RedisConfig, RedisLock};
use rustix::process::Signal;
use tokio::task::JoinHandle;

use crate::process::{Process, listen, tell};
use crate::server::{LONG, Server, claim, granted, name, until, until_queued, waited};

#[tokio::test]
async fn waiters_in_several_processes_take_at_most_three_scripts_each_and_their_turns_in_order() {
    contended(3, 5, 10).await;
}

#[tokio::test]
async fn a_killed_waiter_is_passed_over_within_the_release() {
    let line = Line::form(LONG).await;
    line.process.signal(Signal::KILL);
    until_gone(&line.server, 2).await;
    line.release().await;
    // Granted by the release itself: asked right after it, the server names the next one.
    let (owner, _) = holder(&line.server).await;
    let (grant, _lock) = line.next.await.unwrap();
    assert_eq!(grant.claim.owner(), owner);
    assert!(grant.token > line.held.token);
}

#[tokio::test]
async fn a_killed_test_leaves_no_server_behind() {
    let server = Server::start();
    let mut test = Process::start("keep a server", &server);
    let line = test.line();
    let (port, folder) = line.split_once(' ').unwrap();
    let port: u16 = port.parse().unwrap();
    let is_up = async || tokio::net::TcpStream::connect(("127.0.0.1", port)).await.is_ok();
    assert!(is_up().await && std::path::Path::new(folder).exists());
    test.signal(Signal::KILL);
    until("its server ends", async || !is_up().await).await;
    until("the files of its server are removed", async || {
        !std::path::Path::new(folder).exists()
    })
    .await;
}

/// What a process does: starts a server of its own, and tells where it listens and where its files are.
pub(crate) fn keep_a_server() {
    let server = Server::start();
    tell("ready");
    tell(format!("{} {}", server.port(), server.path("").display()));
    listen();
}

/// What a process does: locks `n` for as many milliseconds as it is asked for, and tells its token; then whether it holds the lock, each
/// time it is asked.
pub(crate) async fn lock(port: u16) {
    let lock = RedisConfig::new("127.0.0.1", port).connect().await.unwrap();
    let locks = Locks::new(lock);
    tell("ready");
    let Some(ttl) = listen() else { return };
    let ttl = Duration::from_millis(ttl.parse().unwrap());
    let guard = locks.lock("n").ttl(ttl).await.unwrap();
    tell(guard.token());
    while listen().is_some() {
        tell(guard.is_held());
    }
}

/// A server, a holder, and behind it in the queue a process and then a client.
pub(crate) struct Line {
    pub(crate) server: Server,
    holder: RedisLock,
    pub(crate) held: Grant,
    pub(crate) process: Process,
    pub(crate) next: JoinHandle<(Grant, RedisLock)>,
}

impl Line {
    /// The process asks for a lease of `ttl`.
    pub(crate) async fn form(ttl: Duration) -> Self {
        let server = Server::start();
        let holder = server.client().await;
        let held = granted(&holder, &claim("n", LONG)).await;
        let mut process = Process::start("lock", &server);
        process.say(&ttl.as_millis().to_string());
        until_queued(&server, "n", 1).await;
        let next = wait(server.client().await);
        until_queued(&server, "n", 2).await;
        Self {
            server,
            holder,
            held,
            process,
            next,
        }
    }

    pub(crate) async fn release(&self) {
        self.holder.release(&self.held.claim, None).await.unwrap();
    }
}

/// A wait for `n` in a task of its own. Its refreshes are further apart than it waits.
fn wait(lock: RedisLock) -> JoinHandle<(Grant, RedisLock)> {
    tokio::spawn(async move { (waited(&lock, &claim("n", LONG)).await, lock) })
}

/// Who holds `n`, and when that was granted, by the server's clock, which is that of this machine.
pub(crate) async fn holder(server: &Server) -> (OwnerId, SystemTime) {
    let held = server.client().await.holders(&name("n")).await.unwrap().pop().unwrap();
    (held.owner.unwrap(), held.acquired_at.unwrap())
}

/// Waits until the server has seen the process end: its channel has nobody left.
async fn until_gone(server: &Server, left: usize) {
    until("the server has seen the process end", async || {
        server.command::<Vec<String>>("PUBSUB CHANNELS *").await.len() <= left
    })
    .await;
}

/// That many processes with that many waiters each, each of which has that many turns: the server counts what it is asked.
pub(crate) async fn contended(processes: usize, waiters: usize, rounds: usize) {
    let server = Server::start();
    let mut players: Vec<_> = (0..processes).map(|_| Process::start("take turns", &server)).collect();
    let mut con = server.plain().await;
    let before = calls(&mut con).await;
    let began = Instant::now();
    for player in &mut players {
        player.say(&format!("{waiters} {rounds}"));
    }
    let turns: Vec<String> = players.into_iter().flat_map(Process::finish).collect();
    let took = began.elapsed();
    let after = calls(&mut con).await;
    let scripts = |calls: &BTreeMap<String, u64>| calls.get("evalsha").unwrap_or(&0) + calls.get("eval").unwrap_or(&0);
    // Token, when it was granted, when it was about to be released.
    let mut turns: Vec<[u64; 3]> = turns
        .iter()
        .map(|line| {
            let mut numbers = line.split(' ').map(|number| number.parse().unwrap());
            [(); 3].map(|()| numbers.next().unwrap())
        })
        .collect();
    turns.sort_unstable();
    assert_eq!(turns.len(), processes * waiters * rounds);
    let each = (scripts(&after) - scripts(&before)) as f64 / turns.len() as f64;
    let mut gaps = Vec::new();
    for pair in turns.windows(2) {
        let ([_, _, released], [_, granted, _]) = (pair[0], pair[1]);
        let gap = granted.checked_sub(released);
        gaps.push(Duration::from_nanos(
            gap.expect("the next is granted after the release"),
        ));
    }
    gaps.sort_unstable();
    let at = |percent: usize| gaps[(gaps.len() - 1) * percent / 100];
    println!(
        "{} waiters in {processes} processes: {each:.2} scripts for each of {} acquisitions, {:.0} of them per second; \
         hand-over p50 {:?}, p99 {:?}, most {:?}",
        processes * waiters,
        turns.len(),
        turns.len() as f64 / took.as_secs_f64(),
        at(50),
        at(99),
        at(100)
    );
    assert!(each <= 3.0, "{each}");
    assert_eq!(server.leftovers().await, Vec::<String>::new());
}

/// What a process does: as many waiters as it is asked for take as many turns each.
pub(crate) async fn take_turns(port: u16) {
    let lock = RedisConfig::new("127.0.0.1", port).connect().await.unwrap();
    let locks = Locks::new(lock);
    tell("ready");
    let Some(numbers) = listen() else { return };
    let (waiters, rounds) = numbers.split_once(' ').unwrap();
    let (waiters, rounds): (usize, usize) = (waiters.parse().unwrap(), rounds.parse().unwrap());
    let waiters: Vec<_> = (0..waiters)
        .map(|_| {
            let locks = locks.clone();
            tokio::spawn(async move {
                for _ in 0..rounds {
                    let guard = locks.lock("n").ttl(LONG).await.unwrap();
                    let (token, taken) = (guard.token(), now());
                    tell(format!("{token} {taken} {}", now()));
                    guard.release().await.unwrap();
                }
            })
        })
        .collect();
    for waiter in waiters {
        waiter.await.unwrap();
    }
    locks.shutdown().await.unwrap();
}

/// How often each command was called, but for this question.
pub(crate) async fn calls(con: &mut MultiplexedConnection) -> BTreeMap<String, u64> {
    let stats: String = Cmd::new()
        .arg("INFO")
        .arg("commandstats")
        .query_async(con)
        .await
        .unwrap();
    let calls = |line: &str| {
        let (command, rest) = line.strip_prefix("cmdstat_")?.split_once(":calls=")?;
        Some((command.to_owned(), rest.split(',').next()?.parse().ok()?))
    };
    let mut calls: BTreeMap<_, _> = stats.lines().filter_map(calls).collect();
    calls.remove("info");
    calls
}

/// By the clock that all processes of the machine share.
fn now() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    u64::try_from(now.as_nanos()).unwrap()
}
