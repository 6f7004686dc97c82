//! Many processes take turns, and the server counts what it is asked.

use std::collections::BTreeMap;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use lock_core::{DistributedLock, Locks};
use lock_redis::RedisConfig;
use lock_redis::redis::{Cmd, aio::MultiplexedConnection};

use crate::player::Player;
use crate::server::{LONG, Server, claim, granted, until_queued};

const PROCESSES: usize = 10;
const WAITERS: usize = 10;
const ROUNDS: usize = 20;

pub(crate) async fn contended() {
    let server = Server::start();
    let mut players: Vec<_> = (0..PROCESSES).map(|_| Player::start("take turns", &server)).collect();
    let mut con = server.plain().await;
    let before = calls(&mut con).await;
    let began = Instant::now();
    for player in &mut players {
        player.say("go");
    }
    let turns: String = players.into_iter().map(Player::finish).collect();
    let took = began.elapsed();
    let after = calls(&mut con).await;
    let scripts = |calls: &BTreeMap<String, u64>| calls.get("evalsha").unwrap_or(&0) + calls.get("eval").unwrap_or(&0);
    // Token, when it was granted, when it was about to be released.
    let mut turns: Vec<[u64; 3]> = turns
        .lines()
        .map(|line| {
            let mut numbers = line.split(' ').map(|number| number.parse().unwrap());
            [(); 3].map(|()| numbers.next().unwrap())
        })
        .collect();
    turns.sort_unstable();
    assert_eq!(turns.len(), PROCESSES * WAITERS * ROUNDS);
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
        "{} waiters in {PROCESSES} processes: {each:.2} scripts for each of {} acquisitions, {:.0} of them per second; \
         hand-over p50 {:?}, p99 {:?}, most {:?}",
        PROCESSES * WAITERS,
        turns.len(),
        turns.len() as f64 / took.as_secs_f64(),
        at(50),
        at(99),
        at(100)
    );
    assert!(each <= 3.0, "{each}");
    assert_eq!(server.leftovers().await, Vec::<String>::new());
}

pub(crate) async fn take_turns(port: u16) {
    let lock = RedisConfig::new("127.0.0.1", port).connect().await.unwrap();
    let locks = Locks::new(lock);
    println!("ready");
    std::io::stdin().read_line(&mut String::new()).unwrap();
    let waiters: Vec<_> = (0..WAITERS)
        .map(|_| {
            let locks = locks.clone();
            tokio::spawn(async move {
                for _ in 0..ROUNDS {
                    let guard = locks.lock("n").ttl(LONG).await.unwrap();
                    let (token, taken) = (guard.token(), now());
                    println!("{token} {taken} {}", now());
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

pub(crate) async fn quiet() {
    let server = Server::start();
    let holder = server.client().await;
    let held = claim("n", LONG);
    granted(&holder, &held).await;
    let mut players: Vec<_> = (0..PROCESSES).map(|_| Player::start("take turns", &server)).collect();
    for player in &mut players {
        player.say("go");
    }
    // One for each process; the others wait in it.
    until_queued(&server, "n", PROCESSES).await;
    let mut con = server.plain().await;
    let before = calls(&mut con).await;
    // Far less than a third of the ttl.
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(calls(&mut con).await, before);
    holder.release(&held).await.unwrap();
    players.into_iter().for_each(|player| drop(player.finish()));
}

/// How often each command was called, but for this question.
async fn calls(con: &mut MultiplexedConnection) -> BTreeMap<String, u64> {
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
