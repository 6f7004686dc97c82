//! Counters of tokens: when they end, and what they cost.

use std::time::Duration;

use lock_core::{DistributedLock, LockError};

use crate::server::{LONG, Server, claim, granted, until};
use crate::tokens::token;

#[tokio::test]
async fn a_counter_is_kept_for_a_second_to_a_year() {
    let server = Server::start();
    for time in [Duration::ZERO, Duration::from_millis(999), Duration::MAX] {
        let refused = server.config().counter_retention(time).connect().await.unwrap_err();
        assert!(matches!(refused, LockError::Configuration { .. }), "{refused}");
    }
    let brief = server
        .config()
        .counter_retention(Duration::from_secs(1))
        .connect()
        .await
        .unwrap();
    let first = token(&brief).await;
    until("the counter has ended", async || {
        !server.command::<bool>("EXISTS {fencelock:n}:fence").await
    })
    .await;
    // From the clock, which has gone on.
    assert!(token(&brief).await > first);
}

#[tokio::test]
async fn a_name_costs_what_the_documentation_says() {
    const NAMES: i64 = 4_000;
    let server = Server::start();
    let lock = server.client().await;
    let memory = async || -> i64 {
        let info: String = server.command("INFO memory").await;
        let line = info.lines().find_map(|line| line.strip_prefix("used_memory:")).unwrap();
        line.trim().parse().unwrap()
    };
    token(&lock).await;
    let before = memory().await;
    for name in 0..NAMES {
        let claim = claim(&format!("order/{name:08}"), LONG);
        granted(&lock, &claim).await;
        lock.release(&claim, None).await.unwrap();
    }
    let each = (memory().await - before) / NAMES;
    println!("{each} bytes for each name");
    assert!(each < 200, "{each}");
}
