//! What waiting and holding cost, counted by the server.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod server;

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use lock_core::Locks;
use server::{LONG, Server};
use tokio::sync::Mutex as Turns;

/// What is measured is measured alone.
static TURNS: Turns<()> = Turns::const_new(());

/// How often each command was called, and how much time the server spent in all of them.
async fn commands(server: &Server) -> (u64, String) {
    let stats: String = server.command("INFO commandstats").await;
    let calls = |line: &str| line.split_once("calls=")?.1.split(',').next()?.parse::<u64>().ok();
    let scripts = stats
        .lines()
        .filter(|l| l.starts_with("cmdstat_eval"))
        .filter_map(calls)
        .sum();
    (scripts, stats)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_contended_acquisition_takes_at_most_three_scripts() {
    const CLIENTS: usize = 10;
    const WAITERS: usize = 10;
    const ROUNDS: usize = 20;
    let _turn = TURNS.lock().await;
    let server = Server::start();
    let mut clients = Vec::new();
    for _ in 0..CLIENTS {
        clients.push(Locks::new(server.client().await));
    }
    let released = Arc::new(Mutex::new(None::<Instant>));
    let gaps = Arc::new(Mutex::new(Vec::new()));
    let (before, _) = commands(&server).await;
    let began = Instant::now();
    let mut tasks = Vec::new();
    for i in 0..CLIENTS * WAITERS {
        let (locks, released, gaps) = (clients[i % CLIENTS].clone(), Arc::clone(&released), Arc::clone(&gaps));
        tasks.push(tokio::spawn(async move {
            for _ in 0..ROUNDS {
                let guard = locks.lock("n").ttl(LONG).await.unwrap();
                let now = Instant::now();
                if let Some(then) = released.lock().unwrap().replace(now) {
                    gaps.lock().unwrap().push(now - then);
                }
                *released.lock().unwrap() = Some(Instant::now());
                guard.release().await.unwrap();
            }
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
    let took = began.elapsed();
    let (after, stats) = commands(&server).await;
    let acquisitions = (CLIENTS * WAITERS * ROUNDS) as f64;
    let each = (after - before) as f64 / acquisitions;
    let mut gaps = std::mem::take(&mut *gaps.lock().unwrap());
    gaps.sort_unstable();
    let at = |share: f64| gaps[(gaps.len() as f64 * share) as usize];
    println!(
        "{each:.2} scripts for each of {acquisitions} acquisitions, {:.0} per second",
        acquisitions / took.as_secs_f64()
    );
    println!(
        "hand-over p50 {:?}, p99 {:?}, most {:?}",
        at(0.5),
        at(0.99),
        at(1.0 - 1e-9)
    );
    println!("{stats}");
    assert!(each <= 3.0, "{each}");
    for locks in clients {
        locks.shutdown().await.unwrap();
    }
    assert_eq!(server.leftovers().await, Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn many_held_locks_are_renewed_without_disturbing_acquisitions() {
    const HELD: usize = 10_000;
    const TTL: Duration = Duration::from_secs(6);
    let _turn = TURNS.lock().await;
    let server = Server::start();
    let memory = |info: &str| -> i64 {
        let line = info.lines().find_map(|line| line.strip_prefix("used_memory:")).unwrap();
        line.trim().parse().unwrap()
    };
    let before = memory(&server.command::<String>("INFO memory").await);
    let (holder, other) = (Locks::new(server.client().await), Locks::new(server.client().await));
    let began = Instant::now();
    let mut guards = Vec::new();
    for hundred in 0..HELD / 100 {
        let ask = |i: usize| holder.lock(format!("held/{}", hundred * 100 + i)).ttl(TTL);
        let asking: Vec<_> = (0..100).map(|i| tokio::spawn(ask(i).into_future())).collect();
        for asked in asking {
            guards.push(asked.await.unwrap().unwrap());
        }
    }
    println!("{HELD} locks taken in {:?}", began.elapsed());
    let each = (memory(&server.command::<String>("INFO memory").await) - before) / HELD as i64;
    println!("{each} bytes for each on the server, with its counter");
    let mut slowest = Duration::ZERO;
    let mut margin = TTL;
    let end = Instant::now() + TTL * 2;
    let mut taken = 0;
    while Instant::now() < end {
        let asked = Instant::now();
        other.lock("n").await.unwrap().release().await.unwrap();
        slowest = slowest.max(asked.elapsed());
        taken += 1;
        margin = margin.min(guards.iter().map(|guard| guard.remaining()).min().unwrap());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let cpu: String = server.command("INFO cpu").await;
    println!("{taken} acquisitions beside their renewals, the slowest {slowest:?}; least remaining {margin:?}");
    println!("{cpu}");
    assert!(guards.iter().all(|guard| guard.is_held()));
    assert_eq!(holder.stats().lost, 0);
    holder.shutdown().await.unwrap();
    other.shutdown().await.unwrap();
}
