//! Tokens when the server behind a proxy goes back.

use std::time::Duration;

use lock_core::DistributedLock;
use test_servers::Data;

use crate::server::{config, start};
use crate::tokens::{claim_of, proxy, taken};

#[tokio::test]
async fn a_restore_behind_a_proxy_that_keeps_the_connection_lowers_no_token() {
    let server = start().await;
    let proxy = proxy(&server, false).await;
    let lock = config(&proxy).connect().await.unwrap();
    taken(&lock, "n").await;
    server.copy().await.unwrap();
    let mut last = taken(&lock, "n").await.1;
    for _ in 0..20 {
        last = taken(&lock, "n").await.1;
    }
    server.restart(Data::Copied).await.unwrap();
    let next = loop {
        let wanted = claim_of("n", 16);
        match lock.try_acquire(&wanted).await {
            Ok(attempt) => match attempt.granted() {
                Some(grant) => break grant.first_token(),
                None => tokio::time::sleep(Duration::from_millis(50)).await,
            },
            Err(error) => assert!(error.is_retryable(), "{error}"),
        }
        let _ = lock.release(&wanted, None).await;
    };
    assert!(next > last, "{next} after {last}");
}
