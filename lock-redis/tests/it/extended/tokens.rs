//! Counters of tokens: when they end, and what they cost.

use lock_core::DistributedLock;

use crate::server::{LONG, Server, claim, granted};
use crate::tokens::token;

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
