//! What the backend does that takes many locks or time, and what it asks of the server.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use lock_core::{DistributedLock, Locks};
use lock_redis::redis::aio::MultiplexedConnection;

use crate::server::{LONG, Server, claim, granted, scripts, until, until_queued, waiting};

/// `FENCELOCK_TEST_LOCKS` sets another number, such as 200000.
#[tokio::test]
async fn a_list_of_many_locks_is_complete_and_read_in_batches() {
    let number = std::env::var("FENCELOCK_TEST_LOCKS").ok();
    let number: usize = number.map_or(10_000, |number| number.parse().unwrap());
    let server = Server::start();
    let lock = server.client().await;
    let mut con = server.plain().await;
    for thousand in 0..number.div_ceil(1000) {
        let mut some = lock_redis::redis::pipe();
        for i in thousand * 1000..number.min((thousand + 1) * 1000) {
            let value = format!(
                "1 {} {} 1700000000000000 client 7 host",
                claim("n", LONG).owner(),
                i + 1
            );
            some.set_options(
                format!("{{fencelock:order/{i:07}}}:lock"),
                value,
                lock_redis::redis::SetOptions::default().with_expiration(lock_redis::redis::SetExpiry::PX(600_000)),
            );
            some.set(format!("{{fencelock:order/{i:07}}}:fence"), i + 1);
        }
        some.exec_async(&mut con).await.unwrap();
    }
    let _: () = server.command("CONFIG RESETSTAT").await;
    let began = Instant::now();
    let listed = lock.list("order/").await.unwrap();
    println!("{number} locks listed in {:?}", began.elapsed());
    assert_eq!(listed.len(), number);
    for (i, holder) in listed.iter().enumerate() {
        assert_eq!(holder.name.as_ref().unwrap().as_str(), format!("order/{i:07}"));
        assert_eq!(holder.token.unwrap().get(), i as u64 + 1);
        assert!(holder.remaining.is_some() && holder.pid == Some(7));
    }
    let stats: String = server.command("INFO commandstats").await;
    let of = |command: &str, field: &str| -> f64 {
        let line = stats
            .lines()
            .find(|line| line.starts_with(&format!("cmdstat_{command}:")));
        line.and_then(|line| line.split_once(&format!("{field}="))?.1.split(',').next()?.parse().ok())
            .unwrap_or(0.0)
    };
    let requests = of("scan", "calls") + of("evalsha", "calls") + of("eval", "calls");
    println!(
        "{requests} requests; a step of the scan takes {} us, one of reading {} us",
        of("scan", "usec_per_call"),
        of("evalsha", "usec_per_call")
    );
    assert!(requests < number as f64 / 50.0, "{requests}");
}

#[tokio::test]
async fn a_waiter_refreshes_its_place_and_nothing_else_is_sent() {
    const TTL: Duration = Duration::from_millis(1500);
    const REFRESHES: u64 = 5;
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let (held, wanted) = (claim("n", LONG), claim("n", TTL));
    granted(&a, &held).await;
    let wait = waiting(&b, &wanted);
    until_queued(&server, "n", 1).await;
    let mut con = server.plain().await;
    let before = calls(&mut con).await;
    let began = Instant::now();
    until("its place is refreshed", async || {
        calls(&mut con).await["evalsha"] >= before["evalsha"] + REFRESHES
    })
    .await;
    // Every third of the ttl, and sooner after a request that was slow, but never twice within a sixth. The first one may be due at once.
    let elapsed = began.elapsed();
    assert!(elapsed >= TTL / 6 * (REFRESHES as u32 - 1), "{elapsed:?}");
    // Longer than a place lives without refreshing.
    assert_eq!(server.command::<usize>("ZCARD {fencelock:n}:order").await, 1);
    // What scripts call is counted, too.
    let after = calls(&mut con).await;
    for command in ["eval", "hello", "ping", "subscribe", "unsubscribe"] {
        assert_eq!(after.get(command), before.get(command), "{command}");
    }
    a.release(&held, None).await.unwrap();
    wait.await.unwrap();
}

#[tokio::test]
async fn who_waits_is_in_the_queue_with_its_first_request() {
    const ROUNDS: usize = 20;
    let server = Server::start();
    let clients = [Locks::new(server.client().await), Locks::new(server.client().await)];
    let mut guard = clients[0].lock("n").ttl(LONG).await.unwrap();
    let mut before = 0;
    // In the first two the server gets to know the scripts.
    for round in 1..=ROUNDS + 2 {
        let next = tokio::spawn(clients[round % 2].lock("n").ttl(LONG).into_future());
        until_queued(&server, "n", 1).await;
        guard.release().await.unwrap();
        guard = next.await.unwrap().unwrap();
        if round == 2 {
            before = scripts(&server).await;
        }
    }
    // One to acquire and one to release.
    assert_eq!(scripts(&server).await - before, 2 * ROUNDS as u64);
    guard.release().await.unwrap();
}

/// How often the server has run each command.
async fn calls(con: &mut MultiplexedConnection) -> BTreeMap<String, u64> {
    let info = lock_redis::redis::cmd("INFO").arg("commandstats").clone();
    let stats: String = info.query_async(con).await.unwrap();
    let calls = |line: &str| {
        let (command, rest) = line.strip_prefix("cmdstat_")?.split_once(":calls=")?;
        Some((command.to_owned(), rest.split(',').next()?.parse().ok()?))
    };
    let mut calls: BTreeMap<_, _> = stats.lines().filter_map(calls).collect();
    calls.remove("info");
    calls
}
