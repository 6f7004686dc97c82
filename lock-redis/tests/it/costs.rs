//! What requests cost: how many there are, and that none costs more the more clients wait or share.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use lock_core::{DistributedLock, Locks};
use lock_redis::redis::{self, SetExpiry, SetOptions};

use crate::server::{Ask, LONG, Server, claim, granted, start, until, waiting};

/// `FENCELOCK_TEST_LOCKS` sets another number, such as 200000.
#[tokio::test]
async fn a_list_of_many_locks_is_complete_and_read_in_batches() {
    let number = std::env::var("FENCELOCK_TEST_LOCKS").ok();
    let number: usize = number.map_or(10_000, |number| number.parse().unwrap());
    let server = start().await;
    let lock = server.client().await;
    let mut con = server.plain().await;
    let owner = claim("n", LONG).owner();
    for thousand in 0..number.div_ceil(1000) {
        let mut some = redis::pipe();
        for i in thousand * 1000..number.min((thousand + 1) * 1000) {
            let value = format!("1 {owner} {} 1700000000000000 client 7 host", i + 1);
            let expires = SetOptions::default().with_expiration(SetExpiry::PX(600_000));
            some.set_options(format!("{{fencelock:order/{i:07}}}:lock"), value, expires);
            some.set(format!("{{fencelock:order/{i:07}}}:fence"), i + 1);
        }
        some.exec_async(&mut con).await.unwrap();
    }
    let before = calls(&server).await;
    let listed = lock.list("order/").await.unwrap();
    assert_eq!(listed.len(), number);
    for (i, holder) in listed.iter().enumerate() {
        assert_eq!(holder.name.as_ref().unwrap().as_str(), format!("order/{i:07}"));
        assert_eq!(holder.token.unwrap().get(), i as u64 + 1);
        assert!(holder.remaining.is_some() && holder.pid == Some(7));
    }
    // Each batch begins with the time.
    let after = calls(&server).await;
    let more = |command: &str| after.get(command).unwrap_or(&0) - before.get(command).unwrap_or(&0);
    let requests = more("scan") + more("time");
    assert!(requests < number as u64 / 50, "{requests} requests");
}

/// How often the server has run each command, those in scripts included.
async fn calls(server: &Server) -> BTreeMap<String, u64> {
    let stats: String = server.command("INFO commandstats").await;
    let calls = |line: &str| {
        let (command, rest) = line.strip_prefix("cmdstat_")?.split_once(":calls=")?;
        Some((command.to_owned(), rest.split(',').next()?.parse().ok()?))
    };
    stats.lines().filter_map(calls).collect()
}

#[tokio::test]
async fn a_waiter_refreshes_its_place_and_nothing_else_is_sent() {
    const TTL: Duration = Duration::from_millis(1500);
    const REFRESHES: u64 = 5;
    let server = start().await;
    let (a, b) = (server.client().await, server.client().await);
    let held = claim("n", LONG);
    granted(&a, &held).await;
    let wait = waiting(&b, &claim("n", TTL));
    server.until_queued("n", 1).await;
    let (before, began) = (calls(&server).await, Instant::now());
    until("its place is refreshed", async || {
        calls(&server).await["evalsha"] >= before["evalsha"] + REFRESHES
    })
    .await;
    // Every third of the ttl, and sooner after a request that was slow, but never twice within a sixth. The first one may be due at once.
    let elapsed = began.elapsed();
    assert!(elapsed >= TTL / 6 * (REFRESHES as u32 - 1), "{elapsed:?}");
    // Longer than a place lives without refreshing.
    server.until_queued("n", 1).await;
    let after = calls(&server).await;
    for command in ["eval", "subscribe", "unsubscribe", "ping"] {
        assert_eq!(after.get(command), before.get(command), "{command}");
    }
    a.release(&held, None).await.unwrap();
    wait.await.unwrap();
}

#[tokio::test]
async fn a_lock_costs_one_script_to_acquire_and_one_to_release_whether_it_is_waited_for_or_not() {
    const ROUNDS: usize = 20;
    let server = start().await;
    let clients = [Locks::new(server.client().await), Locks::new(server.client().await)];
    let mut guard = clients[0].lock("n").ttl(LONG).await.unwrap();
    let mut before = 0;
    // In the first two the server gets to know the scripts.
    for round in 1..=ROUNDS + 2 {
        let next = tokio::spawn(clients[round % 2].lock("n").ttl(LONG).into_future());
        server.until_queued("n", 1).await;
        guard.release().await.unwrap();
        guard = next.await.unwrap().unwrap();
        clients[0].lock("free").await.unwrap().release().await.unwrap();
        if round == 2 {
            before = server.scripts().await;
        }
    }
    assert_eq!(server.scripts().await - before, 4 * ROUNDS as u64);
    guard.release().await.unwrap();
}

#[tokio::test]
async fn a_name_costs_the_memory_that_the_documentation_says() {
    const NAMES: i64 = 4_000;
    let server = start().await;
    let lock = server.client().await;
    let memory = async || -> i64 {
        let info: String = server.command("INFO memory").await;
        let line = info.lines().find_map(|line| line.strip_prefix("used_memory:")).unwrap();
        line.trim().parse().unwrap()
    };
    let take = async |name: &str| {
        let claim = claim(name, LONG);
        granted(&lock, &claim).await;
        lock.release(&claim, None).await.unwrap();
    };
    take("first").await;
    let before = memory().await;
    for name in 0..NAMES {
        take(&format!("order/{name:08}")).await;
    }
    let each = (memory().await - before) / NAMES;
    println!("{each} bytes for each name");
    assert!(each < 200, "{each}");
}
